"""Text as bytes: byte b is token b + 1, and 0 is padding or the end of a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellcond.experiments.settings import RecipeError

PADDING = 0
VOCABULARY = 257


def encode_bytes(text: str) -> Tensor:
    """Tokens 1 to 256.

    Example:
        >>> encode_bytes("é").tolist()
        [196, 170]
    """
    return (
        torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8).to(torch.int16) + 1
        if text
        else (torch.empty(0, dtype=torch.int16))
    )


def padded_documents(split: Any, length: int, progress: Callable[[int, int], None] | None = None) -> Tensor:
    """Documents cut or padded to one length: (n, length), int16. A pair is joined by a padding token."""
    tokens = torch.zeros(len(split), length, dtype=torch.int16)
    for row in range(len(split)):
        example = split[row]
        document = encode_bytes(example["text"])
        if "text_pair" in example:
            second = encode_bytes(example["text_pair"])
            document = torch.cat([document, torch.zeros(1, dtype=torch.int16), second])
        kept = document[:length]
        tokens[row, : len(kept)] = kept
        if progress is not None and row % 1000 == 0:
            progress(row, len(split))
    return tokens


def byte_stream(split: Any, what: str) -> Tensor:
    """All documents one after the other, each ended by token 0.

    Raises: RecipeError if there is no text at all.
    """
    end = torch.zeros(1, dtype=torch.int16)
    parts = [part for row in range(len(split)) for part in (encode_bytes(split[row]["text"]), end)]
    stream = torch.cat(parts) if parts else end
    if int((stream != 0).sum()) == 0:
        raise RecipeError(f"{what}: expected text, found none in {len(split)} documents")
    return stream

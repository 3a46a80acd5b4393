"""Text as bytes: byte b is token b + 1, and 0 is padding or the end of a document."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.lab.settings import RecipeError

PADDING = 0
VOCABULARY = 257


def utf8(text: str) -> bytes:
    """The text in UTF-8; half a surrogate pair, which UTF-8 does not know, as its three bytes."""
    return text.encode("utf-8", "surrogatepass")


def encode_bytes(text: str) -> Tensor:
    """Tokens 1 to 256; every byte is one.

    Example:
        >>> encode_bytes("é").tolist()
        [196, 170]
    """
    return (
        torch.frombuffer(bytearray(utf8(text)), dtype=torch.uint8).to(torch.int16) + 1
        if text
        else (torch.empty(0, dtype=torch.int16))
    )


class PackedDocuments:
    """Documents one behind the other in memory, at one byte a token: padding is added when a batch is made.

    Example:
        >>> documents = PackedDocuments()
        >>> documents.append(b"ab")
        >>> documents.append(b"")
        >>> len(documents), documents.tokens(0).tolist(), documents.tokens(1).tolist()
        (2, [98, 99], [])
    """

    def __init__(self) -> None:
        """Without documents."""
        self._content, self._ends = bytearray(), array("q", [0])

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._ends) - 1

    def append(self, document: bytes) -> None:
        """Add one document."""
        self._content += document
        self._ends.append(len(self._content))

    def tokens(self, index: int) -> np.ndarray:
        """One document, int64."""
        start, end = self._ends[index], self._ends[index + 1]
        if start == end:  # numpy reads nothing from an empty buffer
            return np.empty(0, dtype=np.int64)
        return np.add(np.frombuffer(self._content, np.uint8, count=end - start, offset=start), 1, dtype=np.int64)


def read_documents(
    split: Any, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[bytes, bytes | None]]:
    """The text of every example, and its second text if it is a pair."""
    for row in range(len(split)):
        example = split[row]
        second = example.get("text_pair")
        yield utf8(example["text"]), None if second is None else utf8(second)
        if progress is not None and row % 1000 == 0:
            progress(row, len(split))


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

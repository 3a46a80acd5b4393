"""What the tasks ask of a tokeniser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.errors import DataError


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that stand for no text; None where a tokeniser has none."""

    pad: int | None = None
    unknown: int | None = None
    classify: int | None = None
    """[CLS]"""
    separator: int | None = None
    """[SEP]"""
    mask: int | None = None
    end_of_text: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All there are, each once, in ascending order."""
        return tuple(sorted({value for value in vars(self).values() if value is not None}))


class Tokenizer(Protocol):
    """Text to numbers and back; no special token is added to a text."""

    @property
    def vocabulary_size(self) -> int:
        """Ids are below it."""

    @property
    def special(self) -> SpecialTokens:
        """Ids of the special tokens."""

    @property
    def fingerprint(self) -> str:
        """Sha256 of everything that decides the ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Ids of each text, in `id_type(vocabulary_size)`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""


def id_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smaller of two unsigned types that holds every id.

    Example:
        >>> id_type(50257), id_type(65537)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def document_end(tokenizer: Tokenizer) -> int:
    """The token that ends a document in a stream: end of text, or [SEP].

    Raises: DataError if the tokeniser has neither.
    """
    special = tokenizer.special
    end = special.end_of_text if special.end_of_text is not None else special.separator
    if end is None:
        raise DataError(
            "the tokeniser has no token that could end a document.",
            expected="<|endoftext|>, </s>, [SEP] or <eos> in its vocabulary",
            found=f"{tokenizer.vocabulary_size} tokens without any of these",
            todo="Add such a token to the tokeniser's file, or train a tokeniser: {train: bpe, vocabulary: 4096}.",
        )
    return end

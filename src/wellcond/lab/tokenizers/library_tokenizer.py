"""A tokeniser of the `tokenizers` library behind the interface of the tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellcond.errors import MissingExtraError
from wellcond.lab.tokenizers.base import SpecialTokens, id_type

NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "classify": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "end_of_text": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"),
}
"""How vocabularies spell the special tokens; the first that is there counts."""


def import_tokenizers() -> Any:
    """The module `tokenizers`.

    Raises: MissingExtraError if it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "text") from error
    return tokenizers


class LibraryTokenizer:
    """Texts of a batch are encoded in parallel by the library, without this process's lock.

    A text that spells a special token, such as <|endoftext|>, has that token.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take over a `tokenizers.Tokenizer`; it no longer cuts or pads."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.inner = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = 1 + max(vocabulary.values(), default=-1)
        found = {
            kind: next((vocabulary[name] for name in names if name in vocabulary), None)
            for kind, names in NAMES.items()
        }
        self.special = SpecialTokens(**found)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of the tokeniser as the library writes it."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Ids of each text; half a surrogate pair, which the library does not take, counts as a question mark."""
        ids = id_type(self.vocabulary_size)
        encoded = self.inner.encode_batch_fast([_valid(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=ids) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return self.inner.decode([int(id) for id in ids], skip_special_tokens=True)


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text

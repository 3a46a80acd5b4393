"""Bytes as tokens: byte b is token b + 1, and 0 is padding and the end of a document."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.tokenizers.base import SpecialTokens, id_type


class ByteTokenizer:
    """Every text has tokens, and none is unknown.

    Example:
        >>> ByteTokenizer().encode_batch(["é", ""])
        [array([196, 170], dtype=uint16), array([], dtype=uint16)]
        >>> ByteTokenizer().decode([196, 170, 0])
        'é'
    """

    vocabulary_size = 257
    special = SpecialTokens(pad=0, end_of_text=0)
    fingerprint = hashlib.sha256(b"bytes, shifted by one").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Ids from 1 to 256; half a surrogate pair, which UTF-8 does not know, as its three bytes."""
        ids = id_type(self.vocabulary_size)
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(ids) + ids.type(1) for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(id) - 1 for id in ids if id > 0).decode("utf-8", "replace")

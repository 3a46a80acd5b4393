"""The texts of a split in batches, and a digest of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.tables import TableDataset

FIRST_ROWS, MOST_ROWS = 256, 16384
CHARACTERS = 2**21
"""Size that batches aim at: enough for a tokeniser to keep every core busy."""


def text_batches(split: Dataset, first: int = 0) -> Iterator[list[str]]:
    """Texts from row `first` on. Rows of a table are read together, which is many times faster than one by one."""
    start, size = first, FIRST_ROWS
    while start < len(split):
        stop = min(start + size, len(split))
        if isinstance(split, TableDataset):
            rows = range(start, stop) if split.rows is None else split.rows[start:stop].tolist()
            texts = split.table.data[rows][split.columns[0]]
        else:
            texts = [split[row]["text"] for row in range(start, stop)]
        yield texts
        start = stop
        mean = sum(map(len, texts)) / len(texts)
        size = min(max(1, int(CHARACTERS / (mean + 1))), MOST_ROWS)


def text_digest(split: Dataset) -> str:
    """Sha256 of every text and where it ends, the same on every machine; computed once for a split.

    Unlike `fingerprint`, which looks at 16 rows, it sees every change: what is kept under it is never out of date.
    """
    try:
        return _KNOWN[split]
    except (KeyError, TypeError):
        pass
    digest = hashlib.sha256()
    for texts in text_batches(split):
        for text in texts:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
    try:
        _KNOWN[split] = digest.hexdigest()
    except TypeError:  # a split of a kind that cannot be a key
        pass
    return digest.hexdigest()


_KNOWN: WeakKeyDictionary[Dataset, str] = WeakKeyDictionary()

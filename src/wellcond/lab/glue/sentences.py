"""Sentences and pairs of sentences as BERT reads them: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.tables import TableDataset
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import Batch, SampleKey
from wellcond.lab.tokenizers.base import Tokenizer

ROWS_AT_ONCE = 4096
MULTIPLE = 8
"""Batches are padded to a multiple of it, which suits the hardware."""


@dataclass(frozen=True)
class SentenceFormat:
    """How sentences become sequences."""

    tokenizer: Tokenizer
    length: int
    """Tokens of a sequence at most."""

    def __post_init__(self) -> None:
        """Raise RecipeError if the tokeniser has not the tokens that mark sentences."""
        special = self.tokenizer.special
        names = {"[PAD]": special.pad, "[CLS]": special.classify, "[SEP]": special.separator}
        missing = [name for name, token in names.items() if token is None]
        if missing:
            raise RecipeError(
                f"task.tokenizer: GLUE needs the tokens {', '.join(names)}, and this tokeniser has no "
                f"{' and no '.join(missing)}. Pre-train with word pieces: {{train: wordpiece, vocabulary: 4096}}, or "
                "give the file of a tokeniser with these tokens"
            )

    def join(self, first: NDArray[Any], second: NDArray[Any] | None) -> tuple[NDArray[np.int32], int]:
        """A sequence, and how many of its tokens belong to the first sentence, [CLS] and [SEP] among them."""
        special = self.tokenizer.special
        if second is None:
            kept = first[: self.length - 2]
            return np.array([special.classify, *kept, special.separator], dtype=np.int32), len(kept) + 2
        a, b = share_room(len(first), len(second), self.length - 3)
        joined = [special.classify, *first[:a], special.separator, *second[:b], special.separator]
        return np.array(joined, dtype=np.int32), a + 2


def share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens to keep of two sentences; what is too much is taken from the longer.

    Example:
        >>> share_room(10, 3, 9), share_room(10, 10, 9), share_room(2, 3, 9)
        ((6, 3), (4, 5), (2, 3))
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


class SentenceRows:
    """Sequences in memory, one behind the other; padding is added when a batch is made."""

    in_memory = True

    def __init__(
        self, splits: Sequence[Dataset], form: SentenceFormat, told: Callable[[int, int], None] | None = None
    ) -> None:
        """Encode labelled splits, which follow each other; `parts` says where a row comes from."""
        self.form = form
        sequences: list[NDArray[np.int32]] = []
        firsts: list[int] = []
        total = sum(map(len, splits))
        for split in splits:
            for texts, pairs in _read(split):
                encoded = form.tokenizer.encode_batch(texts)
                second = [None] * len(texts) if pairs is None else form.tokenizer.encode_batch(pairs)
                for a, b in zip(encoded, second, strict=True):
                    sequence, first = form.join(a, b)
                    sequences.append(sequence)
                    firsts.append(first)
                if told is not None:
                    told(len(sequences), total)
        self._tokens = np.concatenate(sequences)
        self._ends = np.cumsum([0, *map(len, sequences)])
        self._firsts = firsts
        self.labels = torch.cat([split.labels for split in splits if split.labels is not None])
        self.parts = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor([len(split) for split in splits]))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._firsts)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens, mask, which sentence each token is of, label, number of the row, and part it comes from."""
        indices = [index for index, _ in keys]
        longest = max(int(self._ends[index + 1] - self._ends[index]) for index in indices)
        width = min(-(-longest // MULTIPLE) * MULTIPLE, self.form.length)
        pad = self.form.tokenizer.special.pad
        assert pad is not None
        tokens = torch.full((len(indices), width), pad)
        mask, types = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for row, index in enumerate(indices):
            sequence = self._tokens[self._ends[index] : self._ends[index + 1]]
            tokens[row, : len(sequence)] = torch.from_numpy(sequence)
            mask[row, : len(sequence)] = 1
            types[row, self._firsts[index] : len(sequence)] = 1
        rows = torch.tensor(indices)
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "token_type_ids": types,
            "label": self.labels[rows],
            "row": rows,
            "part": self.parts[rows],
        }


def _read(split: Dataset) -> Iterator[tuple[list[str], list[str] | None]]:
    """First and second sentences in batches; rows of a table are read together, which is many times faster."""
    for start in range(0, len(split), ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, len(split))
        if isinstance(split, TableDataset):
            rows = range(start, stop) if split.rows is None else split.rows[start:stop].tolist()
            values = split.table.data[rows]
            columns = [values[name] for name in split.columns]
        else:
            examples = [split[row] for row in range(start, stop)]
            columns = [[example[key] for example in examples] for key in ("text", "text_pair") if key in examples[0]]
        yield columns[0], columns[1] if len(columns) > 1 else None


def check_numbers(labels: Tensor, limits: tuple[float, float], what: str) -> None:
    """Raise RecipeError for a label outside of the limits."""
    low, high = limits
    wrong = ((labels < low) | (labels > high)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise RecipeError(
            f"{what}, row {row} (the first is 0): expected a label from {low:g} to {high:g}, found {labels[row]:g}"
        )

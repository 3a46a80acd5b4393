"""Classification of pairs of texts, each read as bytes by itself: the retrieval of the Long Range Arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wellcond.lab.data.base import Dataset
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import Batch, SampleKey, TaskContext, need_kind, register_task
from wellcond.lab.tasks.byte_text import VOCABULARY, PackedDocuments, read_documents
from wellcond.lab.tasks.sequences import SequenceSettings, SequenceTask, check_kept_bytes, pad, text_length


class PairClassificationSettings(SequenceSettings):
    """Options of the task; the lengths are those of each text."""

    name: Literal["pair_classification"] = "pair_classification"
    empty: Literal["error", "keep"] = "error"


class PairRows:
    """Pairs of texts in memory."""

    in_memory = True

    def __init__(self, first: PackedDocuments, second: PackedDocuments, labels: Tensor, *, width: int) -> None:
        """Each text is padded to `width`."""
        self.first, self.second, self.labels, self.width = first, second, labels, width

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.first)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens and masks of both texts, and labels."""
        indices = [index for index, _ in keys]
        batch: Batch = {"label": self.labels[indices]}
        for prefix, documents in (("", self.first), ("pair_", self.second)):
            tokens, mask = pad([documents.tokens(index) for index in indices], self.width)
            batch |= {f"{prefix}input_ids": tokens, f"{prefix}attention_mask": mask}
        return batch


@register_task(PairClassificationSettings)
class PairClassification(SequenceTask):
    """Two texts a label; the model takes `pair_input_ids` and `pair_attention_mask` beside the usual two."""

    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "pair_input_ids", "pair_attention_mask")
    vocabulary = VOCABULARY

    def __init__(self, settings: PairClassificationSettings, context: TaskContext) -> None:
        """Encode everything once."""
        super().__init__(settings, context)
        need_kind(context.data, settings.name, "text")
        self.length = text_length(settings)
        self.width = settings.pad_to or self.length
        self.load()

    def rows(self, split: Dataset, what: str) -> PairRows:
        """Both texts of every pair."""
        check_kept_bytes(split, self.length, what)
        if "text_pair" not in split[0]:
            raise RecipeError(
                f"{what}: expected pairs of texts, found single ones; name two columns in data.input, or use "
                "task.name: sequence_classification"
            )
        columns = (PackedDocuments(), PackedDocuments())
        lengths: tuple[list[int], list[int]] = ([], [])
        for pair in read_documents(split, self.progress("reading text")):
            for text, column, numbers in zip(pair, columns, lengths, strict=True):
                assert text is not None
                column.append(text[: self.length])
                numbers.append(len(text))
        for which, numbers in zip(("first", "second"), lengths, strict=True):
            self.check_lengths(torch.tensor(numbers), self.length, f"{what}, {which} text")
        assert split.labels is not None
        return PairRows(*columns, split.labels, width=self.width)

    def auto_class(self) -> None:
        """No model of transformers takes two sequences by themselves."""
        return None

"""Classification of pairs of texts, each read as bytes by itself: the retrieval of the Long Range Arena."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from wellcond.lab.data.base import Dataset
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import need_kind, register_task
from wellcond.lab.tasks.sequence_classification import BYTES, PackedBytes, SequenceSettings, SequenceTask, TextSamples


class PairClassificationSettings(SequenceSettings):
    """Options of the task; the lengths are those of each text."""

    name: Literal["pair_classification"] = "pair_classification"
    empty: Literal["error", "keep"] = "error"


@register_task(PairClassificationSettings)
class PairClassification(SequenceTask):
    """Two texts a label; the model takes `pair_input_ids` and `pair_attention_mask` beside the usual two."""

    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "pair_input_ids", "pair_attention_mask")

    def sizes(self) -> tuple[int, int]:
        """Of bytes."""
        need_kind(self.context.data, self.settings.name, "text")
        return BYTES, self.text_length()

    def samples(self, split: Dataset, labels: Tensor, what: str) -> TextSamples:
        """Both texts of every pair."""
        if "text_pair" not in split[0]:
            raise RecipeError(
                f"{what}: expected pairs of texts, found single ones; name two columns in data.input, or use "
                "task.name: sequence_classification"
            )
        packed = (PackedBytes(), PackedBytes())
        lengths = []
        for pair in self.read_texts(split, what):
            for text, documents in zip(pair, packed, strict=True):
                documents.append(text[: self.length])
            lengths.append([len(text) for text in pair])
        for which, numbers in zip(("first", "second"), torch.tensor(lengths).T, strict=True):
            self.check_lengths(numbers, f"{what}, {which} text")
        return TextSamples({"": packed[:1], "pair_": packed[1:]}, labels, self.length, self.width)

    def auto_class(self) -> None:
        """No model of transformers takes two sequences by themselves."""
        return None

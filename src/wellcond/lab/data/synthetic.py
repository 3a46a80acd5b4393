"""Generator `associative_recall`, which needs no files."""

from __future__ import annotations

import torch
from pydantic import Field, model_validator

from wellcond.lab.data.generated import Generated, GeneratorOptions, register_generator


class AssociativeRecallOptions(GeneratorOptions):
    """Options of `associative_recall`."""

    num_pairs: int = Field(8, ge=2)
    num_keys: int = Field(16, ge=2)
    num_values: int = Field(16, ge=2)

    @model_validator(mode="after")
    def _check_pairs(self) -> AssociativeRecallOptions:
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"the keys of a sequence differ from each other: expected num_pairs of at most num_keys = "
                f"{self.num_keys}, got {self.num_pairs}. Raise num_keys."
            )
        return self


@register_generator("associative_recall", AssociativeRecallOptions)
def associative_recall(count: int, options: AssociativeRecallOptions, generator: torch.Generator) -> Generated:
    """Sequences k1 v1 k2 v2 ... kP vP q of token ids; the label is the value that follows q among the pairs.

    Keys are ids 0 .. num_keys - 1, drawn without repetition; values follow them as ids num_keys .. num_keys +
    num_values - 1, drawn independently, so nothing but a look-up within the sequence finds the answer: a model that
    only knows which values occur is right in about one of num_pairs cases.
    """
    keys = torch.rand(count, options.num_keys, generator=generator, dtype=torch.float64).argsort(dim=1)
    keys = keys[:, : options.num_pairs]
    values = torch.randint(options.num_values, (count, options.num_pairs), generator=generator)
    asked = torch.randint(options.num_pairs, (count, 1), generator=generator)
    pairs = torch.stack([keys, values + options.num_keys], dim=2).flatten(1)
    tokens = torch.cat([pairs, keys.gather(1, asked)], dim=1)
    labels = values.gather(1, asked).squeeze(1)
    names = tuple(str(value) for value in range(options.num_values))
    return Generated("tokens", tokens, labels, names, options.num_keys + options.num_values)

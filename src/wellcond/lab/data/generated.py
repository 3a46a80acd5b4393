"""Generators of data by name: a function from a count, options and a random generator to tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from wellcond.lab.settings import Settings


class GeneratorOptions(Settings):
    """Base of the options of every generator."""


@dataclass(frozen=True, eq=False)
class Generated:
    """What a generator returns: `inputs` of shape (n, ...) and labels of shape (n,).

    Images are floats, or 8 bits. Tokens are ids from 0; shorter sequences end with -1.
    """

    kind: Literal["image", "tokens"]
    inputs: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    vocabulary_size: int | None = None


OptionsT = TypeVar("OptionsT", bound=GeneratorOptions)
Generate = Callable[[int, OptionsT, torch.Generator], Generated]


@dataclass(frozen=True)
class RegisteredGenerator:
    """The options of a generator, its function, and how the source `generated` calls it."""

    options_class: type[GeneratorOptions]
    generate: Callable[[int, Any, torch.Generator], Generated]
    chunk: int | None = None
    version: int = 1
    distinct: Callable[[Any], bool] | bool = False

    def makes_distinct(self, options: GeneratorOptions) -> bool:
        """Whether no input of these options may occur twice."""
        return self.distinct(options) if callable(self.distinct) else self.distinct


GENERATORS: dict[str, RegisteredGenerator] = {}


def register_generator(
    name: str,
    options_class: type[OptionsT],
    *,
    chunk: int | None = None,
    version: int = 1,
    distinct: Callable[[OptionsT], bool] | bool = False,
) -> Callable[[Generate], Generate]:
    """Decorate `generate(count, options, generator)`; all randomness must come from `generator`.

    Args:
        name: What a recipe calls it.
        options_class: Its options.
        chunk: Make a split in chunks of so many samples, each with a random stream of its own: in several processes,
            kept on disk, and the beginning of a longer split is the shorter one. Without it a split is made in one go.
        version: To be raised when the same options give other samples than before; only for chunks.
        distinct: Whether, always or by the options, no input occurs twice in a split, nor in two splits, whatever the
            seed; only for chunks. Of all inputs about 3/4 may occur in training, 1/8 in evaluation and 1/8 in test,
            told apart by a hash.
    """
    if chunk is None and (distinct or version != 1):
        raise ValueError(f"generator {name}: expected a chunk size together with version or distinct, got none.")

    def register(generate: Generate) -> Generate:
        GENERATORS[name] = RegisteredGenerator(options_class, generate, chunk, version, distinct)
        return generate

    return register

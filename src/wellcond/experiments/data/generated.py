"""Generators of data by name: a function from a count, options and a random generator to tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from wellcond.experiments.settings import Settings


class GeneratorOptions(Settings):
    """Base of the options of every generator."""


@dataclass(frozen=True, eq=False)
class Generated:
    """What a generator returns: `inputs` of shape (n, ...) and labels of shape (n,)."""

    kind: Literal["image", "tokens"]
    inputs: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    vocabulary_size: int | None = None


OptionsT = TypeVar("OptionsT", bound=GeneratorOptions)
Generate = Callable[[int, OptionsT, torch.Generator], Generated]


@dataclass(frozen=True)
class RegisteredGenerator:
    """The options of a generator and its function."""

    options_class: type[GeneratorOptions]
    generate: Callable[[int, Any, torch.Generator], Generated]


GENERATORS: dict[str, RegisteredGenerator] = {}


def register_generator(name: str, options_class: type[OptionsT]) -> Callable[[Generate], Generate]:
    """Decorate `generate(count, options, generator)`; all randomness must come from `generator`."""

    def register(generate: Generate) -> Generate:
        GENERATORS[name] = RegisteredGenerator(options_class, generate)
        return generate

    return register

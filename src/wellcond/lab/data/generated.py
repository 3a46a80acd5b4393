"""Source `generated`: data made from a seed by a registered generator, in chunks that are kept in the cache.

Chunk k of a split has a random stream of its own, which follows from the generator, its options, the seed, the split
and k. So the samples do not depend on who makes them, and a longer split begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from wellcond.errors import check_choice
from wellcond.lab.data.base import Data, DataError, SourceConfig, TensorDataset, register_source, report_progress
from wellcond.lab.data.disk import cached_folder, canonical_json
from wellcond.lab.settings import Settings

MOST_SAMPLES = 10_000_000
VERSION = 1
"""Raised when generators make other samples of the same options."""
SPLITS = ("evaluation", "test", *["train"] * 6)
"""The split that an input belongs to, by its hash, if no input may occur in two splits."""
PATIENCE = 16
"""Chunks to draw for each one that would do if nothing were drawn twice."""


class GeneratorOptions(Settings):
    """Base of the options of every generator."""

    @property
    def distinct(self) -> bool:
        """True if no input may occur twice, be it in one split or in two."""
        return False

    @property
    def identity(self) -> dict[str, Any]:
        """What random streams follow from, as plain JSON."""
        return self.model_dump(mode="json")


Generate = Callable[[int, Any, torch.Generator], TensorDataset]


@dataclass(frozen=True)
class RegisteredGenerator:
    """A generator, its options, the names of its classes, and how many samples a chunk has."""

    options_class: type[GeneratorOptions]
    generate: Generate
    class_names: tuple[str, ...]
    chunk: int
    vocabulary_size: int | None = None


GENERATORS: dict[str, RegisteredGenerator] = {}


def register_generator(
    name: str, options_class: type[GeneratorOptions], **about: Any
) -> Callable[[Generate], Generate]:
    """Decorate `generate(count, options, generator)`, a function of a module; all randomness comes from `generator`.

    It returns labelled images, floats or 8 bits, or tokens. The other fields of `RegisteredGenerator` are by keyword.
    """

    def register(generate: Generate) -> Generate:
        GENERATORS[name] = RegisteredGenerator(options_class, generate, **about)
        return generate

    return register


class GeneratedConfig(SourceConfig):
    """Settings of `generated`; `options` are those of the generator, and are completed with their defaults."""

    source: Literal["generated"] = "generated"
    generator: str
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    num_train: int = Field(4096, ge=1, le=MOST_SAMPLES)
    num_evaluation: int = Field(1024, ge=1, le=MOST_SAMPLES)
    num_test: int = Field(0, ge=0, le=MOST_SAMPLES)
    """Samples of a third split, named test; 0 for none."""
    seed: int = 0

    @field_validator("generator")
    @classmethod
    def _check_generator(cls, name: str) -> str:
        check_choice("data generator", name, sorted(GENERATORS))
        return name

    @field_validator("options")
    @classmethod
    def _complete_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("generator")
        return options if name is None else GENERATORS[name].options_class.model_validate(options).model_dump()

    @property
    def resolved_options(self) -> Any:
        """As the generator takes them."""
        return GENERATORS[self.generator].options_class.model_validate(self.options)


@register_source(GeneratedConfig)
def load(config: GeneratedConfig, base: Path) -> Data:
    """All splits; each has its own stream of random numbers, so its size does not change the others."""
    counts = {"train": config.num_train, "evaluation": config.num_evaluation, "test": config.num_test}
    splits = {split: make_split(config, split, count) for split, count in counts.items() if count > 0}
    train, evaluation, generator = splits.pop("train"), splits.pop("evaluation"), GENERATORS[config.generator]
    name, names, origin = (
        config.generator,
        generator.class_names,
        f"{config.generator} generated from seed {config.seed}",
    )
    return Data(name, train.key, train, evaluation, names, origin, splits, generator.vocabulary_size)


def make_split(config: GeneratedConfig, split: str, count: int) -> TensorDataset:
    """The first `count` samples of a split; DataError if they are to be distinct and hardly any new ones are found."""
    chunk, options = GENERATORS[config.generator].chunk, config.resolved_options
    share = SPLITS.count(split) / len(SPLITS) if options.distinct else 1
    wanted = math.ceil(count / (chunk * share))
    limit = PATIENCE * (wanted + 1)
    chunks: list[TensorDataset] = []
    size = 0
    while True:
        new = [_get_chunk(config, split, number, wanted) for number in range(len(chunks), wanted)]
        chunks += new
        inputs, labels = (torch.cat([getattr(chunk, part) for chunk in chunks]) for part in ("inputs", "labels"))
        made = TensorDataset(chunks[0].key, inputs, labels)
        if options.distinct:
            first: dict[bytes, int] = {}
            for row, digest in enumerate(_digests(inputs)):
                first.setdefault(digest, row)
            made = made.take(torch.tensor(list(first.values())))
        size, before = len(made), size
        if size >= count:
            return made.take(slice(count))
        if wanted == limit:
            raise DataError(
                f"{config.generator}, {split} split: there are too few different samples.",
                expected=f"{count} that differ from each other and from those of the other splits",
                found=f"{size} in {len(inputs)} that were drawn",
            )
        wanted = min(limit, wanted + math.ceil((count - size) / max(1.0, (size - before) / len(new))))


def _get_chunk(config: GeneratedConfig, split: str, number: int, wanted: int) -> TensorDataset:
    """One of the `wanted` chunks of a split, from the cache or made now."""
    generator, options = GENERATORS[config.generator], config.resolved_options
    about = {"generator": config.generator, "version": VERSION, "options": options.identity, "seed": config.seed}
    stream = f"{canonical_json(about | {'split': split})}#{number}"

    def make(folder: Path) -> None:
        # Hashed: with seed and seed + 1 the evaluation split of one seed would be the training split of the next.
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:7], "little")
        made = generator.generate(generator.chunk, options, torch.Generator().manual_seed(seed))
        if options.distinct:
            # The hash decides alone, so no chunk need know of another, and no size of a split changes another split.
            splits = [SPLITS[digest[0] % len(SPLITS)] for digest in _digests(made.inputs)]
            made = made.take(torch.tensor([other == split for other in splits]))
        torch.save(vars(made), folder / "samples.pt")
        report_progress(f"making {config.generator}, {split} split, chunks", number + 1, wanted)

    made_from = {"stream": stream, "chunk": generator.chunk}
    folder = cached_folder("generated", made_from, make, f"making {config.generator}")
    return TensorDataset(**torch.load(folder / "samples.pt", weights_only=True))


def _digests(inputs: Tensor) -> list[bytes]:
    """A hash of every input; two of a split have the same one in less than one of 10^27 cases."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]

"""Source `generated`: data made from a seed by a registered generator, in chunks that are kept in the cache.

Chunk k of a split has a random stream of its own, which follows from the generator, its options, the seed, the split
and k. So the samples do not depend on who makes them, and a longer split begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator
from torch import Tensor

from wellcond.arguments import check_choice
from wellcond.errors import DataError
from wellcond.lab.data.base import Data, SourceConfig, TensorDataset, register_source, report_progress
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
    """Base of the options of every generator; a subclass also says what does not depend on them."""

    class_names: ClassVar[tuple[str, ...]]
    vocabulary_size: ClassVar[int | None] = None
    chunk: ClassVar[int]
    """Samples that are made at once."""
    constants: ClassVar[dict[str, Any]] = {}
    """What random streams follow from besides the options, as plain JSON."""

    @property
    def distinct(self) -> bool:
        """True if no input may occur twice, be it in one split or in two."""
        return False


Generate = Callable[[int, Any, torch.Generator], TensorDataset]
GENERATORS: dict[str, tuple[type[GeneratorOptions], Generate]] = {}
"""The options of each generator and the function that makes samples."""


def register_generator(name: str, options_class: type[GeneratorOptions]) -> Callable[[Generate], Generate]:
    """Decorate `generate(count, options, generator)`, which makes labelled images, floats or 8 bits, or tokens."""

    def register(generate: Generate) -> Generate:
        GENERATORS[name] = (options_class, generate)
        return generate

    return register


class GeneratedConfig(SourceConfig):
    """Settings of `generated`; `options` are those of the generator."""

    source: Literal["generated"] = "generated"
    generator: str
    options: SerializeAsAny[GeneratorOptions] = Field(default_factory=dict, validate_default=True)
    num_train: int = Field(4096, ge=1, le=MOST_SAMPLES)
    num_evaluation: int = Field(1024, ge=1, le=MOST_SAMPLES)
    num_test: int = Field(0, ge=0, le=MOST_SAMPLES)
    """Samples of a third split, named test; 0 for none."""
    seed: int = 0

    @field_validator("generator")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        check_choice("data generator", name, sorted(GENERATORS))
        return name

    @field_validator("options", mode="before")
    @classmethod
    def _of_the_generator(cls, options: Any, info: ValidationInfo) -> GeneratorOptions:
        name = info.data.get("generator")  # absent if it is wrong
        return GeneratorOptions() if name is None else GENERATORS[name][0].model_validate(options)


@register_source(GeneratedConfig)
def load(config: GeneratedConfig, base: Path) -> Data:
    """All splits; each has its own stream of random numbers, so its size does not change the others."""
    counts = {"train": config.num_train, "evaluation": config.num_evaluation, "test": config.num_test}
    splits = {split: _make_split(config, split, count) for split, count in counts.items() if count > 0}
    train, evaluation, options = splits.pop("train"), splits.pop("evaluation"), config.options
    name, origin = config.generator, f"{config.generator} generated from seed {config.seed}"
    return Data(name, train.key, train, evaluation, options.class_names, origin, splits, options.vocabulary_size)


def _make_split(config: GeneratedConfig, split: str, count: int) -> TensorDataset:
    """The first `count` samples of a split; DataError if they are to be distinct and hardly any new ones are found."""
    distinct, chunk = config.options.distinct, config.options.chunk
    wanted = math.ceil(count / chunk * (len(SPLITS) / SPLITS.count(split) if distinct else 1))
    most = PATIENCE * (wanted + 1)
    parts: list[TensorDataset] = []
    size, seen = 0, set[bytes]()
    for number in range(most):
        part = _get_chunk(config, split, number, max(wanted, number + 1))
        if distinct:
            rows = []
            for row, digest in enumerate(_digests(part.inputs)):
                if digest not in seen:
                    rows.append(row)
                seen.add(digest)
            part = part.take(torch.tensor(rows, dtype=torch.int64))
        parts.append(part)
        size += len(part)
        if size >= count:
            inputs, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "labels"))
            return TensorDataset(part.key, inputs[:count], labels[:count])
    raise DataError(
        f"{config.generator}, {split} split: there are too few different samples.",
        expected=f"{count} that differ from each other and from those of the other splits",
        found=f"{size} in {most} chunks of {chunk} that were drawn",
    )


def _get_chunk(config: GeneratedConfig, split: str, number: int, wanted: int) -> TensorDataset:
    """One of the `wanted` chunks of a split, from the cache or made now."""
    options = config.options
    identity = options.model_dump(mode="json") | options.constants
    about = {"generator": config.generator, "version": VERSION, "options": identity, "seed": config.seed}
    stream = f"{canonical_json(about | {'split': split})}#{number}"

    def make(folder: Path) -> None:
        # Hashed: with seed and seed + 1 the evaluation split of one seed would be the training split of the next.
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:7], "little")
        made = GENERATORS[config.generator][1](options.chunk, options, torch.Generator().manual_seed(seed))
        if options.distinct:
            # The hash decides alone, so no chunk need know of another, and no size of a split changes another split.
            splits = [SPLITS[digest[0] % len(SPLITS)] for digest in _digests(made.inputs)]
            made = made.take(torch.tensor([other == split for other in splits]))
        torch.save(vars(made), folder / "samples.pt")
        report_progress(f"making {config.generator}, {split} split, chunks", number + 1, wanted)

    made_from = {"stream": stream, "chunk": options.chunk}
    folder = cached_folder("generated", made_from, make, f"making {config.generator}")
    return TensorDataset(**torch.load(folder / "samples.pt", weights_only=True))


def _digests(inputs: Tensor) -> list[bytes]:
    """A hash of every input; two of a split have the same one in less than one of 10^27 cases."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]

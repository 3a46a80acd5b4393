"""Source `generated`: data made from a seed by a registered generator, whole or in chunks.

Chunk k of a split has a random stream of its own, which follows from the generator, its options, the seed, the split
and k. So the samples do not depend on who makes them, and a longer split begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor

from wellcond.errors import WellcondError, check_choice
from wellcond.lab.data.base import (
    Data,
    DataError,
    SourceConfig,
    TensorDataset,
    leave_interrupts_to_parent,
    register_source,
    report_progress,
)
from wellcond.lab.data.disk import cache_place, cached_folder, canonical_json
from wellcond.lab.settings import RecipeError, Settings

MOST_SAMPLES = 10_000_000
VERSION = 1
"""Raised when generators make other samples of the same options."""
SPLITS = ("evaluation", "test", *["train"] * 6)
"""The split that an input belongs to, by its hash, if no input may occur in two splits."""
PATIENCE = 16
"""Chunks to draw for each one that would do if nothing were drawn twice."""
FEWEST_CHUNKS = 4
"""As much work is worth the start of a worker process."""


class GeneratorOptions(Settings):
    """Base of the options of every generator."""

    @property
    def distinct(self) -> bool:
        """True if no input may occur twice, be it in one split or in two; only for generators that make chunks."""
        return False


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

    def select(self, rows: Sequence[int] | slice) -> Generated:
        """Some of the samples."""
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows])


Generate = Callable[[int, Any, torch.Generator], Generated]


@dataclass(frozen=True)
class RegisteredGenerator:
    """A generator and its options; `chunk` is None if a split is made in one go."""

    options_class: type[GeneratorOptions]
    generate: Generate
    chunk: int | None = None


GENERATORS: dict[str, RegisteredGenerator] = {}


def register_generator(
    name: str, options_class: type[GeneratorOptions], *, chunk: int | None = None
) -> Callable[[Generate], Generate]:
    """Decorate `generate(count, options, generator)`, a function of a module; all randomness comes from `generator`.

    With `chunk`, a split is made in chunks of so many samples: in several processes, and kept on disk.
    """

    def register(generate: Generate) -> Generate:
        GENERATORS[name] = RegisteredGenerator(options_class, generate, chunk)
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


@register_source(GeneratedConfig)
def load(config: GeneratedConfig, base: Path) -> Data:
    """All splits; each has its own stream of random numbers, so its size does not change the others."""
    counts = {"train": config.num_train, "evaluation": config.num_evaluation, "test": config.num_test}
    made = {split: make_split(config, split, count) for split, count in counts.items() if count > 0}
    splits = {name: TensorDataset(data.kind, data.inputs, data.labels) for name, data in made.items()}
    train, evaluation, first = splits.pop("train"), splits.pop("evaluation"), made["train"]
    name, origin = config.generator, f"{config.generator} generated from seed {config.seed}"
    return Data(name, first.kind, train, evaluation, first.class_names, origin, splits, first.vocabulary_size)


def make_split(config: GeneratedConfig, split: str, count: int) -> Generated:
    """The first `count` samples of a split; chunks come from the cache if they are there.

    Raises: DataError if inputs are to be distinct and hardly any new ones are found.
    """
    name, entry = config.generator, GENERATORS[config.generator]
    options = entry.options_class.model_validate(config.options)
    if entry.chunk is None:
        return entry.generate(count, options, _random_stream(f"{name}/{config.seed}/{split}"))
    shown = options.model_dump(mode="json")
    made_from = {"generator": name, "version": VERSION, "options": shown, "seed": config.seed, "split": split}
    share = SPLITS.count(split) / len(SPLITS) if options.distinct else 1
    wanted = math.ceil(count / (entry.chunk * share))
    limit = PATIENCE * (wanted + 1)
    chunks: list[Generated] = []
    size = 0
    while True:
        jobs = [ChunkJob(entry, options, made_from, number) for number in range(len(chunks), wanted)]
        chunks += _get_chunks(jobs, f"making {name}, {split} split, chunks")
        inputs, labels = (torch.cat([getattr(chunk, part) for chunk in chunks]) for part in ("inputs", "labels"))
        made = replace(chunks[0], inputs=inputs, labels=labels)
        if options.distinct:
            first: dict[bytes, int] = {}
            for row, digest in enumerate(_digests(inputs)):
                first.setdefault(digest, row)
            made = made.select(list(first.values()))
        size, before = len(made.inputs), size
        if size >= count:
            return made.select(slice(count))
        if wanted == limit:
            raise DataError(
                f"{name}, {split} split: there are too few different samples.",
                expected=f"{count} that differ from each other and from those of the other splits",
                found=f"{size} in {len(inputs)} that were drawn",
                todo="Ask for fewer samples, or choose options that allow more of them, such as larger sizes.",
            )
        wanted = min(limit, wanted + math.ceil((count - size) / max(1.0, (size - before) / len(jobs))))


@dataclass(frozen=True)
class ChunkJob:
    """All that decides a chunk of a split, which is an entry of the cache."""

    generator: RegisteredGenerator
    options: GeneratorOptions
    made_from: dict[str, Any]
    """What the random numbers follow from, but for the number of the chunk."""
    number: int

    @property
    def entry(self) -> dict[str, Any]:
        """What the chunk in the cache is made from."""
        return self.made_from | {"chunk": self.generator.chunk, "number": self.number}

    def make(self) -> Path:
        """Where the chunk is in the cache, made now if it is missing."""
        name = self.made_from["generator"]
        return cached_folder("generated", self.entry, self._write, f"making {name}, chunk {self.number}")

    def _write(self, folder: Path) -> None:
        assert self.generator.chunk is not None
        stream = _random_stream(f"{canonical_json(self.made_from)}#{self.number}")
        made = self.generator.generate(self.generator.chunk, self.options, stream)
        if made.kind == "tokens":  # in the smallest type for the ids and -1
            largest, types = (made.vocabulary_size or 2**31) - 1, (torch.int8, torch.int16, torch.int32, torch.int64)
            made = replace(made, inputs=made.inputs.to(next(t for t in types if largest <= torch.iinfo(t).max)))
        if self.options.distinct:
            # The hash decides alone, so no chunk need know of another, and no size of a split changes another split.
            digests = enumerate(_digests(made.inputs))
            split = self.made_from["split"]
            made = made.select([row for row, digest in digests if SPLITS[digest[0] % len(SPLITS)] == split])
        torch.save(vars(made), folder / "samples.pt")


def _random_stream(name: str) -> torch.Generator:
    # Hashed: with seed and seed + 1 the evaluation split of one seed would be the training split of the next.
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))


def _digests(inputs: Tensor) -> list[bytes]:
    """A hash of every input; two of a split have the same one in less than one of 10^27 cases."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]


def _get_chunks(jobs: Sequence[ChunkJob], what: str) -> list[Generated]:
    """The chunks of all jobs; those that are missing are made, many of them in worker processes."""
    missing = [job for job in jobs if not cache_place("generated", job.entry).is_dir()]
    workers = min(_num_workers(), len(missing) // FEWEST_CHUNKS)
    made: Iterable[Any] = map(ChunkJob.make, missing)
    if workers > 1:
        made = torch.utils.data.DataLoader(
            missing,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=_make_or_explain,  # type: ignore[arg-type]
            num_workers=workers,
            worker_init_fn=leave_interrupts_to_parent,
        )
    total = jobs[-1].number + 1
    for done, problem in enumerate(made, total - len(missing) + 1):
        if isinstance(problem, str):
            raise WellcondError(problem)
        report_progress(what, done, total)
    return [Generated(**torch.load(job.make() / "samples.pt", weights_only=True)) for job in jobs]


def _make_or_explain(job: ChunkJob) -> Path | str:
    try:
        return job.make()
    except WellcondError as error:  # torch would hand on its traceback instead of what it says
        return str(error)


def _num_workers() -> int:
    text = os.environ.get("WELLCOND_WORKERS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"WELLCOND_WORKERS: expected a number of processes from 1, found {text!r}")
    return int(text)


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

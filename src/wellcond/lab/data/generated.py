"""Source `generated`: data made from a seed by a registered generator, whole or in chunks.

Chunk k of a split has a random stream of its own, which follows from the generator, its options, the seed, the split
and k. So the samples do not depend on who makes them, and a longer split begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from wellcond.errors import WellcondError, check_choice
from wellcond.lab.data.base import (
    Data,
    DataError,
    SourceConfig,
    TensorDataset,
    describe_sizes,
    leave_interrupts_to_parent,
    register_source,
    report_progress,
)
from wellcond.lab.data.disk import CacheEntry, CacheError, canonical_json
from wellcond.lab.settings import RecipeError, Settings

MOST_SAMPLES = 10_000_000
VERSION = 1
"""Raised when generators make other samples of the same options."""
SPLITS = ("evaluation", "test", *["train"] * 6)
"""The split that an input belongs to, by its hash, if no input may occur in two splits."""
PATIENCE = 16
"""Chunks to draw for each one that would do if nothing were drawn twice."""
POOL_SECONDS = 6.0
"""Work that takes longer than this is worth the start of worker processes."""


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

    Args:
        name: What a recipe calls it.
        options_class: Its options.
        chunk: Make a split in chunks of so many samples: in several processes, and kept on disk.
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
    sizes = describe_sizes(train, evaluation, first.class_names)
    sizes += f", {config.num_test} test examples" if splits else ""
    return Data(
        config.generator,
        first.kind,
        train,
        evaluation,
        first.class_names,
        f"{config.generator} generated from seed {config.seed}: {sizes}",
        others=splits,
        vocabulary_size=first.vocabulary_size,
    )


def make_split(config: GeneratedConfig, split: str, count: int) -> Generated:
    """The first `count` samples of a split; chunks come from the cache if they are there.

    Raises:
        DataError: inputs are to be distinct and hardly any new ones are found.
    """
    name, entry = config.generator, GENERATORS[config.generator]
    options = entry.options_class.model_validate(config.options)
    if entry.chunk is None:
        return entry.generate(count, options, _random_stream(f"{name}/{config.seed}/{split}"))
    shown = options.model_dump(mode="json")
    made_from = {"generator": name, "version": VERSION, "options": shown, "seed": config.seed, "split": split}
    cache = CacheEntry("generated", made_from | {"chunk": entry.chunk})
    stream, what = canonical_json(made_from), f"making {name}, {split} split, chunks"
    share = SPLITS.count(split) / len(SPLITS) if options.distinct else 1
    wanted = math.ceil(count / (entry.chunk * share))
    limit = PATIENCE * (wanted + 1)
    chunks: list[Generated] = []
    size = 0
    while True:
        jobs = [ChunkJob(entry, options, split, stream, number) for number in range(len(chunks), wanted)]
        chunks += _get_chunks(cache, jobs, what)
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
    """All that decides a chunk of a split."""

    generator: RegisteredGenerator
    options: GeneratorOptions
    split: str
    stream: str
    """Canonical JSON of what the random numbers follow from, but for the number of the chunk."""
    number: int

    @property
    def file(self) -> str:
        """Name in the cache."""
        return f"chunk-{self.number:06d}.pt"


def make_chunk(job: ChunkJob) -> bytes:
    """The file of a chunk."""
    assert job.generator.chunk is not None
    made = job.generator.generate(job.generator.chunk, job.options, _random_stream(f"{job.stream}#{job.number}"))
    if made.kind == "tokens":
        made = replace(made, inputs=made.inputs.to(_token_type(made.vocabulary_size or 2**31)))
    if job.options.distinct:
        # The hash decides alone, so no chunk need know of another, and no size of a split changes another split.
        digests = enumerate(_digests(made.inputs))
        made = made.select([row for row, digest in digests if SPLITS[digest[0] % len(SPLITS)] == job.split])
    file = io.BytesIO()
    torch.save(vars(made), file)
    return file.getvalue()


def _random_stream(name: str) -> torch.Generator:
    # Hashed: with seed and seed + 1 the evaluation split of one seed would be the training split of the next.
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))


def _token_type(vocabulary_size: int) -> torch.dtype:
    """The smallest type for ids below `vocabulary_size` and -1."""
    types = (torch.int8, torch.int16, torch.int32)
    return next((dtype for dtype in types if vocabulary_size - 1 <= torch.iinfo(dtype).max), torch.int64)


def _digests(inputs: Tensor) -> list[bytes]:
    """A hash of every input; two of a split have the same one in less than one of 10^27 cases."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]


def _get_chunks(cache: CacheEntry, jobs: Sequence[ChunkJob], what: str) -> list[Generated]:
    """The chunks of all jobs; what cannot be written to the cache is made in memory."""
    found: dict[int, Generated] = {}
    first, total = jobs[0].number, jobs[-1].number + 1

    def look() -> list[ChunkJob]:
        for job in jobs:
            if job.number not in found and (content := cache.read(job.file)) is not None:
                found[job.number] = _read_chunk(content)
        return [job for job in jobs if job.number not in found]

    def wait_for_another() -> None:
        report_progress(f"{what} (another process makes them)", min(cache.count(), total), total)

    def make(missing: Sequence[ChunkJob], *, keep: bool) -> None:
        for job, content in zip(missing, make_chunks(missing), strict=True):
            found[job.number] = _read_chunk(content)
            if keep:
                cache.write(job.file, content)
            report_progress(what, first + len(found), total)

    if look():
        try:
            with cache.locked(wait_for_another):
                make(look(), keep=True)
        except CacheError as error:
            report_progress(f"{what} (not kept: {error})", first + len(found), total)
        make(look(), keep=False)
    return [found[job.number] for job in jobs]


def _read_chunk(content: bytes) -> Generated:
    return Generated(**torch.load(io.BytesIO(content), weights_only=True))


def make_chunks(jobs: Sequence[ChunkJob]) -> Iterator[bytes]:
    """The file of every chunk, in order; in worker processes once that pays.

    Raises: WellcondError.
    """
    workers = _num_workers()
    for index, job in enumerate(jobs):
        start = time.perf_counter()
        content = make_chunk(job)
        seconds, left = time.perf_counter() - start, jobs[index + 1 :]
        yield content
        # The first job also imports libraries and fills tables.
        if index > 0 and workers > 1 and seconds * len(left) > POOL_SECONDS:
            yield from _make_in_workers(left, min(workers, len(left)))
            return


def _make_in_workers(jobs: Sequence[ChunkJob], workers: int) -> Iterator[bytes]:
    loader: Any = torch.utils.data.DataLoader(
        jobs,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_make_or_explain,  # type: ignore[arg-type]
        num_workers=workers,
        worker_init_fn=leave_interrupts_to_parent,
    )
    for content in loader:
        if isinstance(content, str):
            raise WellcondError(content)
        yield content


def _make_or_explain(job: ChunkJob) -> bytes | str:
    try:
        return make_chunk(job)
    except WellcondError as error:  # torch would hand on its traceback instead of what it says
        return str(error)


def _num_workers() -> int:
    text = os.environ.get("WELLCOND_WORKERS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"WELLCOND_WORKERS: expected a number of processes from 1, found {text!r}")
    return int(text)

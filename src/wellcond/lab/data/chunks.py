"""A generated split, chunk by chunk: in several processes, kept on disk, the same whoever makes it.

Chunk k of a split has a random stream of its own, which follows from the generator, its version and options, the seed,
the split and k. A split is the beginning of the endless row of its chunks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.lab.data.disk_cache import CacheEntry, CacheError, canonical_json
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.generated import GENERATORS, Generated, GeneratorOptions, RegisteredGenerator
from wellcond.lab.data.job_pool import run_jobs
from wellcond.lab.data.progress import tell

FORMAT = 1
SPLITS = ("evaluation", "test", *["train"] * 6)
"""Where an input may occur, by the hash of it, in splits of distinct ones."""
PATIENCE = 16
"""Chunks to try for every one that would do if nothing were drawn twice."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkJob:
    """All that decides a chunk, and the function that makes it."""

    generate: Callable[[int, Any, torch.Generator], Generated]
    options: GeneratorOptions
    size: int
    distinct: bool
    split: str
    stream: str
    """Canonical JSON of what the random numbers follow from, but for the number of the chunk."""
    number: int

    @property
    def file(self) -> str:
        """Name in the cache."""
        return f"chunk-{self.number:06d}.npy"


def make_split(name: str, options: GeneratorOptions, *, seed: int, split: str, count: int) -> Generated:
    """The first `count` samples of a split, from the cache if they are there, else made and put there.

    If the cache cannot be written the samples are made in memory; the progress and the log say so.

    Raises:
        DataError: the generator is to make distinct inputs and hardly finds new ones.
    """
    entry = GENERATORS[name]
    assert entry.chunk is not None
    made_from = {
        "generator": name,
        "version": entry.version,
        "options": options.model_dump(mode="json"),
        "seed": seed,
        "split": split,
    }
    distinct = entry.makes_distinct(options)
    cache = CacheEntry("generated", made_from | {"format": FORMAT, "chunk": entry.chunk, "distinct": distinct})
    collected = _Collected(distinct)
    share = SPLITS.count(split) / len(SPLITS) if distinct else 1
    made, num_chunks = 0, math.ceil(count / (entry.chunk * share))
    limit = PATIENCE * (num_chunks + 1) if distinct else num_chunks
    while collected.size < count:
        if made == limit:
            raise DataError(
                f"{name}, {split} split: there are too few different samples.",
                expected=f"{count} that differ from each other and from those of the other splits",
                found=f"{collected.size} in {collected.seen} that were drawn",
                todo="Ask for fewer samples, or choose options that allow more of them, such as larger sizes.",
            )
        before, stream = collected.size, canonical_json(made_from)
        jobs = [_job(entry, options, stream, split, number) for number in range(made, num_chunks)]
        for chunk in _get_chunks(cache, jobs, f"making {name}, {split} split, chunks"):
            collected.add(chunk)
        gain = max(1.0, (collected.size - before) / (num_chunks - made))
        made, num_chunks = num_chunks, min(limit, num_chunks + math.ceil((count - collected.size) / gain))
    return collected.first(count)


def make_chunk(job: ChunkJob) -> bytes:
    """The file of a chunk."""
    # Hashed: neighbouring seeds must not share streams.
    digest = hashlib.sha256(f"{job.stream}#{job.number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    made = job.generate(job.size, job.options, generator)
    inputs, labels = made.inputs, made.labels
    if made.kind == "tokens":
        inputs = inputs.to(token_type(made.vocabulary_size or 2**31))
    if job.distinct:
        # The hash decides alone, so no chunk need know of another, and no size of a split changes another split.
        splits = [SPLITS[name[0] % len(SPLITS)] for name in _names(inputs)]
        kept = torch.tensor([split == job.split for split in splits], dtype=torch.bool)
        inputs, labels = inputs[kept], labels[kept]
    about = {"kind": made.kind, "class_names": made.class_names, "vocabulary_size": made.vocabulary_size}
    stream = io.BytesIO()
    for part in (inputs.numpy(), labels.long().numpy(), np.frombuffer(json.dumps(about).encode(), np.uint8)):
        np.save(stream, part, allow_pickle=False)
    return stream.getvalue()


def read_chunk(content: bytes) -> Generated:
    """What `make_chunk` wrote."""
    stream = io.BytesIO(content)
    inputs, labels, about = (np.load(stream, allow_pickle=False) for _ in range(3))
    described = json.loads(about.tobytes())
    names = tuple(described["class_names"])
    kind, vocabulary_size = described["kind"], described["vocabulary_size"]
    return Generated(kind, torch.from_numpy(inputs), torch.from_numpy(labels), names, vocabulary_size)


def token_type(vocabulary_size: int) -> torch.dtype:
    """The smallest type for ids below `vocabulary_size` and -1."""
    for dtype in (torch.int8, torch.int16, torch.int32):
        if vocabulary_size - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def _job(entry: RegisteredGenerator, options: GeneratorOptions, stream: str, split: str, number: int) -> ChunkJob:
    assert entry.chunk is not None
    return ChunkJob(entry.generate, options, entry.chunk, entry.makes_distinct(options), split, stream, number)


def _get_chunks(cache: CacheEntry, jobs: Sequence[ChunkJob], what: str) -> list[Generated]:
    found: dict[int, Generated] = {}

    def look() -> list[ChunkJob]:
        for job in jobs:
            if job.number not in found and (content := cache.read(job.file)) is not None:
                found[job.number] = read_chunk(content)
        return [job for job in jobs if job.number not in found]

    def told_to_wait() -> None:
        tell(f"{what} (another process makes them)", min(cache.count(), jobs[-1].number + 1), jobs[-1].number + 1)

    def not_kept(error: CacheError) -> None:
        log.info("%s: %s", what, error)
        tell(f"{what} (not kept: {error})", jobs[0].number + len(found), jobs[-1].number + 1)

    def make(missing: Sequence[ChunkJob], keep: bool) -> None:
        for number, content in run_jobs(make_chunk, missing):
            if keep:
                try:
                    cache.write(missing[number].file, content)
                except CacheError as error:
                    keep = False
                    not_kept(error)
            found[missing[number].number] = read_chunk(content)
            tell(what, jobs[0].number + len(found), jobs[-1].number + 1)

    missing = look()
    if missing:
        try:
            held = contextlib.ExitStack()
            held.enter_context(cache.locked(told_to_wait))
        except CacheError as error:
            not_kept(error)
            make(missing, keep=False)
        else:
            with held:
                make(look(), keep=True)
    return [found[job.number] for job in jobs]


class _Collected:
    """Chunks in a row; of inputs that occur again only the first is kept, if they are to be distinct."""

    def __init__(self, distinct: bool) -> None:
        self._distinct = distinct
        self._names: set[bytes] = set()
        self._chunks: list[Generated] = []
        self.size = self.seen = 0

    def add(self, chunk: Generated) -> None:
        self.seen += len(chunk.inputs)
        if self._distinct:
            new = []
            for row, name in enumerate(_names(chunk.inputs)):
                if name not in self._names:
                    self._names.add(name)
                    new.append(row)
            if len(new) < len(chunk.inputs):
                labels = chunk.labels[new]
                chunk = Generated(chunk.kind, chunk.inputs[new], labels, chunk.class_names, chunk.vocabulary_size)
        self._chunks.append(chunk)
        self.size += len(chunk.inputs)

    def first(self, count: int) -> Generated:
        one = self._chunks[0]
        inputs = torch.cat([chunk.inputs for chunk in self._chunks])[:count]
        labels = torch.cat([chunk.labels for chunk in self._chunks])[:count]
        return Generated(one.kind, inputs, labels, one.class_names, one.vocabulary_size)


def _names(inputs: Tensor) -> list[bytes]:
    """A name for every input; two of a split have the same one in less than one of 10^27 cases."""
    width = inputs[0].numel() * inputs.element_size() if len(inputs) else 0
    content = inputs.contiguous().numpy().tobytes()
    return [
        hashlib.blake2b(content[row * width : (row + 1) * width], digest_size=16).digest() for row in range(len(inputs))
    ]

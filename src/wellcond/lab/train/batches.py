"""Which samples make up which update, and how they reach the model."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wellcond.errors import RecipeError, WellcondError
from wellcond.lab.seeding import epoch_order
from wellcond.lab.tasks.base import EVALUATION, Batch, SampleKey, Samples
from wellcond.lab.train.length import STOP_SIGNALS, leave_to_parent, starting_processes


@dataclass(frozen=True)
class UpdatePlan:
    """Samples of every update, and which of them one process has.

    An update takes the next `batch_size` samples of the epoch's order, in `accumulate` x `processes` equal parts: one
    process and many compute the same. With `repeats`, the order is that of the first samples alone, and each stands in
    it so many times in a row, under a draw of its own. A part ends with the `following` samples after it in its update,
    cyclically, for tasks that mix samples.
    """

    num_samples: int
    batch_size: int
    accumulate: int
    seed: int
    repeats: int = 1
    following: int = 0
    rank: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        total, parts, most = self.batch_size, self.accumulate * self.processes, self.num_samples
        if most < total:
            raise RecipeError(f"training.batch_size: expected at most the {most} training samples, found {total}")
        if total % parts:
            raise RecipeError(
                f"training.batch_size over processes x training.accumulate: {total} cannot be divided into {parts} "
                f"equal parts; expected a multiple of {parts}, for instance {parts * math.ceil(total / parts)}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Updates in an epoch."""
        return self.num_samples // self.batch_size

    def parts(self, start: float, stop: int) -> Iterator[list[SampleKey]]:
        """Samples of this process for the updates from `start`, which may be within one, to before `stop`, in parts."""
        size = self.batch_size // (self.accumulate * self.processes)
        order, of_epoch = torch.empty(0), -1
        for place in range(round(start * self.accumulate), stop * self.accumulate):
            step, part = divmod(place, self.accumulate)
            epoch, number = divmod(step, self.steps_per_epoch)
            if epoch != of_epoch:
                order, of_epoch = epoch_order(self.num_samples, self.seed, epoch), epoch
            first = (part * self.processes + self.rank) * size
            in_update = torch.arange(first, first + size + self.following) % self.batch_size
            in_epoch = number * self.batch_size + in_update
            indices, repeat = order[in_epoch // self.repeats], in_epoch % self.repeats
            yield list(zip(indices.tolist(), (epoch * self.repeats + repeat).tolist(), strict=True))


def evaluation_parts(num_samples: int, batch_size: int, rank: int, processes: int) -> list[list[SampleKey]]:
    """Samples of one process: each sample in exactly one; every process has as many parts, as shards need."""
    if num_samples < processes:
        raise RecipeError(f"expected at least one evaluation sample for each process, found {num_samples}")
    mine = [(index, EVALUATION) for index in range(rank, num_samples, processes)]
    count = min(num_samples // processes, math.ceil(num_samples / (processes * batch_size)))
    bounds = [len(mine) * part // count for part in range(count + 1)]
    return [mine[start:stop] for start, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class _Fetching(torch.utils.data.Dataset):
    """Batches by their keys, in a worker process."""

    samples: Samples

    def __getitem__(self, keys: list[SampleKey]) -> Batch | str:
        try:
            return self.samples.read(keys)
        except WellcondError as error:  # torch would hand on its traceback instead of what it says
            return str(error)


def _begin_work(worker: int) -> None:
    """Let only the parent act on stop signals, which often reach every process: it saves, then ends its workers."""
    leave_to_parent(*STOP_SIGNALS)


def fetch_batches(
    samples: Samples, parts: Iterable[list[SampleKey]], *, workers: int, device: torch.device
) -> Iterator[Batch]:
    """Batches on the device, decoded ahead by worker processes where that helps."""
    source: Iterator[Any]
    if workers == 0 or samples.in_memory:
        source = (samples.read(keys) for keys in parts)
    else:
        # By default a process that was spawned, as those of a comparison are, spawns its own: seconds of imports each.
        method = "fork" if sys.platform == "linux" else multiprocessing.get_start_method()
        loader = torch.utils.data.DataLoader(
            _Fetching(samples),
            batch_size=None,
            sampler=parts,  # type: ignore[arg-type]
            num_workers=workers,
            multiprocessing_context=method,
            worker_init_fn=_begin_work,
            pin_memory=device.type == "cuda",
            prefetch_factor=4,
        )
        with starting_processes(method):
            source = iter(loader)
    for batch in source:
        if isinstance(batch, str):
            raise WellcondError(batch)
        on_cpu = device.type == "cpu"
        sent = batch if on_cpu else {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        yield samples.finish(sent)

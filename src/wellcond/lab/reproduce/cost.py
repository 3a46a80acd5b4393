"""What a plan costs: updates, time, GPU hours, disk. Everything but the number of runs is an estimate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache

import torch

from wellcond.lab.reproduce.plan import Plan, PlannedStudy, is_complete
from wellcond.lab.train.run_folder import RunFolder

GPU_FLOPS = 1e14
"""Assumed of one GPU in training: a third of an A100's peak in bfloat16."""
CPU_SHARE = 0.3
"""Share of its speed at one matrix product that this machine reaches in training."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and two moments in float32."""
RECORD_BYTES = 1_000_000


@dataclass(frozen=True)
class Cost:
    """Of the runs of a study that are missing, or of several studies."""

    runs: int = 0
    done: int = 0
    updates: float = 0.0
    """NaN if not known."""
    seconds: float = 0.0
    """Of one process on this machine; NaN if not known."""
    gpu_hours: float = 0.0
    bytes: float = 0.0
    measured: bool = False
    """Whether the time is of finished runs here."""

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other."""
        return Cost(
            self.runs + other.runs,
            self.done + other.done,
            self.updates + other.updates,
            self.seconds + other.seconds,
            self.gpu_hours + other.gpu_hours,
            self.bytes + other.bytes,
            self.measured and other.measured,
        )


def plan_cost(plan: Plan) -> Cost:
    """Of everything that is missing."""
    return sum(map(study_cost, plan.studies), Cost())


def study_cost(study: PlannedStudy) -> Cost:
    """Of what is missing of one study."""
    missing, done = len(study.missing), len(study.jobs) - len(study.missing)
    tuned = study.glue_folders
    tuning = sum(not is_complete(folder) for folder in tuned)
    per_run = updates_per_run(study)
    known = finished_seconds(study)
    seconds = missing * (known if known is not None else _seconds_per_run(study)) + tuning * _glue_seconds(study)
    return Cost(
        runs=missing + tuning,
        done=done + len(tuned) - tuning,
        updates=missing * per_run,
        seconds=seconds,
        gpu_hours=missing * gpu_hours_per_run(study),
        bytes=missing * (BYTES_PER_PARAMETER * study.settings.parameters * 1e6 + RECORD_BYTES) + tuning * RECORD_BYTES,
        measured=known is not None,
    )


def updates_per_run(study: PlannedStudy) -> float:
    """Updates of one run; NaN where the length is in epochs of a set whose size is not known."""
    training = study.recipe.training
    if training.length.steps is not None:
        return float(training.length.steps)
    assert training.length.epochs is not None
    samples = study.settings.samples or study.recipe.data.model_dump().get("limit_train")
    if samples is None and study.recipe.data.source == "digits":
        samples = 1038  # of 1,297; the others are held out
    return math.nan if samples is None else training.length.epochs * max(1, samples // training.batch_size)


def gpu_hours_per_run(study: PlannedStudy) -> float:
    """On GPUs of the assumed speed; 0 for what is meant for a CPU, NaN if not known."""
    settings = study.settings
    if not settings.gpus:
        return 0.0
    return settings.gpu_hours if settings.gpu_hours is not None else _flops(study) / GPU_FLOPS / 3600


def _flops(study: PlannedStudy) -> float:
    """Of training: the backward pass costs twice the forward pass."""
    if study.settings.gflops is None:
        return math.nan
    return 3e9 * study.settings.gflops * updates_per_run(study) * study.recipe.training.batch_size


def finished_seconds(study: PlannedStudy) -> float | None:
    """Mean time of the runs that are complete; None if there is none."""
    times = []
    for job in study.jobs:
        if is_complete(job.folder):
            record = RunFolder(job.folder).read_record() or {}
            times.append(math.fsum(value for value in (record.get("seconds") or {}).values() if value))
    return math.fsum(times) / len(times) if times else None


def _seconds_per_run(study: PlannedStudy) -> float:
    if study.settings.seconds is not None:
        return study.settings.seconds
    if torch.cuda.is_available():
        return 3600 * gpu_hours_per_run(study) / torch.cuda.device_count()
    return _flops(study) / (CPU_SHARE * matmul_speed())


def _glue_seconds(study: PlannedStudy) -> float:
    return study.settings.glue_seconds if study.settings.seconds is not None else 600.0


@cache
def matmul_speed() -> float:
    """Flops of one matrix product a second, here and now."""
    size = 768
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    a @ a
    start = time.perf_counter()
    for _ in range(5):
        a @ a
    return 5 * 2 * size**3 / (time.perf_counter() - start)

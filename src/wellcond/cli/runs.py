"""Runs of every command that trains: how many at once, how they are watched, and what is told at their end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from wellcond.cli.checks import read_jobs
from wellcond.cli.console import make_console
from wellcond.cli.progress import RunsProgress
from wellcond.files import to_json
from wellcond.lab.cluster import RaySettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison
from wellcond.lab.train.run import Job

MANY = 200
"""Runs from which their number is told before they start."""


def choose_workers(asked: str, recipe: Recipe, *, cpu: bool) -> int:
    """Runs at once: as many as there are cores, if each keeps to one thread and there is no GPU to share.

    Raises: OptionError.
    """
    number = read_jobs(asked)
    if number is not None:
        return number
    if "WORLD_SIZE" in os.environ or (torch.cuda.is_available() and not cpu) or recipe.training.threads != 1:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first_process() -> bool:
    """Whether this process may print; `torchrun` and `accelerate launch` start several."""
    return os.environ.get("RANK", "0") == "0"


def watch(num_jobs: int, run: Callable[[JobObserver], Outcome], *, quiet: bool) -> Outcome:
    """Run something that reports on its jobs, and show how they go."""
    progress = RunsProgress(num_jobs, quiet=quiet or not is_first_process())
    if num_jobs > MANY and not progress.quiet:
        told = f"{num_jobs:,} runs. (--seeds 2000 means 2,000 seeds, --seeds 2000,2001 these two.)"
        Console(stderr=True).print(told, markup=False, highlight=False, soft_wrap=True)
    with progress.shown():
        return run(progress.observe)


def run_jobs(jobs: Sequence[Job], num_workers: int, *, quiet: bool, ray: RaySettings | None = None) -> Outcome:
    """`watch` of jobs that are independent of each other."""

    def run(observer: JobObserver) -> Outcome:
        return run_comparison(jobs, num_workers=num_workers, observer=observer, ray=ray)

    return watch(len(jobs), run, quiet=quiet)


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """End the group of processes afterwards, if there is one."""

    def in_a_group() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    try:
        yield
        if in_a_group():
            torch.distributed.barrier()  # nobody leaves while another process still waits for an answer
    finally:
        if in_a_group():
            torch.distributed.destroy_process_group()
            # Models may still hold the group. One of gloo's threads that lets go of its last tensor while the
            # interpreter ends would abort the process, after all work is done: give them the moment that takes.
            time.sleep(0.2)


def exit_code(outcome: Outcome) -> int:
    """130 if the user stopped it, 1 if a run failed, else 0."""
    return 130 if outcome.interrupted else 1 if outcome.failures else 0


def tell_end(outcome: Outcome, num_jobs: int, out: Console | None = None) -> int:
    """Say what failed and what is left; returns the exit code."""
    if is_first_process():
        out = out or make_console()
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        if outcome.interrupted:
            left = num_jobs - sum(record["status"] in ("finished", "diverged") for record in outcome.records)
            out.print(f"[yellow]stopped[/] with {left} of {num_jobs} runs to go; the same command resumes from here")
    return _own_code(outcome)


def print_json(outcome: Outcome, more: Mapping[str, Any] | None = None) -> int:
    """Print what became of every run, and `more`; returns the exit code."""
    if is_first_process():
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [{name: record[name] for name in shown if name in record} for record in outcome.records]
        rows += [
            {"method": job.method.label, "seed": job.seed, "status": "failed", "reason": problem}
            for job, problem in outcome.failures
        ]
        print(to_json({"runs": rows, "interrupted": outcome.interrupted, **(more or {})}, indent=1))
    return _own_code(outcome)


def _own_code(outcome: Outcome) -> int:
    """The first process alone says that the user stopped it."""
    return exit_code(outcome) if is_first_process() else int(bool(outcome.failures))

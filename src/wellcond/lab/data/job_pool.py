"""Independent jobs in several processes, if that is worth starting them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from wellcond.lab.settings import RecipeError

POOL_SECONDS = 6.0
"""Work below this is done by the time that processes have started and imported torch."""
SECONDS_TO_HEAR = 0.5
"""Until Ctrl-C is heard at the latest."""

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def asked_workers() -> int | None:
    """The number of processes that WELLCOND_WORKERS asks for.

    Raises: RecipeError if it is not a number from 1.
    """
    text = os.environ.get("WELLCOND_WORKERS", "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"WELLCOND_WORKERS: expected a number of processes from 1, found {text!r}")
    return int(text)


def run_jobs(
    work: Callable[[JobT], ResultT], jobs: Sequence[JobT], *, workers: int | None = None
) -> Iterator[tuple[int, ResultT]]:
    """Number and result of every job, in the order in which they are done.

    Args:
        work: A function of a module; it runs in this process if it, or a job, cannot be sent to another.
        jobs: They share nothing, so the results do not depend on who does them.
        workers: Most processes; by default WELLCOND_WORKERS, or as many as there are cores. They are started if the
            time of the first jobs promises that it pays.
    """
    limit = min(len(jobs), workers or asked_workers() or _num_cores())
    if multiprocessing.current_process().daemon:  # such a process may have no children
        limit = 1
    seconds = 0.0
    for number, job in enumerate(jobs):
        left = len(jobs) - number
        # A first job that was slow by chance says little.
        pays = seconds > POOL_SECONDS / 10 and seconds / number * left > POOL_SECONDS
        if limit > 1 and left > 1 and pays and _can_be_sent((work, job)):
            yield from _run_in_pool(work, jobs, number, min(limit, left))
            return
        start = time.perf_counter()
        result = work(job)
        seconds += time.perf_counter() - start
        yield number, result


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _can_be_sent(value: object) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _run_in_pool(
    work: Callable[[JobT], ResultT], jobs: Sequence[JobT], first: int, workers: int
) -> Iterator[tuple[int, ResultT]]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    left = set(range(first, len(jobs)))
    try:
        with _interrupts_ignored():  # what children inherit: Ctrl-C is for this process to act on
            numbers = {executor.submit(work, jobs[number]): number for number in sorted(left)}
        while numbers:
            # A signal that comes as the wait begins is heard when it ends.
            done, _ = wait(numbers, timeout=SECONDS_TO_HEAR, return_when=FIRST_COMPLETED)
            for future in done:
                number, result = numbers.pop(future), future.result()
                left.remove(number)
                yield number, result
    except BrokenProcessPool:
        # A process died (out of memory, or it cannot import the caller's script), or its error could not be sent.
        for number in sorted(left):
            yield number, work(jobs[number])
    finally:
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if former is None else former)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker holds both ends of its queue, so it would wait for ever if the parent is killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

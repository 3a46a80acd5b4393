"""What the tests of chunks run in other processes, which import nothing else of the tests."""

import os
import time
from pathlib import Path

import torch

from wellcond.experiments.data import DataError, Generated, GeneratorOptions


class CountingOptions(GeneratorOptions):
    width: int = 6
    record: str | None = None
    seconds: float = 0.0
    fail_from: int | None = None


def counting(count, options, generator):
    """Random tokens; notes each call in a file."""
    if options.record is not None:
        with open(options.record, "a") as file:
            file.write(f"{os.getpid()}\n")
        if options.fail_from is not None and len(Path(options.record).read_text().split()) > options.fail_from:
            raise KeyboardInterrupt
    time.sleep(options.seconds)
    tokens = torch.randint(-1, 50, (count, options.width), generator=generator)
    return Generated("tokens", tokens, tokens[:, 0].clamp(min=0) % 2, ("even", "odd"), 50)


def dies_in_a_worker(job):
    if os.getpid() != job:
        os._exit(3)
    return "done"


def fails_later(job):
    if job:
        raise DataError("no", expected="a", found="b", todo="c")

"""What the tests of chunks run in other processes, which import nothing else of the tests."""

import os
import time
from pathlib import Path

import torch

from wellcond.errors import DataError
from wellcond.lab.data import GeneratorOptions, TensorDataset


class CountingOptions(GeneratorOptions):
    class_names = ("even", "odd")
    vocabulary_size = 50
    chunk = 10
    width: int = 6
    record: str | None = None
    fail_from: int | None = None
    hold_from: int | None = None
    refuse_from: int | None = None


class DistinctOptions(CountingOptions):
    @property
    def distinct(self):
        return True


def counting(count, options, generator):
    """Random tokens; notes each call in a file. Calls beyond a number fail or wait, for a file with the end .open."""
    if options.record is not None:
        with open(options.record, "a") as file:
            file.write(f"{os.getpid()}\n")
        number = len(Path(options.record).read_text().split())
        if options.fail_from is not None and number > options.fail_from:
            raise KeyboardInterrupt
        if options.refuse_from is not None and number > options.refuse_from:
            raise DataError("no", expected="a", found="b", todo="c")
        while (
            options.hold_from is not None and number > options.hold_from and not Path(f"{options.record}.open").exists()
        ):
            time.sleep(0.02)
    tokens = torch.randint(-1, 50, (count, options.width), generator=generator).to(torch.int8)
    return TensorDataset("tokens", tokens, tokens[:, 0].long().clamp(min=0) % 2)

"""Samples per second of the generators of Long Range Arena data, made anew and read back from the cache.

The goal for ListOps at its published size, 96,000 + 2,000 + 2,000 expressions, is three minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from wellcond.lab.data import load_data, resolve_config


@dataclass(frozen=True)
class Case:
    """What to make, and in how many seconds it should be done."""

    name: str
    generator: str
    sizes: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None


CASES = [
    Case("listops, published", "listops", (96_000, 2_000, 2_000), goal=180),
    Case(
        "listops, 128 symbols",
        "listops",
        (20_000, 2_000, 2_000),
        {"max_depth": 5, "max_args": 5, "min_length": 10, "max_length": 128},
        goal=10,
    ),
    Case("pathfinder, 32 pixels", "pathfinder", (8_000, 1_000, 1_000), goal=100),
    Case(
        "pathfinder, 16 pixels", "pathfinder", (8_000, 1_000, 1_000), {"image_size": 16, "contour_length": 4}, goal=20
    ),
]


def seconds(case: Case) -> float:
    train, evaluation, test = case.sizes
    fields = {"num_train": train, "num_evaluation": evaluation, "num_test": test, "options": case.options}
    config = resolve_config({"source": "generated", "generator": case.generator, **fields})
    start = time.perf_counter()
    load_data(config)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run cases whose name holds this text")
    arguments = parser.parse_args()
    for case in CASES:
        if arguments.only is not None and arguments.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["WELLCOND_CACHE"] = folder
            made, read = seconds(case), seconds(case)
        count = sum(case.sizes)
        verdict = "" if case.goal is None else f" ({'meets' if made <= case.goal else 'MISSES'} {case.goal:g} s)"
        print(f"{case.name}: {count} made in {made:.1f} s, {count / made:.0f} samples/s{verdict}; read in {read:.1f} s")


if __name__ == "__main__":
    main()

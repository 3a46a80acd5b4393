"""Processor time of `init_` by method, on one model (docs/methods.md). Run: make bench, or this file."""

from __future__ import annotations

import argparse
import time

import timm
import torch

import wellcond as wc

METHODS = ("default", "gaussian", "orthogonal", "conditioned", "mimetic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="vit_tiny_patch16_224", help="name of a model of timm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(options.model)
    print(f"{options.model}, torch {torch.__version__}, one thread, fastest of {options.rounds}")
    for method in METHODS:
        times = []
        for _ in range(options.rounds):
            start = time.process_time()
            wc.init_(model, method)
            times.append(time.process_time() - start)
        print(f"{method:12} {1000 * min(times):8.0f} ms")


if __name__ == "__main__":
    main()

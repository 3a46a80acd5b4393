"""A training step of ViT-S with a correction of its weights or of its tokens, and without one.

Steps of all variants take turns and count processor time on one thread; of each the shortest counts. Every variant is a
copy of one model with AdamW. The cost of a correction of weights does not depend on the batch, which is small here: in
larger batches its ratio comes nearer to 1. That of a correction of tokens grows with the batch.

Run: python benchmarks/corrections.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from acting import Step, training_step, vit_s
from torch import nn

import wellcond as wc

METHODS = ("equilibrated", "sigma_reparam", "balanced", "polar")
TOKENS = {
    "conditioned tokens": ("conditioned", {}),
    "grayed tokens": ("grayed", {}),
    "grayed, DCT": ("grayed", {"by": "dct"}),
}


def variants() -> dict[str, Step]:
    """The steps by name, ready to be timed."""
    torch.manual_seed(0)
    plain, loss_of = vit_s()
    models: dict[str, nn.Module] = {"plain": plain.train()}
    for method in METHODS:
        models[method] = wc.condition_(copy.deepcopy(plain), method)
    for name, (method, options) in TOKENS.items():
        models[name] = wc.condition_tokens_(copy.deepcopy(plain), method, **options)
    return {
        name: training_step(model, loss_of, [torch.optim.AdamW(model.parameters(), lr=1e-5)])
        for name, model in models.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    steps = variants()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            times[name].append(time.process_time() - begun)
    base = min(times["plain"])
    print(f"ViT-S/16, 2 images: a plain step {base:.2f} s, {rounds} rounds")
    for name in list(steps)[1:]:
        took = min(times[name])
        print(f"  {name:18} {took / base:6.3f}   (+{1e3 * (took - base):.0f} ms)", flush=True)


if __name__ == "__main__":
    main()

"""A training step beside `AttentionMonitor` against the same step without it: ViT-S and GPT-2 small, in one run.

Steps of all variants take turns and count processor time on one thread. In every round each is divided by the plain
step of that round, and the median over the rounds is shown, so that load which comes and goes disturbs both sides. At
``every=1`` every step is read, weights at every 50th; at ``every=50`` one step of 50. The goals are ratios of at most
1.10 and 1.01.

Run: python benchmarks/monitor.py [--rounds 9] [--only vit|gpt2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc

PERIOD = 50


def vit_s() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Timm's ViT-S/16 at 224 x 224, 2 images."""
    images, labels = torch.randn(2, 3, 224, 224), torch.arange(2)
    model = timm.create_model("vit_small_patch16_224", num_classes=10)
    return model, lambda model: nn.functional.cross_entropy(model(images), labels)


def gpt2_small() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """GPT-2 small of transformers with SDPA and without dropout, 1 x 512 tokens."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    words = torch.randint(50257, (1, 512))
    return GPT2LMHeadModel(GPT2Config(**rates)), lambda model: model(input_ids=words, labels=words).loss


MODELS = {"vit": ("ViT-S/16, 2 images", vit_s), "gpt2": ("GPT-2 small, 512 tokens", gpt2_small)}


def seconds_of(step: Callable[[], None]) -> float:
    """Processor time of a call."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


def compare(name: str, rounds: int) -> None:
    """Print the ratios of a model."""
    title, build = MODELS[name]
    torch.manual_seed(0)
    model, loss_of = build()
    model.train()
    optimizer, sites = torch.optim.AdamW(model.parameters(), lr=1e-4), wc.find_attention(model)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(**options: object) -> float:
        # The first step of a monitor is due and is left out; the one that is timed is due with every=1 alone. What the
        # host reads one step later is timed with it.
        with wc.AttentionMonitor(model, sites=sites, **options) as monitor:
            loss_of(model)
            monitor.discard()
            return seconds_of(lambda: (step(), monitor.step(), monitor.close()))

    step()
    plain, ratios = [], {"read": [], "weights": [], "idle": []}
    for _ in range(rounds):
        plain.append(seconds_of(step))
        ratios["read"].append(watched(every=1, weights=False) / plain[-1])
        ratios["weights"].append(watched(every=1, weights_every=1) / plain[-1])
        ratios["idle"].append(watched(every=10_000) / plain[-1])
    read, weights, idle = (statistics.median(found) for found in ratios.values())
    print(f"{title}: a step without {statistics.median(plain):.2f} s, {rounds} rounds")
    print(f"  a step that is not due       {idle:.3f}")
    print(f"  a step that is read          {read:.3f}   with weights {weights:.3f}")
    print(f"  every=1, weights every {PERIOD}    {read + (weights - read) / PERIOD:.3f}   (goal 1.10)")
    print(f"  every={PERIOD}                     {1 + (weights - 1) / PERIOD:.4f}  (goal 1.01)", flush=True)


def main() -> None:
    """Compare the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=sorted(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in [arguments.only] if arguments.only else MODELS:
        compare(name, arguments.rounds)


if __name__ == "__main__":
    main()

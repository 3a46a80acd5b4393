"""A training step beside what acts on the weights: QKClip, SpectralCap, and Muon by head against torch.optim.Muon.

Steps of all variants take turns on one model and count processor time on one thread; of each the shortest counts,
which other processes disturb least. Every ratio is to the plain step of AdamW in the same run. The cost of all of them
does not depend on the batch, which is small here: in larger batches the ratios come nearer to 1.

torch.optim.Muon iterates in bfloat16, which is slow on a CPU: it gets float32, as all others have it here.

Run: python benchmarks/acting.py [--rounds 2] [--only vit|gpt2]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import timm
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.lab.optimizers import InSingle

Loss = Callable[[nn.Module], Tensor]
Step = Callable[[], None]


def vit_s() -> tuple[nn.Module, Loss]:
    """Timm's ViT-S/16 at 224 x 224, 2 images."""
    images, labels = torch.randn(2, 3, 224, 224), torch.arange(2)
    model = timm.create_model("vit_small_patch16_224", num_classes=10)
    return model, lambda model: nn.functional.cross_entropy(model(images), labels)


def gpt2_small() -> tuple[nn.Module, Loss]:
    """Four of the twelve layers of GPT-2 small, without dropout, 1 x 256 tokens."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    words = torch.randint(50257, (1, 256))
    return GPT2LMHeadModel(GPT2Config(n_layer=4, **rates)), lambda model: model(input_ids=words, labels=words).loss


MODELS = {"vit": ("ViT-S/16, 2 images", vit_s), "gpt2": ("GPT-2 small, 4 of 12 layers, 256 tokens", gpt2_small)}


def training_step(model: nn.Module, loss_of: Loss, optimizers: Sequence[torch.optim.Optimizer]) -> Step:
    """One step of these optimisers."""

    def step() -> None:
        loss_of(model).backward()
        for optimizer in optimizers:
            single = isinstance(optimizer, torch.optim.Muon)
            with InSingle() if single else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    return step


class Variants:
    """The steps of one model; what a variant hooks is there only while it has its turn."""

    def __init__(self, model: nn.Module, loss_of: Loss) -> None:
        self.model, self.sites = model, wc.find_attention(model)
        self.adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.plain = training_step(model, loss_of, [self.adamw])
        self.muons: dict[str, Step] = {}
        for heads in ("fused", "each", "pairs"):
            groups = wc.muon_groups(model, heads, sites=self.sites)
            others = torch.optim.AdamW(groups.others, lr=1e-5)
            self.muons[f"HeadMuon, {heads}"] = training_step(model, loss_of, [wc.HeadMuon(groups, lr=1e-5), others])
            if heads == "fused":
                muon = torch.optim.Muon(list(groups.matrices), lr=1e-5)
                self.muons["torch.optim.Muon"] = training_step(model, loss_of, [muon, others])

    @property
    def names(self) -> list[str]:
        """Of all variants."""
        return ["plain", "QKClip", "SpectralCap", *self.muons]

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[Step]:
        """The step of a variant, ready to be timed."""
        acting = None
        if name == "QKClip":
            acting = wc.QKClip(self.model, self.adamw, tau=100.0, sites=self.sites)
        elif name == "SpectralCap":
            acting = wc.SpectralCap(self.model, self.adamw, w_max=1.0, sites=self.sites)
        try:
            yield self.muons.get(name, self.plain)
        finally:
            if acting is not None:
                acting.remove()


def compare(name: str, rounds: int) -> None:
    """Print the ratios of a model."""
    title, build = MODELS[name]
    torch.manual_seed(0)
    model, loss_of = build()
    variants = Variants(model.train(), loss_of)
    variants.plain()
    times: dict[str, list[float]] = {variant: [] for variant in variants.names}
    for _ in range(rounds):
        for variant in variants.names:
            with variants.turn(variant) as step:
                begun = time.process_time()
                step()
                times[variant].append(time.process_time() - begun)
    base = min(times["plain"])
    print(f"{title}: a plain step {base:.2f} s, {rounds} rounds")
    for variant in variants.names[1:]:
        took = min(times[variant])
        print(f"  {variant:18} {took / base:6.3f}   ({1e3 * (took - base):+.0f} ms)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=sorted(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [options.only] if options.only else MODELS:
        compare(name, options.rounds)


if __name__ == "__main__":
    main()

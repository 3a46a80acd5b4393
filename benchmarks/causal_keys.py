"""Median log10 kappa(J) of causal attention at the start, by initialisation (docs/methods.md).

Run: python benchmarks/causal_keys.py [--draws 6] [16,48,12 24,48,12 ...] with sizes N,D,d. Layer-normed Gaussian
tokens, logit scale 1/sqrt(d), float64. The default is N(0, 0.02^2 768/D).
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from torch import Tensor, nn

from wellcond import condition_, find_attention, init_, jacobian_spectrum

SIZES = ("16,48,12", "24,48,12", "32,64,16", "64,64,16", "128,64,16")
OWN_TOKEN = (0.1, 0.25, 0.5, 0.75)


def prepared(label: str, seed: int, tokens: int, width: int, head_dim: int) -> nn.Module:
    """An attention initialised by the method of a label."""
    model = nn.MultiheadAttention(width, width // head_dim, bias=False)
    generator = torch.Generator().manual_seed(seed)
    name, _, target = label.partition(" tied ")
    if target:
        return init_(model, name, keys="tied", own_token=float(target), tokens=tokens, generator=generator)
    if name in ("default", "identity(1)"):
        init_(model, "gaussian", std=0.02 * (768 / width) ** 0.5, generator=generator)
        return condition_(model, "identity", lam=1.0, layout="per_head") if name == "identity(1)" else model
    return init_(model, name, generator=generator)


def log_kappa(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """log10 kappa(J) of the first head under a causal mask, and its mean own-token probability."""
    site = find_attention(model)[0]
    q, k, v = (site.slots[role].read()[0].detach().double() for role in "qkv")
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    spectrum = jacobian_spectrum(x, q, k, v, mask=allowed)
    logits = (x @ q.T) @ (x @ k.T).T / len(q) ** 0.5
    own = logits.masked_fill(~allowed, -torch.inf).softmax(-1).diagonal().mean()
    return math.log10(spectrum.pseudo_condition_number), float(own)


def main() -> None:
    """Print one row per method and size: median, range, own-token probability."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--draws", type=int, default=6)
    arguments = parser.parse_args()
    plain = ["default", "gaussian", "conditioned", "mimetic", "identity(1)"]
    labels = [*plain, *(f"conditioned tied {p}" for p in OWN_TOKEN), "gaussian tied 0.25", "gaussian tied 0.5"]
    for size in arguments.sizes:
        n, width, head_dim = map(int, size.split(","))
        for label in labels:
            found = []
            for seed in range(arguments.draws):
                x = torch.randn(n, width, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
                x = nn.functional.layer_norm(x, (width,))
                found.append(log_kappa(prepared(label, seed, n, width, head_dim), x))
            kappas, own = zip(*found, strict=True)
            print(
                f"{size:10} {label:22} {statistics.median(kappas):6.2f}  [{min(kappas):.2f}, {max(kappas):.2f}]"
                f"  own {statistics.median(own):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

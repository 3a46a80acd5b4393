"""A small model of every family, its capture, and what it hands to W_O itself: computed once for all tests."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from contracts import cases_hf, cases_timm
from contracts.harness import randomise_
from wellcond.attention.site import AttentionSite
from wellcond.jacobian.capture import CapturedAttention, capture_attention

BUILD = {f"timm-{name}": (case.build, case.input) for name, case in cases_timm.CASES.items()}
BUILD |= {f"hf-{case.name}": (case.build, case.inputs) for case in cases_hf.CASES}
READERS = {f"timm-{name}": case.reader for name, case in cases_timm.CASES.items()}
# The model itself rounds to float32 somewhere; its copy in float64 does not.
FLOAT32 = {f"hf-{case.name}" for case in cases_hf.CASES if case.in_float32} | {"timm-pool_2d_rotary", "hf-qwen3-next"}


@dataclass(frozen=True, eq=False)
class Family:
    """`heads`: what W_O reads of every attention, by head (tokens, H, dv); None where it reads nothing of this form."""

    model: nn.Module
    batch: Any
    captured: tuple[CapturedAttention, ...]
    heads: tuple[Tensor | None, ...]
    tolerance: float


@cache
def family(name: str) -> Family:
    torch.manual_seed(0)
    build, make_input = BUILD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = randomise_(build()), make_input()
        captured = tuple(capture_attention(model, batch))
        heads = read_by_output(model, [c.site for c in captured], batch, reader=READERS.get(name))
    return Family(model, batch, captured, heads, 1e-6 if name in FLOAT32 else 1e-8)


def run(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def read_by_output(
    model: nn.Module, sites: Sequence[AttentionSite], batch: Any, *, reader=None, grad=False
) -> tuple[Any, ...]:
    """What the model hands to every W_O in its first call; without one, to `reader` of a module, or what it returns."""
    seen: list[list[Any]] = [[] for _ in sites]
    handles = []
    for site, found in zip(sites, seen, strict=True):
        keep = lambda module, args, output=None, found=found: found.append(args[0] if output is None else output)  # noqa: E731
        if site.o is None and reader is None:
            handles.append(site.module.register_forward_hook(keep))
        else:
            owner = reader(site.module) if site.o is None else site.o.owner
            handles.append(owner.register_forward_pre_hook(keep))
    try:
        with torch.set_grad_enabled(grad):
            run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(_by_head(site, found[0]) if found else None for site, found in zip(sites, seen, strict=True))


def _by_head(site: AttentionSite, heads: Tensor) -> Tensor:
    owner = site.q.owner if site.o is None else site.o.owner
    heads = heads.movedim(1, -1) if isinstance(owner, nn.Conv2d) else heads
    rows = torch.arange(heads.shape[-1]).view(site.num_heads, -1) if site.o is None else site.o.rows
    return heads.reshape(-1, heads.shape[-1])[:, rows]


def recomputed(captured: CapturedAttention) -> Tensor:
    """Output of every head on every sample from what was captured, (tokens, H, dv)."""
    groups = range(captured.site.num_kv_heads)
    samples = range(captured.num_samples)
    return torch.cat([torch.cat([captured.head(kv, s).output() for kv in groups]).transpose(0, 1) for s in samples])

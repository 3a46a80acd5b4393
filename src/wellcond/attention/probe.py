"""Ask an attention module what it computes, by running a copy of it on a few random tokens.

Shapes cannot tell `[Q|K|V]` from per-head interleaving, so an unknown class is believed only if its own forward pass
multiplies exactly the q, k and v that a hypothesis predicts. Every product of a forward pass, however it was written
(`@`, einsum, scaled_dot_product_attention), reaches torch's dispatcher as `bmm` or `mm`; a dispatch mode records their
operands, and the softmax between them gives scale and causality.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.attention.plain_copy import gathered, plain_copy
from wellcond.attention.site import AttentionSite

NUM_TOKENS = 5
MAX_PARAMETERS = 64_000_000
RELATIVE_TOLERANCE = 1e-5  # some modules compute in float32 inside, whatever they are given


class ProductRecorder(TorchDispatchMode):
    """Records operands of every matrix product, and input and output of every softmax."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.products: list[tuple[Tensor, Tensor]] = []
        self.softmaxes: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and keep what it multiplied."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("bmm", "mm"):
            self.products.append((as_batch(args[0]), as_batch(args[1])))
        elif name in ("baddbmm", "addmm"):
            self.products.append((as_batch(args[1]), as_batch(args[2])))
        elif name in ("_softmax", "_safe_softmax"):
            self.softmaxes.append((args[0].detach().clone(), result.detach().clone()))
        return result


def as_batch(matrix: Tensor) -> Tensor:
    """A recorded operand as (batch, rows, columns)."""
    return matrix.detach().clone().reshape(-1, *matrix.shape[-2:])


def proportional(found: Tensor, expected: Tensor) -> float | None:
    """The factor c with found = c * expected, or None."""
    if found.shape != expected.shape:
        return None
    factor = float((found * expected).sum() / (expected * expected).sum())
    off = float((found - factor * expected).norm())
    return factor if factor != 0 and off <= RELATIVE_TOLERANCE * float(found.norm()) else None


def match(found: Tensor, expected: Tensor) -> tuple[float, bool] | None:
    """(factor, rotated) if `found` is the expected heads, exactly or up to a rotation of each token (rotary)."""
    factor = proportional(found, expected)
    if factor is not None:
        return factor, False
    if found.shape != expected.shape:
        return None
    # A rotary embedding keeps the length of every token of every head.
    factor = proportional(found.norm(dim=-1), expected.norm(dim=-1))
    return None if factor is None else (factor, True)


@dataclass(frozen=True)
class Observation:
    """What a module was seen to compute. `agrees` is None when it could not be run."""

    agrees: bool | None
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


def expected_heads(site: AttentionSite, x_ND: Tensor) -> dict[str, Tensor]:
    """q, k, v of every head by the site's own account, (heads, tokens, head_dim); k and v repeated per group."""
    result = {}
    for role, slot in (("q", site.q), ("k", site.k), ("v", site.v)):
        heads = torch.einsum("nc,hdc->hnd", x_ND, slot.read())
        bias = slot.read_bias()
        if bias is not None:
            heads = heads + bias[:, None, :]
        result[role] = heads.repeat_interleave(site.num_heads // slot.num_heads, dim=0)
    return result


def compare(recorder: ProductRecorder, heads: dict[str, Tensor]) -> Observation:
    """Whether recorded products are softmax attention on the expected heads."""
    q, k, v = heads["q"], heads["k"], heads["v"]
    for left, right in recorder.products:
        found_q, found_k = match(left, q), match(right.mT, k)
        if found_q is None or found_k is None:
            continue
        for weights, values in recorder.products:
            if proportional(values, v) is None:
                continue
            for logits, p in recorder.softmaxes:
                if p.numel() == weights.numel() and torch.equal(p.reshape_as(weights), weights):
                    facts = _facts(logits.reshape_as(weights), weights, left @ right)
                    if facts["scale"] is not None:
                        facts["scale"] = float(f"{facts['scale'] * found_q[0] * found_k[0]:.7g}")
                    facts["rotary"] = found_q[1] or found_k[1]
                    return Observation(True, "its own forward pass multiplies these heads", facts)
    return Observation(False, "its own forward pass multiplies other rows than these")


def _facts(logits: Tensor, p: Tensor, products: Tensor) -> dict[str, Any]:
    above = torch.ones_like(p[0]).triu(1).bool()
    causal = bool((p[:, above] < 1e-12).all())
    seen = (p > 0) & torch.isfinite(logits) & (logits > -1e8)
    factor = proportional(logits[seen], products[seen])
    # A bias on the logits leaves no common factor: the scale is then not measurable this way.
    return {"causal": causal, "scale": factor, "relative_position_bias": factor is None}


def observe(site: AttentionSite, describe: Any) -> Observation:
    """Run a copy of the site's module and compare.

    `describe(module)` builds the same hypothesis on the copy. Buffers of a meta-device module have no values, so such
    a module is only run if it has none.
    """
    module = site.module
    if sum(p.numel() for p in module.parameters()) > MAX_PARAMETERS:
        return Observation(None, f"it has more than {MAX_PARAMETERS:,} parameters")
    on_meta = any(p.device.type == "meta" for p in module.parameters())
    if on_meta and any(True for _ in module.buffers()):
        return Observation(None, "it is on the meta device and has buffers")
    generator = torch.Generator().manual_seed(1)
    x_ND = torch.randn(NUM_TOKENS, site.in_features, generator=generator, dtype=torch.float64)
    recorder = ProductRecorder()
    try:
        replica = _random_replica(module)
        arguments = _arguments(replica, x_ND[None])
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]), recorder:
            replica(*arguments)
    except Exception as error:  # an arbitrary module may raise anything when copied or run; the reason is passed on
        return Observation(None, f"its forward pass could not be tried ({type(error).__name__}: {error})")
    with torch.no_grad():
        return compare(recorder, expected_heads(describe(replica), x_ND))


def _random_replica(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return gathered(tensor)
        fan_in = tensor.shape[-1] if tensor.dim() > 1 else 1
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / max(fan_in, 1) ** 0.5

    replica = plain_copy(module, noise).double()
    replica.eval()  # on its own: some classes override train() and return nothing
    return replica


def _arguments(module: nn.Module, x_BND: Tensor) -> tuple[Tensor, ...]:
    required = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = tuple(p.name for p in required)
    takes_three = len(names) == 3 and all(n[0] == letter for n, letter in zip(names, "qkv", strict=True))
    if len(names) > 1 and not takes_three:
        raise TypeError(f"it needs the arguments {', '.join(names)}")
    return (x_BND,) * max(1, len(names))

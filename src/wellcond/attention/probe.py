"""Attention of a family that nobody named: recognised by its structure and by a trial run, or an error with the reason.

Separate q, k, v projections and a head count leave one reading (heads follow each other), which a trial run of the
module may still refute. A fused weight leaves several readings; it is accepted only if a trial run confirms exactly one
of them: shapes cannot tell `[Q|K|V]` from per-head interleaving, so an unknown class is believed only if its forward
pass, of a copy on a few random tokens, multiplies exactly the q, k and v that a reading predicts.

Every product of a forward pass, however it was written (`@`, einsum, scaled_dot_product_attention), reaches torch's
dispatcher as `bmm` or `mm`; a dispatch mode records their operands, and the softmax between them gives scale and
causality.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.attention import builders
from wellcond.attention.plain_copy import gathered, plain_copy
from wellcond.attention.site import AttentionSite, Place
from wellcond.errors import UnsupportedLayoutError

SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("W_q", "W_k", "W_v"),
    ("W_Q", "W_K", "W_V"),
    ("q_linear", "k_linear", "v_linear"),
    ("linear_q", "linear_k", "linear_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_net", "k_net", "v_net"),
    ("queries", "keys", "values"),
)
QUERY_KV_NAMES = (("q", "kv"), ("to_q", "to_kv"), ("q_proj", "kv_proj"), ("wq", "wkv"), ("c_q", "c_kv"))
FUSED_NAMES = ("qkv", "qkv_proj", "to_qkv", "c_attn", "query_key_value", "Wqkv", "wqkv", "W_pack", "qkv_net")
OUTPUT_NAMES = (
    "o_proj", "out_proj", "proj", "c_proj", "to_out", "out", "out_lin", "wo", "w_o", "W_o", "W_O", "dense", "o",
    "output", "projection", "fc_out", "linear_out", "out_linear",
)  # fmt: skip
HEAD_NAMES = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "nhead", "head_num", "num_head", "h")
KV_HEAD_NAMES = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_kv")
HEAD_DIM_NAMES = ("head_dim", "dim_head", "head_size", "attention_head_size", "d_head", "key_value_proj_dim")

NUM_TOKENS = 5
MAX_PARAMETERS = 64_000_000
RELATIVE_TOLERANCE = 1e-5  # some modules compute in float32 inside, whatever they are given

Hypothesis = Callable[[nn.Module], AttentionSite]


def describe_by_structure(place: Place) -> AttentionSite | None:
    """A site if the module is an attention of unambiguous structure; None if it is no attention.

    Raises: UnsupportedLayoutError if it looks like an attention and its layout cannot be known.
    """
    hypotheses = list_hypotheses(place)
    if not hypotheses:
        return None
    sites = [build(place.module) for build in hypotheses]
    seen = [observe(site, build) for site, build in zip(sites, hypotheses, strict=True)]
    confirmed = [(site, o) for site, o in zip(sites, seen, strict=True) if o.agrees]
    if len(confirmed) == 1 or (confirmed and confirmed[0][0].num_heads == 1):
        site, observation = confirmed[0]
        return replace(site, evidence="forward", **observation.facts)
    if len(sites) == 1 and seen[0].agrees is None:
        return replace(sites[0], evidence="structure")
    raise UnsupportedLayoutError(place.name, _why(sites, seen, confirmed), class_name=place.class_name)


def list_hypotheses(place: Place) -> list[Hypothesis]:
    """Every reading of the module's projections that its shapes allow."""
    module = place.module
    children = dict(module.named_children())

    def has(names: tuple[str, ...]) -> bool:
        return all(builders.is_projection(children.get(name)) for name in names)

    separate = next((names for names in SEPARATE_NAMES if has(names)), None)
    query_kv = next((names for names in QUERY_KV_NAMES if has(names)), None)
    fused = next((name for name in FUSED_NAMES if has((name,))), None)
    if separate is None and query_kv is None and fused is None:
        return []
    facts = _declared_facts(place)

    def reading(build: Callable[..., AttentionSite], names: tuple[str, ...], **extra: Any) -> Hypothesis:
        def describe(on: nn.Module) -> AttentionSite:
            here = replace(place, module=on)
            projections = [getattr(on, name) for name in names]
            return build(here, *projections, output=find_output(on), family="structure", **facts, **extra)

        return describe

    if separate is not None:
        return [reading(builders.separate_site, separate)]
    if query_kv is not None:
        return [reading(builders.query_and_kv_site, query_kv, arrangement=a) for a in ("blocks", "groups")]
    assert fused is not None
    return [reading(builders.fused_site, (fused,), arrangement=a) for a in ("blocks", "groups")]


def find_output(module: nn.Module) -> nn.Module | None:
    """The output projection, by its usual names; inside a Sequential, its first projection."""
    for name in OUTPUT_NAMES:
        child = getattr(module, name, None)
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            child = next((part for part in child if builders.is_projection(part)), None)
        if builders.is_projection(child):
            return child
    return None


def _first_int(place: Place, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(place.module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    for name in names:
        value = place.config(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _declared_facts(place: Place) -> dict[str, Any]:
    num_heads = _first_int(place, HEAD_NAMES)
    if num_heads is None:
        raise UnsupportedLayoutError(
            place.name,
            f"it has query, key and value projections, but no head count under any of {', '.join(HEAD_NAMES)}.",
            class_name=place.class_name,
        )
    scales = (getattr(place.module, name, None) for name in ("scale", "scaling"))
    return {
        "num_heads": num_heads,
        "num_kv_heads": _first_int(place, KV_HEAD_NAMES),
        "head_dim": _first_int(place, HEAD_DIM_NAMES),
        "scale": next((scale for scale in scales if isinstance(scale, float)), None),
        "causal": getattr(place.module, "is_causal", None),
    }


def _why(sites: list[AttentionSite], seen: list[Observation], confirmed: list[Any]) -> str:
    readings = "; ".join(f"{s.arrangement}: {o.reason}" for s, o in zip(sites, seen, strict=True))
    if len(confirmed) > 1:
        return f"more than one reading of its weights fits its forward pass ({readings})."
    return f"no reading of its weights could be confirmed ({readings})."


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
                    facts = logit_facts(logits.reshape_as(weights), weights, left @ right)
                    if facts["scale"] is not None:
                        facts["scale"] = float(f"{facts['scale'] * found_q[0] * found_k[0]:.7g}")
                    facts["rotary"] = found_q[1] or found_k[1]
                    return Observation(True, "its own forward pass multiplies these heads", facts)
    return Observation(False, "its own forward pass multiplies other rows than these")


def logit_facts(logits: Tensor, p: Tensor, products: Tensor) -> dict[str, Any]:
    """Causality, scale and position bias of a softmax's logits, beside the products that they are made of."""
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
        replica = random_replica(module)
        arguments = _arguments(replica, x_ND[None])
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]), recorder:
            replica(*arguments)
    except Exception as error:  # an arbitrary module may raise anything when copied or run; the reason is passed on
        return Observation(None, f"its forward pass could not be tried ({type(error).__name__}: {error})")
    with torch.no_grad():
        return compare(recorder, expected_heads(describe(replica), x_ND))


def random_replica(module: nn.Module) -> nn.Module:
    """A plain copy of a module in float64 and evaluation mode, with random parameters."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return gathered(tensor)
        fan_in = tensor.shape[-1] if tensor.dim() > 1 else 1
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / max(fan_in, 1) ** 0.5

    replica = plain_copy(module, noise).double()
    replica.eval()  # on its own: some classes override train() and return nothing
    return replica


def required_arguments(module: nn.Module) -> list[str]:
    """Names of the positional arguments that a forward pass can not do without."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in positional if p.default is p.empty]


def _arguments(module: nn.Module, x_BND: Tensor) -> tuple[Tensor, ...]:
    names = required_arguments(module)
    takes_three = len(names) == 3 and all(n[0] == letter for n, letter in zip(names, "qkv", strict=True))
    if len(names) > 1 and not takes_three:
        raise TypeError(f"it needs the arguments {', '.join(names)}")
    return (x_BND,) * max(1, len(names))

"""Attention of a family that nobody named, recognised by its structure, or refused with the reason.

Separate q, k, v projections and a head count leave one reading (heads follow each other), which a trial run of the
module may still refute. A fused weight leaves several readings; it is accepted only if a trial run of the module's own
forward confirms exactly one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from wellcond.attention import builders
from wellcond.attention.probe import Observation, observe
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

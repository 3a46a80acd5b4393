"""What the timm adapters share: which facts a timm module states."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from wellcond.attention.families import modifiers
from wellcond.attention.layout import query_and_kv_site, separate_site
from wellcond.attention.site import AttentionSite, Normaliser, Place
from wellcond.errors import UnsupportedLayoutError


def logit_scale(module: Any, head_dim: int) -> float:
    """The factor on the logits: the module's `scale`, or torch's own where its fused kernel ignores that attribute."""
    return head_dim**-0.5 if getattr(module, "fused_attn", False) else float(module.scale)


def norm_kind(norm: nn.Module | None) -> Normaliser | None:
    """Which normaliser a q_norm or k_norm is; None for none or Identity."""
    if norm is None or isinstance(norm, nn.Identity):
        return None
    names = [base.__name__.lower() for base in type(norm).__mro__]
    if any(name.startswith("rmsnorm") for name in names):
        return "rms"
    return "layer" if isinstance(norm, nn.LayerNorm) else "other"


def query_key_norm(place: Place) -> Normaliser | None:
    """The normaliser between the projections and their product, under timm's usual names."""
    module: Any = place.module
    kinds = {norm_kind(getattr(module, "q_norm", None)), norm_kind(getattr(module, "k_norm", None))}
    return kinds.pop() if len(kinds) == 1 else "other"


def before_output(module: Any) -> tuple[str, ...]:
    """What stands between the heads and W_O in ViT, EVA and NaFlexViT: a norm (`scale_norm`), a gate (`gated`)."""
    return modifiers.those(
        {
            modifiers.OUTPUT_NORM: norm_kind(getattr(module, "norm", None)) is not None,
            modifiers.GATED_OUTPUT: getattr(module, "gate", None) is not None,
        }
    )


def in_windows(divided: bool) -> tuple[str, ...]:
    """The modifiers of an attention that is, or is not, divided into windows, blocks or grids of the image."""
    return modifiers.those({modifiers.LOCAL_WINDOW: divided})


def ancestor_has(place: Place, attribute: str) -> bool:
    """Whether a containing module holds `attribute` and passes it down (a shared rotary table or position bias)."""
    return any(getattr(module, attribute, None) is not None for module in place.ancestors())


def refuse(place: Place, reason: str) -> NoReturn:
    """Raise with the reason why this module has no Q, K, V that a site could name."""
    raise UnsupportedLayoutError(place.name, reason, class_name=place.class_name)


def with_projections(place: Place, *names: str, **facts: Any) -> AttentionSite:
    """Site of a timm module with the projections `names` (three, or a query and a fused kv), `num_heads` and `proj`."""
    module: Any = place.module
    build = separate_site if len(names) == 3 else query_and_kv_site
    projections = [getattr(module, name) for name in names]
    return build(place, *projections, num_heads=module.num_heads, output=module.proj, **facts)

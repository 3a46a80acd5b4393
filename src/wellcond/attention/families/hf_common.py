"""What the Hugging Face adapters share: dotted names, and facts that its attention modules state about themselves.

`scale` is None wherever the logits are not one fixed multiple of the products of q and k plus terms that do not depend
on the projections: soft-capped logits, clipped projections, position terms that are multiplied with q.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wellcond.attention import layout
from wellcond.attention.families import hf_modifiers, modifiers
from wellcond.attention.find import Adapter, register_adapter
from wellcond.attention.site import AttentionSite, Place
from wellcond.errors import UnsupportedLayoutError

Rule = Callable[[Place], Any]

PROJECTION_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("linear_q", "linear_k", "linear_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("Wq", "Wk", "Wv"),
    ("project_q", "project_k", "project_v"),
    ("to_q", "to_k", "to_v"),
)
OUTPUT_NAMES = (
    "o_proj", "out_proj", "out_lin", "o", "dense", "Wo", "proj", "projection", "projection_layer", "linear_out",
    "attention_out", "proj_out", "c_proj", "to_out", "output",
)  # fmt: skip
HEAD_DIM_NAMES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")
HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
SCALE_NAMES = ("scaling", "scale", "softmax_scale")
QK_NORM_NAMES = ("q_norm", "q_layernorm", "query_layernorm", "q_layer_norm", "qk_norm")
CROSS_NAMES = (
    "encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "cross_attention", "encoder_attention",
    "encoder_decoder_attention",
)  # fmt: skip


def hf(names: str) -> tuple[str, ...]:
    """Dotted class names from words such as ``llama.LlamaAttention``.

    A word is the folder under transformers.models (``folder/file`` where the file is not named after it) and the class.

    Example:
        >>> hf("llama.LlamaAttention")
        ('transformers.models.llama.modeling_llama.LlamaAttention',)
    """
    dotted = []
    for name in names.split():
        where, _, cls = name.rpartition(".")
        folder, _, file = where.partition("/")
        dotted.append(f"transformers.models.{folder}.modeling_{file or folder}.{cls}")
    return tuple(dotted)


def register(names: str, adapter: Adapter) -> None:
    """Register one adapter for every class of a list as `hf` reads it."""
    register_adapter(*hf(names))(adapter)


def first_attribute(module: nn.Module, names: tuple[str, ...]) -> Any:
    """The first of these attributes that the module has and that is not None."""
    return next((value for value in (getattr(module, name, None) for name in names) if value is not None), None)


def head_dim_of(place: Place, query: nn.Module) -> int:
    """Width of a query head: declared, or the query's rows divided by the declared number of heads."""
    head_dim = first_attribute(place.module, HEAD_DIM_NAMES)
    if head_dim is not None:
        return int(head_dim)
    return layout.divide_heads(place, "query", layout.out_features(query), head_count_of(place))


def head_count_of(place: Place) -> int:
    """Number of query heads that the module declares."""
    count = first_attribute(place.module, HEAD_COUNT_NAMES)
    if count is None:
        raise refusal(place, "it declares neither a number of heads nor a head width.")
    return int(count)


def scale_of(place: Place) -> float | None:
    """Logit scale as the module states it; None under soft-capping or clipping."""
    if hf_modifiers.soft_caps(place) or hf_modifiers.clips(place):
        return None
    stated = first_attribute(place.module, SCALE_NAMES)
    return float(stated) if isinstance(stated, (int, float)) and not isinstance(stated, bool) else None


def inverse_root(place: Place) -> float:
    """Logit scale ``head_dim ** -0.5`` of modules that compute it inside forward."""
    return float(head_dim_of(place, projections_of(place)[0]) ** -0.5)


def inverse_root_of(attribute: str) -> Rule:
    """The same from a named attribute of the module."""
    return lambda place: float(getattr(place.module, attribute)) ** -0.5


def is_cross(place: Place) -> bool:
    """Whether the module, or the part of its layer that it stands in, is named as cross attention."""
    if getattr(place.module, "is_cross_attention", None) is True:
        return True
    named = any(part in CROSS_NAMES for part in place.name.split("."))
    return named or "CrossAttention" in place.class_name


def is_causal(place: Place) -> bool:
    """Causality as the module states it; never of cross attention."""
    return bool(getattr(place.module, "is_causal", False)) and not is_cross(place)


def is_decoder_self_attention(place: Place) -> bool:
    """Causality of modules that know only whether they belong to a decoder."""
    in_decoder = getattr(place.module, "is_decoder", None)
    if in_decoder is None:
        in_decoder = place.config("is_decoder", False)
    return bool(in_decoder) and not is_cross(place)


def in_text_tower(place: Place) -> bool:
    """Causality of CLIP-like classes: one class for both towers, and only the text tower gets a causal mask."""
    for ancestor in place.ancestors():
        name = type(ancestor).__name__
        # The nearest class that names one of the two; VisionTextDualEncoder names both and decides nothing.
        if ("Text" in name) != ("Vision" in name):
            return "Text" in name
    return False


def qk_norm_of(place: Place) -> str | None:
    """Normaliser of queries and keys by the class of the module's own norm."""
    norm = first_attribute(place.module, QK_NORM_NAMES)
    if not isinstance(norm, nn.Module) or isinstance(norm, nn.Identity):
        return None
    name = type(norm).__name__.lower()
    # transformers' "L2Norm" divides by the root mean square.
    if "rms" in name or "l2norm" in name:
        return "rms"
    return "layer" if "layernorm" in name else "other"


def projections_of(place: Place) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Query, key and value projections under their usual names."""
    for names in PROJECTION_NAMES:
        found = [part for part in (getattr(place.module, name, None) for name in names) if isinstance(part, nn.Module)]
        if len(found) == 3 and all(layout.is_projection(part) for part in found):
            return found[0], found[1], found[2]
    raise refusal(place, "its query, key and value projections are not three plain linear maps.")


def output_of(place: Place, width: int) -> nn.Module | None:
    """W_O: a child of the module, or the `dense` of the `output` beside it (BERT), if its columns are the heads."""
    candidates = [getattr(place.module, name, None) for name in OUTPUT_NAMES]
    parent = place.parent
    candidates += [getattr(getattr(parent, "output", None), "dense", None), getattr(parent, "o_proj", None)]
    for candidate in candidates:
        if isinstance(candidate, (nn.Sequential, nn.ModuleList)) and len(candidate):
            candidate = candidate[0]
        if isinstance(candidate, nn.Module) and layout.is_projection(candidate):
            weight: Tensor = candidate.weight  # type: ignore[assignment]
            columns = weight.shape[0 if layout.is_conv1d(candidate) else 1]
            return candidate if columns == width else None
    return None


def refusal(place: Place, problem: str) -> UnsupportedLayoutError:
    """The error of an attention that cannot be described, with the reason."""
    return UnsupportedLayoutError(place.name, problem, class_name=place.class_name)


def resolve(place: Place, rules: dict[str, Any]) -> dict[str, Any]:
    """Facts from rules: a function of the place, or the value itself."""
    return {fact: rule(place) if callable(rule) else rule for fact, rule in rules.items()}


def facts_of(place: Place, rules: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """What the module states about itself, overridden by `rules`; the scale includes the rotation's own factor.

    A rule for `modifiers` adds to those that the module states.
    """
    facts = resolve(place, DEFAULT_RULES | rules)
    facts["modifiers"] = modifiers.union(hf_modifiers.stated(place), facts.get("modifiers", ()))
    if facts.get("rotary") and facts["scale"] is not None:
        factor = rotation_factor(place, head_dim)
        facts["scale"] = None if factor is None else facts["scale"] * factor**2
    return facts


def rotation_factor(place: Place, head_dim: int) -> float | None:
    """What the rotary embedding multiplies queries and keys with (YaRN, LongRoPE); None where it is not one number."""
    for holder in (place.module, *place.ancestors()):
        rotary = getattr(holder, "rotary_emb", None)
        if not isinstance(rotary, nn.Module):
            continue
        stated = {value for name, value in vars(rotary).items() if name.endswith("attention_scaling")}
        if stated <= {1.0, None}:
            return 1.0
        rotated = {2 * buffer.numel() for name, buffer in rotary.named_buffers() if name.endswith("inv_freq")}
        # Channels that are not rotated keep their size.
        return float(stated.pop()) if len(stated) == 1 and rotated == {head_dim} else None
    return 1.0


DEFAULT_RULES: dict[str, Any] = {"scale": scale_of, "causal": is_causal, "cross": is_cross, "qk_norm": qk_norm_of}


def separate(place: Place, **rules: Any) -> AttentionSite:
    """Site of a module with three projections of its own; `rules` override the facts it states about itself."""
    q, k, v = projections_of(place)
    head_dim = head_dim_of(place, q)
    num_heads = layout.out_features(q) // head_dim
    num_kv_heads = layout.out_features(k) // head_dim
    value_dim = layout.divide_heads(place, "value", layout.out_features(v), num_kv_heads)
    facts = facts_of(place, rules, head_dim)
    return layout.separate_site(
        place,
        q,
        k,
        v,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        output=output_of(place, num_heads * value_dim),
        family=place.class_name,
        **facts,
    )

"""Which form of the Jacobian measures an attention: asked of the attention itself, on a few random tokens.

A model of the zoo has no weights, and hundreds of them take inputs of their own. Its attention is therefore copied with
random weights, reads tokens of `WIDTH` channels at most, and is called with what its signature asks for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import wellcond.lab.nystrom  # noqa: F401  (its heads have an operator of their own)
from wellcond.attention.evaluation import Arguments, plain_copy
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.jacobian.capture import CapturedAttention, capture_attention, why_site_is_not_plain
from wellcond.jacobian.select import select_operator

NUM_TOKENS, NUM_KEYS, WIDTH = 6, 5, 40
MAX_PARAMETERS = 30_000_000
OTHER_TOKENS = tuple(
    """
    key_value_states encoder_hidden_states kv memory key value key_states value_states context cross_attention_states
    """.split()
)
ROTATIONS = ("position_embeddings", "rotary_pos_emb", "freqs_cis", "freqs_ci", "rope", "freqs", "image_rotary_emb")
UNTRIED, DESCRIBED = "not tried", "plain softmax, by description"
STRUCTURED = "structured: "


def forms_of(sites: Iterable[AttentionSite]) -> str:
    """The forms that measure these attention layers, one try for each kind among them; shortened for a table."""
    return "; ".join(dict.fromkeys(shorten(try_form(site)) for site in one_of_each_kind(sites)))


def one_of_each_kind(sites: Iterable[AttentionSite]) -> list[AttentionSite]:
    """The first attention of every kind."""
    found: dict[tuple[Any, ...], AttentionSite] = {}
    for site in sites:
        found.setdefault(_kind(site), site)
    return list(found.values())


def _kind(site: AttentionSite) -> tuple[Any, ...]:
    facts = (site.kind, site.cross, site.rotary, site.qk_norm, site.modifiers, site.relative_position_bias)
    return (type(site.module), *facts)


def shorten(how: str) -> str:
    """What a record says about a form, without the reason of the generic one.

    Example:
        >>> shorten("structured: plain softmax"), shorten("generic derivatives: heads are mixed (talking heads)")
        ('plain softmax', 'generic')
    """
    return "generic" if how.startswith("generic") else how.removeprefix(STRUCTURED)


def is_structured(forms: str) -> bool:
    """Whether every attention of a row of the zoo has a structured form."""
    return bool(forms) and not any(word in forms.split("; ") for word in ("generic", UNTRIED))


def captured_forms(captured: Iterable[CapturedAttention]) -> str:
    """The forms that measure attention layers which were captured in a forward pass of their model."""
    reached = [one for one in captured if one.call is not None]
    return "; ".join(dict.fromkeys(shorten(select_operator(one, 0).how) for one in reached))


def try_form(site: AttentionSite) -> str:
    """How the Jacobian of one attention is measured, by a trial; `UNTRIED` if no call of it succeeds."""
    found = ""
    for width in (WIDTH, None):
        copied = small_copy(site, width)
        if copied is None:
            continue
        for arguments in calls(copied):
            try:
                [captured] = capture_attention(copied.module, arguments, [copied])
                how = select_operator(captured, 0).how
            except Exception:  # an arbitrary module, called as its signature suggests: the next call may be right
                continue
            if how.startswith(STRUCTURED):
                return how
            found = found or how
        if found:
            return found
    return f"{STRUCTURED}{DESCRIBED}" if not why_site_is_not_plain(site) else UNTRIED


def small_copy(site: AttentionSite, width: int | None) -> AttentionSite | None:
    """The site on a copy with random weights, whose projections read `width` channels at most.

    None where a projection is no part of the module, or the copy is too large.
    """
    names = {id(module): name for name, module in site.module.named_modules()}
    slots = [site.q, site.k, site.v]
    if any(id(slot.owner) not in names for slot in slots):
        return None
    read = {id(slot.parameter): 0 if slot.transposed else 1 for slot in slots}
    output = site.o if site.o is not None and id(site.o.owner) in names else None
    written = None if output is None else id(output.parameter)
    added = None if output is None or output.bias_name is None else id(output.stored_bias())
    for part in site.module.modules():  # gates read the tokens too
        if isinstance(part, nn.Linear) and part.in_features == site.in_features and id(part.weight) != written:
            read[id(part.weight)] = 1
    generator = torch.Generator().manual_seed(0)

    def values(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if width is not None and id(tensor) in read:
            axis = read[id(tensor)]
            shape[axis] = min(shape[axis], width)
        if id(tensor) == written and width is not None:
            assert output is not None
            shape[1 if output.transposed else 0] = 1
        if id(tensor) == added and width is not None:
            shape = [1]
        if not tensor.is_floating_point():
            return _integers(tensor)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * drawn

    if width is None and sum(parameter.numel() for parameter in site.module.parameters()) > MAX_PARAMETERS:
        return None
    try:
        module = plain_copy(site.module, values)
        module.eval()  # on its own: some classes override train() and return nothing
    except Exception:  # an arbitrary attribute may refuse to be copied
        return None

    def moved(slot: Slot) -> Slot:
        bias_owner = slot.bias_owner
        if bias_owner is not None and id(bias_owner) in names:
            bias_owner = module.get_submodule(names[id(bias_owner)])
        return replace(slot, owner=module.get_submodule(names[id(slot.owner)]), bias_owner=bias_owner)

    q, k, v = (moved(slot) for slot in slots)
    return replace(site, module=module, q=q, k=k, v=v, o=None if output is None else moved(output))


def _integers(tensor: Tensor) -> Tensor:
    """A buffer without values: a causal mask, if it is a square of booleans, else zeros."""
    if not tensor.is_meta:
        return tensor.detach().clone()
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.ones_like(zeros).tril() if tensor.dtype == torch.bool and tensor.dim() > 1 else zeros


def calls(site: AttentionSite) -> Iterator[Arguments]:
    """Ways to call an attention, the likeliest first."""
    parameters = inspect.signature(site.module.forward).parameters
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int, slot: Slot) -> Tensor:
        return torch.randn(1, count, slot.in_features, generator=generator, dtype=torch.float64)

    x, y = tokens(NUM_TOKENS, site.by_role("query")), tokens(NUM_KEYS, site.by_role("key"))
    same = site.by_role("query").in_features == site.by_role("key").in_features
    rotation = next((name for name in ROTATIONS if name in names), None)
    ordinary = {
        "cu_seqlens": torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        "max_seqlen": NUM_TOKENS,
        "position_ids": torch.arange(NUM_TOKENS)[None],
        "cache_position": torch.arange(NUM_TOKENS),
        "relative_position_embeddings": torch.randn(1, 2 * NUM_TOKENS - 1, site.in_features, dtype=torch.float64),
        "output_attentions": False,
        "seq_len": NUM_TOKENS,
        "sequence_length": NUM_TOKENS,
        "num_frames": 1,
    }
    required = {name: ordinary.get(name) for name in names[1:] if parameters[name].default is inspect.Parameter.empty}
    required |= {name: ordinary[name] for name in names[1:] if name in ordinary}
    rotations = [] if rotation is None else [{rotation: turn} for turn in _rotations(site)]
    rotations = [*rotations, {}] if site.rotary else [{}, *rotations]
    others: list[dict[str, Tensor]] = [{}]
    asked = [name for name in names[1:] if name in OTHER_TOKENS and (site.cross or name in required)]
    if asked:
        others = [dict.fromkeys(asked, other) for other in ((y, x) if same else (y,))]
    for turn in rotations:
        for other in others:
            given = required | other | turn
            if "cu_seqlens" in names:  # tokens of all samples follow each other
                yield Arguments((x[0],), given)
            yield Arguments((x,), given)
    yield Arguments((x.view(1, 2, NUM_TOKENS // 2, -1),), required)  # a map of 2 x 3


def _rotations(site: AttentionSite) -> Iterator[Any]:
    """Cosines and sines, in the shapes that models use; any numbers will do."""
    module: Any = site.module
    partial = [getattr(module, name, None) for name in ("rotary_ndims", "rotary_dim", "rope_dim", "qk_rope_head_dim")]
    declared = [width for width in partial if isinstance(width, int)]
    widths = dict.fromkeys([site.head_dim, *declared, site.head_dim // 2, site.head_dim // 4])
    generator = torch.Generator().manual_seed(2)
    angles = [torch.rand(NUM_TOKENS, width, generator=generator, dtype=torch.float64) for width in widths if width]
    yield from ((angle.cos()[None], angle.sin()[None]) for angle in angles)
    yield from ((angle.cos(), angle.sin()) for angle in angles)
    yield from (torch.polar(torch.ones_like(angle), angle)[None] for angle in angles)
    yield from (torch.cat([angle.sin(), angle.cos()], -1) for angle in angles)

"""The verbs `condition_`, `fold_` and `folded`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import check_mapping, check_model
from wellcond.attention.checks import Chosen, check_finite, check_writable, choose_projections, choose_sites
from wellcond.attention.effective import corrections_of
from wellcond.attention.find import find_attention
from wellcond.attention.rollback import Rollback
from wellcond.attention.sharding import (
    any_process,
    box_of,
    is_distributed,
    like,
    local_part,
    reshard_,
    unwrap,
    update_buffers,
    whole,
)
from wellcond.attention.site import AttentionSite, Slot
from wellcond.conditioning import warnings as advice
from wellcond.conditioning.attach import Attachment, attach, detach, readers_in
from wellcond.conditioning.checkpoint import Marker, make_marker, mark, marker_of, taken_marker, unmark
from wellcond.conditioning.corrections import AbstractCorrection, FrozenCorrection, SpectralCorrection
from wellcond.conditioning.methods import METHODS, Method, per_projection
from wellcond.errors import ConditioningError, UnknownChoiceError, WeightError


@torch.inference_mode(False)
def condition_(
    model: nn.Module,
    method: str = "balanced",
    *,
    sites: Chosen | None = None,
    projections: str = "qkv",
    num_tokens: int | None = None,
    **options: Any,
) -> nn.Module:
    """Add a correction C to Q, K and V in every forward pass, in place; `fold_` merges it for good.

    No parameter is added or replaced: optimisers, parameter names and state-dict keys stay, and gradients flow to the
    original weights only. Biases and W_O are not corrected. One extra state-dict entry marks the weights as raw. A
    failure of any kind, an interrupt included, leaves the model as it was.

    Args:
        model: any model whose attention `find_attention` recognises.
        method: ``identity`` (lam I), ``polar`` (condition number at most 2) or ``balanced`` (the same without
            changing the largest singular value).
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``; all by default.
        projections: which of q, k, v.
        num_tokens: sequence length for the warning that lam saturates the softmax; by default what the model's learned
            positions say, and where there are none the warning says that it is not known.
        **options: of the method: ``lam``, ``layout``; ``layout``, ``frozen``; ``target``, ``layout``, ``frozen``.

    Returns: the same model.

    Raises:
        UnknownChoiceError: a method or option that does not exist.
        AttentionNotFoundError, UnsupportedLayoutError: from `find_attention`.
        WeightError: NaN or infinite weights; parameters on the meta device, quantised, frozen or tied.
        ConditioningError: the model is conditioned already.

    Example:
        >>> model = condition_(nn.MultiheadAttention(8, 2), "polar")
        >>> from wellcond import find_attention
        >>> torch.linalg.cond(find_attention(model)[0].q.read()).max().item() <= 2.001
        True

    Reference: Saratchandran and Lucey, Spectral Conditioning of Attention Improves Transformer Performance,
    theorems 3.5 and 3.8, arXiv 2603.07162.
    """
    given, model = model, unwrap(model)
    reshard_(model)
    rollback = Rollback(given)
    try:
        _condition_(model, make_method(method, options), sites, choose_projections(projections), num_tokens)
        update_buffers(given)
    except BaseException:
        rollback.restore()
        raise
    return given


def _condition_(
    model: nn.Module, method: Method, sites: Chosen | None, projections: str, num_tokens: int | None
) -> None:
    conditioned = [name for name, module in model.named_modules() if corrections_of(module)]
    if conditioned:
        raise ConditioningError(
            f"{conditioned[0] or 'the model'} is already conditioned; call wellcond.fold_(model) first"
        )
    found = choose_sites(model, sites)
    check_writable(model, found, projections, "wellcond.condition_")
    check_finite(found, projections)
    by_weight = _by_weight(found, projections)
    _advise(model, method, found, projections, num_tokens)

    # Everything that can fail is computed before the model is touched.
    some = sites is not None and len(found) < len(find_attention(model, strict=False))
    attachments: list[Attachment] = [(owner, name, method.build(parts)) for (owner, name), parts in by_weight.items()]
    if method.frozen:
        attachments = [(owner, name, _frozen(name, correction)) for owner, name, correction in attachments]
    buffers = [
        (owner, correction.buffer_name, correction.first(owner.get_parameter(name)))
        for owner, name, correction in attachments
        if isinstance(correction, FrozenCorrection)
    ]
    readers = _readers(model, found)
    marker = make_marker(_call_text(method, projections, some), _settings(method, projections, found))
    for owner, buffer_name, buffer in buffers:
        owner.register_buffer(buffer_name, buffer)
    attach(model, attachments, readers)
    mark(model, marker)


def recondition_(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """Condition a model as `conditioning_of` (or a checkpoint's marker) says.

    Raises: as `condition_`; WeightError if the model lacks an attention that the settings name.
    """
    check_mapping("settings", settings)
    lacking = [name for name in ("method", "projections", "sites") if name not in settings]
    if lacking:
        raise ValueError(f"settings: expected what conditioning_of(model) returns, found nothing under {lacking[0]!r}")
    options = {key: value for key, value in settings.items() if key not in ("method", "projections", "sites")}
    sites = {site.name: site for site in find_attention(unwrap(model), strict=False)}
    missing = [name for name in settings["sites"] if name not in sites]
    if missing:
        raise WeightError(f"the checkpoint was made with an attention {missing[0]!r}, which this model does not have")
    chosen = [sites[name] for name in settings["sites"]]
    return condition_(model, settings["method"], sites=chosen, projections=settings["projections"], **options)


def make_method(method: str, options: dict[str, Any]) -> Method:
    """Validate a method and its options.

    Raises: UnknownChoiceError for either.
    """
    METHODS.check(method)
    known = list(inspect.signature(METHODS[method]).parameters)
    for name in options:
        if name not in known:
            raise UnknownChoiceError(f"option of {method!r}", name, known)
    return METHODS[method](**options)


def _by_weight(sites: list[AttentionSite], projections: str) -> dict[tuple[nn.Module, str], list[tuple[str, Slot]]]:
    parts: dict[tuple[nn.Module, str], list[tuple[str, Slot]]] = {}
    for site in sites:
        for role in projections:
            slot = site.slots[role]
            if slot.is_stacked:
                raise WeightError(
                    f"{site.name or 'the model itself'} ({role}): {type(slot.owner).__name__}.{slot.weight_name} is a "
                    "stack of matrices; condition_ needs a matrix of its own, or rows of one. Nothing was changed"
                )
            known = parts.setdefault((slot.owner, slot.weight_name), [])
            if any(other == role and torch.equal(seen.rows, slot.rows) for other, seen in known):
                continue  # a projection that two attentions share is corrected once
            taken = torch.cat([seen.rows.flatten() for _, seen in known]) if known else slot.rows.new_empty(0)
            if bool(torch.isin(slot.rows, taken).any()):
                raise WeightError(
                    f"{site.name} ({role}) shares rows of {type(slot.owner).__name__}.{slot.weight_name} with another "
                    "projection; leave one of them out with sites=... or projections=..."
                )
            known.append((role, slot))
    return parts


def _readers(model: nn.Module, sites: list[AttentionSite]) -> list[nn.Module]:
    """The attentions and the modules that contain them, some of which read the weights of their attention."""
    attentions = {id(site.module) for site in sites}
    return [m for m in model.modules() if {id(m), *map(id, m.children())} & attentions]


def _frozen(name: str, correction: AbstractCorrection) -> FrozenCorrection:
    assert isinstance(correction, SpectralCorrection)
    return FrozenCorrection(f"{name}_wellcond_correction", correction)


def _advise(
    model: nn.Module, method: Method, sites: list[AttentionSite], projections: str, num_tokens: int | None
) -> None:
    if method.name != "identity":
        advice.warn_if_degenerate(sites, projections)
        return
    lams = {role: lam if role in projections else 0.0 for role, lam in per_projection(method.settings["lam"]).items()}
    _check_representable(sites, lams)
    advice.warn_if_saturating(model, sites, lams, num_tokens)
    advice.warn_if_rounded_away(sites, lams)


def _check_representable(sites: list[AttentionSite], lams: dict[str, float]) -> None:
    """Raise WeightError for a lam that is infinite in the type of a weight that it would be added to."""
    for site in sites:
        for role, lam in lams.items():
            largest = torch.finfo(site.slots[role].parameter.dtype).max
            if abs(lam) > largest:
                raise WeightError(
                    f"{site.name or 'the model itself'} ({role}): lam={lam:g} does not fit into its weights, which are "
                    f"{site.slots[role].parameter.dtype} (at most {largest:.3g}); expected a smaller lam"
                )


def _settings(method: Method, projections: str, sites: list[AttentionSite]) -> dict[str, Any]:
    return {
        "method": method.name,
        **method.settings,
        "projections": projections,
        "sites": [site.name for site in sites],
    }


def _call_text(method: Method, projections: str, some_sites: bool) -> str:
    text = method.call()
    extra = "" if projections == "qkv" else f", projections={projections!r}"
    extra += ", sites=[…]" if some_sites else ""
    return text[:-1] + extra + ")"


@dataclass(frozen=True)
class _Attached:
    owner: nn.Module
    name: str
    correction: AbstractCorrection
    raw: Tensor
    effective: Tensor
    """Raw and effective weight; of a sharded one, the part of this rank."""


def fold_(model: nn.Module) -> nn.Module:
    """Write W + C into the parameters and remove every trace of conditioning: a plain model again.

    Parameter objects, module classes, state-dict keys and their order are those from before `condition_`; outputs are
    unchanged. All sites are folded, or none. Folding is one-way: rounding forbids an exact way back.

    Returns: the same model.

    Raises:
        ConditioningError: the model is not conditioned, or is a part of a conditioned one.
        WeightError: an effective weight is not finite; nothing was changed.

    Example:
        >>> model = nn.MultiheadAttention(8, 2)
        >>> keys = list(model.state_dict())
        >>> list(fold_(condition_(model, "polar")).state_dict()) == keys
        True
    """
    check_model(model)
    reshard_(model)
    rollback = Rollback(model)
    try:
        _fold_(model, _attached(model, rollback))
    except BaseException:
        rollback.restore()
        raise
    return model


def _fold_(model: nn.Module, attached: list[_Attached]) -> None:
    bad = [part.name for part in attached if not _is_finite_everywhere(part)]
    if bad:
        raise WeightError(f"{bad[0]}: the effective weight has NaN or infinite entries; nothing was folded")
    for root in [module for module in model.modules() if marker_of(module)]:
        unmark(root)
    detach(model)
    _commit_(attached)
    update_buffers(model)


def _is_finite_everywhere(part: _Attached) -> bool:
    """Also in the parts of other processes: all of them fold, or none."""
    finite, parameter = bool(torch.isfinite(part.effective).all()), part.owner._parameters[part.name]
    assert parameter is not None
    return not any_process(not finite, parameter) if is_distributed(parameter) else finite


@contextlib.contextmanager
def folded(model: nn.Module) -> Iterator[nn.Module]:
    """Within this context the model is plain and holds its effective weights, for export; then it is as before.

    The raw weights come back bit for bit; what is done to the parameters inside is lost. What was taken from the model
    inside, such as a state dict or an exported program, keeps the effective weights.

    Raises: as `fold_`.

    Example:
        >>> model = condition_(nn.MultiheadAttention(8, 2), "polar")
        >>> with folded(model) as plain:
        ...     type(plain).__name__
        'MultiheadAttention'
    """
    check_model(model)
    reshard_(model)
    rollback = Rollback(model)
    try:
        attached = _attached(model, rollback)
        roots = [
            _Root(module, taken_marker(module), _attachments(module), readers_in(module))
            for module in model.modules()
            if marker_of(module)
        ]
        frozen = [dict(part.owner._buffers) for part in attached]
        _fold_(model, attached)
        originals = [part.owner._parameters[part.name] for part in attached]
        # In parameters of their own: a state dict or an exported program that outlives the context keeps the weights.
        for part, original in zip(attached, originals, strict=True):
            assert original is not None
            effective = like(original, part.effective) if is_distributed(original) else part.effective
            part.owner._parameters[part.name] = nn.Parameter(effective, original.requires_grad)
    except BaseException:
        rollback.restore()
        raise
    try:
        yield model
    finally:
        try:
            reshard_(model)  # an evaluation inside may have left FSDP2's whole weights in place
            for part, original, buffers in zip(attached, originals, frozen, strict=True):
                _put_back_(part, original, buffers)
            for root in roots:
                attach(root.module, root.attachments, root.readers)
                mark(root.module, root.marker)
            update_buffers(model)
        except BaseException:
            rollback.restore()
            raise


@dataclass(frozen=True)
class _Root:
    """A model that was conditioned as a whole, and what it takes to condition it again."""

    module: nn.Module
    marker: Marker
    attachments: list[Attachment]
    readers: list[nn.Module]


@torch.no_grad()
def _put_back_(part: _Attached, original: Tensor | None, buffers: dict[str, Tensor | None]) -> None:
    """Give a weight its parameter, raw numbers and frozen correction again."""
    now = part.owner._parameters[part.name]
    assert isinstance(original, nn.Parameter) and now is not None
    if (now.device, now.dtype) != (original.device, original.dtype):  # the model was moved inside
        original.data = original.data.to(now.device, now.dtype)
    part.owner._parameters[part.name] = original
    local_part(original).copy_(part.raw)
    if isinstance(part.correction, FrozenCorrection):
        part.owner.register_buffer(part.correction.buffer_name, buffers[part.correction.buffer_name])


def _attachments(model: nn.Module) -> list[Attachment]:
    return [
        (module, name, correction)  # type: ignore[misc]
        for module in model.modules()
        for name, correction in corrections_of(module).items()
    ]


@torch.no_grad()
def _attached(model: nn.Module, rollback: Rollback) -> list[_Attached]:
    """Every correction in a model, with raw and effective weight; the raw ones are kept for a rollback.

    Raises:
        ConditioningError: there is none, or the model is a part of what was conditioned.
        WeightError: a conditioned weight is also the weight of something else by now.
    """
    _check_tied_since(model)
    found = [_attached_weight(*attachment, rollback) for attachment in _attachments(model)]
    if not found:
        raise ConditioningError("this model is not conditioned: there is nothing to fold")
    roots = [module for module in model.modules() if marker_of(module)]
    inside = {id(part) for root in roots for part in root.modules()}
    if not all(id(part.owner) in inside for part in found):
        raise ConditioningError("this is a part of a conditioned model; fold the whole model that was conditioned")
    return found


def _check_tied_since(model: nn.Module) -> None:
    """Folding writes W + C; a layer that was given the same parameter after `condition_` uses W, and would change."""
    conditioned = {id(module._parameters[name]): module for module, name, _ in _attachments(model)}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in conditioned and name not in corrections_of(module):
                raise WeightError(
                    f"{path}.{name} was tied to a conditioned weight after condition_; it uses the raw weight, which "
                    "folding would change. Untie it (give it a copy of the parameter), then fold."
                )


def _attached_weight(owner: nn.Module, name: str, correction: AbstractCorrection, rollback: Rollback) -> _Attached:
    parameter = owner._parameters[name]
    assert parameter is not None
    effective = correction.effective(owner, whole(parameter))
    own_part = box_of(parameter).of(effective) if is_distributed(parameter) else effective
    return _Attached(owner, name, correction, rollback.keep(parameter), own_part.clone())


@torch.no_grad()
def _commit_(attached: list[_Attached]) -> None:
    for part in attached:
        if isinstance(part.correction, FrozenCorrection):
            del part.owner._buffers[part.correction.buffer_name]
        parameter = part.owner._parameters[part.name]
        assert parameter is not None
        local_part(parameter).copy_(part.effective)

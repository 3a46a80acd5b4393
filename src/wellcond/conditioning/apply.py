"""The verbs `condition_`, `recondition_`, `fold_` and `folded`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import check_mapping, check_model
from wellcond.attention.checks import (
    Chosen,
    Rollback,
    check_finite,
    check_writable,
    choose_projections,
    choose_sites,
    log_change,
)
from wellcond.attention.find import find_attention
from wellcond.attention.sharding import (
    any_rank,
    find_ddp,
    from_local,
    fsdp_modules,
    full_tensor,
    is_distributed,
    is_sharded,
    local_shard,
    reshard_,
    to_local,
    unwrap,
    update_buffers,
)
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot, corrections_of, roots_in
from wellcond.conditioning.attach import Attachment, attach, detach, readers_in
from wellcond.conditioning.checkpoint import MARKER, read_settings
from wellcond.conditioning.corrections import rows_of
from wellcond.conditioning.methods import Correction, make_method
from wellcond.errors import ConditioningError, NumericalWarning, WeightError


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

    `polar` and `balanced` are computed again in every forward pass. Where many passes use the same weights, as in
    generating text, run them inside ``with wellcond.folded(model):``, which computes them once.

    Args:
        model: any model whose attention `find_attention` recognises.
        method: ``identity`` (lam I), ``polar`` (condition number at most 2), ``balanced`` (the same without changing
            the largest singular value), or a name of `register_condition`, which may add learned parameters.
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
    correction, projections = make_method(method, options), choose_projections(projections)
    reshard_(model)
    rollback = Rollback(given)
    try:
        found = _choose(model, sites, projections)
        for text in correction.check(model, found, projections, num_tokens) if correction.check else ():
            warnings.warn(text, NumericalWarning, stacklevel=3)  # torch's decorator is in between
        if correction.learned:
            _check_before_wrapping(given, correction)
        weights = _condition_(model, correction, found, projections)
        update_buffers(given)
        heads = sum(site.slots[role].num_heads for site in found for role in projections)
        log_change(f"condition_ {method!r} on {projections}", len(found), weights, num_heads=heads)
    except BaseException:
        rollback.restore()
        raise
    return given


def _choose(model: nn.Module, sites: Chosen | None, projections: str) -> list[AttentionSite]:
    conditioned = [name for name, module in model.named_modules() if corrections_of(module)]
    if conditioned:
        raise ConditioningError(
            f"{conditioned[0] or 'the model'} is already conditioned; call wellcond.fold_(model) first"
        )
    found = choose_sites(model, sites)
    check_writable(model, found, projections, "wellcond.condition_")
    check_finite(found, projections)
    return found


def _check_before_wrapping(model: nn.Module, correction: Correction) -> None:
    """Learned parameters must be there when DistributedDataParallel or FSDP2 looks for parameters."""
    if find_ddp(model) is not None or is_sharded(model):
        raise ConditioningError(
            f"{correction.name!r} adds learned parameters, which DistributedDataParallel or FSDP2 around this model "
            "would not know of: call wellcond.condition_ before the model is wrapped"
        )


def _condition_(
    model: nn.Module, correction: Correction, sites: list[AttentionSite], projections: str
) -> list[nn.Parameter]:
    attachments: list[Attachment] = []
    for (owner, name), parts in _by_weight(sites, projections).items():
        stored = correction.stored(name, parts)
        _keep_beside(owner, stored.first_state(owner.get_parameter(name)))
        attachments.append((owner, name, stored))
    names = [site.name for site in sites]
    settings = {"method": correction.name, **(correction.settings or {}), "projections": projections, "sites": names}
    attach(model, attachments, _readers(model, sites), settings)
    return [owner.get_parameter(name) for owner, name, _ in attachments]


def _keep_beside(owner: nn.Module, state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if isinstance(value, nn.Parameter):
            owner.register_parameter(name, value)
        else:
            owner.register_buffer(name, value)


def recondition_(model: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Condition a model as `conditioning_of` says, or as the state dict of a conditioned model does.

    Args:
        model: a plain model.
        settings: what `conditioning_of(model)` returns, or a state dict with the key ``wellcond_conditioning``, which
            can be loaded afterwards.

    Raises: as `condition_`; WeightError if the model lacks an attention that the settings name.
    """
    check_mapping("settings", settings)
    if isinstance(settings.get(MARKER), Tensor):
        settings = read_settings(settings[MARKER])
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


def _by_weight(sites: list[AttentionSite], projections: str) -> dict[tuple[nn.Module, str], list[tuple[str, Slot]]]:
    parts: dict[tuple[nn.Module, str], list[tuple[str, Slot]]] = {}
    for site in sites:
        for role in projections:
            slot = site.slots[role]
            known = parts.setdefault((slot.owner, slot.weight_name), [])
            rows = rows_of(slot)
            if any(other == role and torch.equal(rows_of(seen), rows) for other, seen in known):
                continue  # a projection that two attention layers share is corrected once
            taken = torch.cat([rows_of(seen).flatten() for _, seen in known]) if known else rows.new_empty(0)
            if bool(torch.isin(rows, taken).any()):
                raise WeightError(
                    f"{site.name} ({role}) shares rows of {type(slot.owner).__name__}.{slot.weight_name} with another "
                    "projection; leave one of them out with sites=... or projections=..."
                )
            known.append((role, slot))
    return parts


def _readers(model: nn.Module, sites: list[AttentionSite]) -> list[nn.Module]:
    """The attention layers and the modules that contain them, some of which read the weights of their attention."""
    attentions = {id(site.module) for site in sites}
    return [m for m in model.modules() if {id(m), *map(id, m.children())} & attentions]


@dataclass(frozen=True)
class _Attached:
    """A conditioned weight with its raw and effective numbers; of a sharded one, the shard of this rank."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    raw: Tensor
    effective: Tensor
    state: dict[str, Tensor]
    """What its correction keeps beside it."""


def fold_(model: nn.Module) -> nn.Module:
    """Write W + C into the parameters and remove every trace of conditioning: a plain model again.

    Parameter objects, module classes, state-dict keys and their order are those from before `condition_`; outputs are
    unchanged. All sites are folded, or none. Folding is one-way: rounding forbids an exact way back.

    Returns: the same model.

    Raises:
        ConditioningError: the model is not conditioned, or is a part of a conditioned one; FSDP2 manages learned
            parameters of the correction.
        WeightError: an effective weight is not finite; nothing was changed.

    Example:
        >>> model = nn.MultiheadAttention(8, 2)
        >>> keys = list(model.state_dict())
        >>> list(fold_(condition_(model, "polar")).state_dict()) == keys
        True
    """
    check_model(model)
    _fold_(model)
    return model


@contextlib.contextmanager
def folded(model: nn.Module) -> Iterator[nn.Module]:
    """Within this context the model is plain and holds its effective weights; then it is as before.

    For an export in the middle of training, and for generating text: every correction is computed once, when the
    context is entered, instead of once for each token. The raw weights come back bit for bit; what is done to the
    parameters inside is lost. What was taken from the model inside, such as a state dict or an exported program, keeps
    the effective weights.

    Raises: as `fold_`.

    Example:
        >>> model = condition_(nn.MultiheadAttention(8, 2), "polar")
        >>> with folded(model) as plain:
        ...     type(plain).__name__
        'MultiheadAttention'
    """
    check_model(model)
    with torch.inference_mode(False):  # the parameters must be ordinary tensors, also for those who export inside
        restore = _fold_(model, for_now=True)
    try:
        yield model
    finally:
        with torch.inference_mode(False):
            try:
                restore()
            except BaseException:
                if not list(roots_in(model)):  # an interrupt before it began: the model is still plain
                    restore()
                raise


def _fold_(model: nn.Module, *, for_now: bool = False) -> Callable[[], None]:
    """Fold a model; returns the function that undoes it, which works if the folding was `for_now`."""
    reshard_(model)
    rollback = Rollback(model)
    try:
        roots = [
            (root, settings, root.get_buffer(MARKER), _attachments(root), readers_in(root))
            for _, root, settings in roots_in(model)
        ]
        attached = _attached(model, rollback)
        if not for_now:
            _check_fsdp_lets_go(model, attached)
        detach(model)
        for part in attached:
            _write_effective_(part, for_now)
        update_buffers(model)
        if not for_now:
            num_layers = sum(len(settings["sites"]) for _, settings, *_ in roots)
            log_change("fold_", num_layers, [part.parameter for part in attached])
    except BaseException:
        rollback.restore()
        raise

    def restore() -> None:
        try:
            reshard_(model)  # an evaluation inside may have left FSDP2's full weights in place
            for part in attached:
                _put_back_(part)
            for root, settings, marker, attachments, readers in roots:
                attach(root, attachments, readers, settings, marker)
            update_buffers(model)
        except BaseException:
            rollback.restore()
            raise

    return restore


def _check_fsdp_lets_go(model: nn.Module, attached: list[_Attached]) -> None:
    """FSDP2 puts every parameter that it manages back in each forward pass, also one that was removed."""
    learned = [name for part in attached for name, value in part.state.items() if isinstance(value, nn.Parameter)]
    if learned and fsdp_modules(model):
        raise ConditioningError(
            f"FSDP2 manages {learned[0]}, which the correction learned, and would put it back: expected a model that "
            "is not sharded. Save the effective weights inside `with wellcond.folded(model):` and load them into a "
            "plain model"
        )


@torch.no_grad()
def _write_effective_(part: _Attached, for_now: bool) -> None:
    for name in part.state:
        part.owner._buffers.pop(name, None)
        part.owner._parameters.pop(name, None)
    original = part.parameter
    to_local(original).copy_(part.effective)
    if for_now:
        # In a parameter of its own: a state dict or an exported program that outlives the context keeps the weight.
        effective = from_local(original, part.effective) if is_distributed(original) else part.effective
        part.owner._parameters[part.name] = nn.Parameter(effective, original.requires_grad)


@torch.no_grad()
def _put_back_(part: _Attached) -> None:
    """Give a weight its parameter, its raw numbers, and what its correction keeps beside it."""
    original, now = part.parameter, part.owner.get_parameter(part.name)
    moved = (now.device, now.dtype) != (original.device, original.dtype)  # the model was converted inside
    if moved:
        original.data = original.data.to(now.device, now.dtype)
        for value in part.state.values():
            value.data = value.data.to(now.device, now.dtype)
    part.owner._parameters[part.name] = original
    to_local(original).copy_(part.raw)
    _keep_beside(part.owner, part.state)


def _attachments(model: nn.Module) -> list[Attachment]:
    return [
        (module, name, correction)  # type: ignore[misc]
        for module in model.modules()
        for name, correction in corrections_of(module).items()
    ]


@torch.no_grad()
def _attached(model: nn.Module, rollback: Rollback) -> list[_Attached]:
    """Every conditioned weight of a model; the raw ones are kept for a rollback.

    Raises: as `fold_`.
    """
    attachments = _attachments(model)
    _check_tied_since(model, attachments)
    found = []
    for owner, name, correction in attachments:
        parameter = owner._parameters[name]
        assert parameter is not None
        effective = correction.effective(owner, full_tensor(parameter))
        own_part = local_shard(parameter).of(effective) if is_distributed(parameter) else effective
        state = correction.state_of(owner)
        found.append(_Attached(owner, name, parameter, rollback.keep(parameter), own_part.clone(), state))
    if not found:
        raise ConditioningError("this model is not conditioned: there is nothing to fold")
    inside = {id(part) for _, root, _ in roots_in(model) for part in root.modules()}
    if not all(id(part.owner) in inside for part in found):
        raise ConditioningError("this is a part of a conditioned model; fold the whole model that was conditioned")
    for part in found:
        finite = bool(torch.isfinite(part.effective).all())
        # Also in the shards of other ranks: all of them fold, or none.
        if any_rank(not finite, part.parameter) if is_distributed(part.parameter) else not finite:
            raise WeightError(f"{part.name}: the effective weight has NaN or infinite entries; nothing was folded")
    return found


def _check_tied_since(model: nn.Module, attachments: list[Attachment]) -> None:
    """Folding writes W + C; a layer that was given the same parameter after `condition_` uses W, and would change."""
    conditioned = {id(module._parameters[name]) for module, name, _ in attachments}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in conditioned and name not in corrections_of(module):
                raise WeightError(
                    f"{path}.{name} was tied to a conditioned weight after condition_; it uses the raw weight, which "
                    "folding would change. Untie it (give it a copy of the parameter), then fold."
                )

"""The verb `diagnose`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from wellcond.arguments import check_batch, check_flag
from wellcond.attention.checks import Chosen, check_readable, choose_sites
from wellcond.attention.effective import conditioning_of
from wellcond.attention.find import find_attention, scan_attention
from wellcond.attention.sharding import unwrap
from wellcond.attention.site import AttentionSite
from wellcond.conditioning.methods import per_projection
from wellcond.doctor.examine import examine, is_fresh
from wellcond.doctor.records import Diagnosis, LayerFacts
from wellcond.doctor.rules import Case, judge
from wellcond.errors import DiagnosisError
from wellcond.measurement.measure import measure
from wellcond.measurement.run import run_facts


def diagnose(
    model: nn.Module,
    batch: Any,
    *,
    sites: Chosen | None = None,
    trained: bool | None = None,
    jacobian: bool = False,
) -> Diagnosis:
    """What is wrong with a model's attention, the line of code that fixes it, and what our records say about that line.

    For an untrained model that line is the recommended initialisation, `init_(model, "calibrated", batch=batch)`.

    The model runs once on the batch, in evaluation mode and without gradients, and is left as it was. This takes
    seconds.

    Args:
        model: any model that `find_attention` understands, before training, in training or after it.
        batch: what the model is called with: a tensor, a mapping of keyword arguments, a tuple of arguments, or a
            function that calls the model. A few samples of the training set suffice; noise hides what blank patches
            and repeated words show.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``; all by default.
        trained: whether the model is trained, so that rules for untrained models do not apply, nor advice that
            overwrites weights. By default its norms show it; where they cannot (norms without parameters), the
            diagnosis says so and is that of a trained model.
        jacobian: also measure the condition number of every head's parameter Jacobian (`measure`): minutes.

    Returns: findings in order of weight, none where there is nothing to fix, and the numbers of every layer. What the
        forward pass did not show (a kernel that computes its softmax inside, a layer that the batch does not reach) is
        a finding of its own.

    Raises:
        AttentionNotFoundError, UnsupportedLayoutError: no attention of the model is understood.
        DiagnosisError: a model on the meta device.

    Example:
        >>> import torch
        >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> diagnose(layer, torch.randn(2, 8, 32))
        Diagnosis(1 attention layer, nothing to fix)
    """
    inner = unwrap(model)
    check_batch(batch)
    check_flag("jacobian", jacobian)
    if trained is not None:
        check_flag("trained", trained)
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise DiagnosisError("expected a model with values, found one on the meta device; materialise it first")
    chosen, refusals = _found(inner) if sites is None else (choose_sites(inner, sites), ())
    check_readable(chosen)
    examined = examine(inner, batch, chosen)
    layers = examined.layers
    if jacobian:
        layers = _with_jacobians(inner, batch, chosen, layers)
    fresh = is_fresh(inner) if trained is None else not trained
    conditioning = conditioning_of(inner)
    case = Case(
        layers=layers,
        tokens=examined.tokens,
        fresh=fresh,
        whole=sites is None,
        lam=_lams(conditioning),
        not_finite=examined.not_finite,
    )
    return Diagnosis(
        findings=judge(case),
        layers=layers,
        tokens=examined.tokens,
        fresh=fresh,
        not_finite=examined.not_finite,
        conditioning=conditioning,
        not_understood=refusals,
        run=run_facts(inner, batch),
    )


def _found(model: nn.Module) -> tuple[Sequence[AttentionSite], tuple[str, ...]]:
    """The attention layers of a model, and what is said of those that are not understood.

    Raises: as `find_attention`, if none is understood.
    """
    scan = scan_attention(model)
    sites = scan.sites or find_attention(model, strict=False)
    return sites, tuple(str(refusal) for refusal in scan.refusals)


def _lams(conditioning: dict[str, Any] | None) -> tuple[float, float] | None:
    """Of a correction lam I: for Q and for K."""
    if conditioning is None or conditioning.get("method") != "identity":
        return None
    lams = per_projection(conditioning["lam"])
    return lams["q"], lams["k"]


def _with_jacobians(
    model: nn.Module, batch: Any, sites: Sequence[AttentionSite], layers: tuple[LayerFacts, ...]
) -> tuple[LayerFacts, ...]:
    """The worst head of each layer."""
    report = measure(model, batch, sites=sites, kappa="pseudo")
    worst = {layer.name: max((head.mean_kappa() for head in layer.heads), default=math.nan) for layer in report.layers}
    return tuple(dataclasses.replace(layer, kappa_jacobian=worst.get(layer.name)) for layer in layers)

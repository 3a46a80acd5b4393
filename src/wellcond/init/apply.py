"""The verb `init_`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import wellcond.init.calibrated
import wellcond.init.conditioned
import wellcond.init.mimetic
import wellcond.init.nanochat
import wellcond.init.selection
import wellcond.init.standard
import wellcond.init.whole_blocks  # noqa: F401  (each registers its methods)
from wellcond.arguments import describe
from wellcond.attention.checks import Chosen, check_writable, choose_projections, choose_sites
from wellcond.attention.rollback import Rollback
from wellcond.attention.sharding import find_ddp, is_distributed, reshard_, unwrap
from wellcond.attention.site import AttentionSite
from wellcond.errors import EvidenceWarning, UnknownChoiceError, check_method
from wellcond.init import recommended
from wellcond.init.options import check_values
from wellcond.init.plan import CHECKS, METHODS, InitContext, Write, checked

VALUES_AT_ONE = ("conditioned", "gaussian", "orthogonal")
"""Methods whose W_V puts out tokens as large as those that it reads."""


def init_(
    model: nn.Module,
    method: str = recommended.METHOD,
    *,
    sites: Chosen | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """Initialise the attention projections of a model in place.

    Everything is planned before anything is written, and a failure while writing is undone: an error of any kind,
    an interrupt included, leaves the model as it was.

    Sharded weights (FSDP2, tensor parallelism) and replicated ones (DDP) become those that rank 0 draws, the same as in
    a single process; every rank must call this.

    Args:
        model: any model whose attention `find_attention` recognises.
        method: ``calibrated``, the recommended one, which needs ``batch=``; ``gaussian``, ``conditioned``,
            ``orthogonal``, ``mimetic``, ``nanochat``, ``small``, ``t_fixup``, ``weight_selection`` or ``default``.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``; all by default.
        generator: source of randomness; torch's global one if None. A seed gives the same weights whatever the
            storage layout, dtype or device.
        **options: of the method; see its card in the documentation.

    Returns: the same model.

    Raises:
        UnknownChoiceError: a method or option that does not exist.
        ValueError: an option of another type or out of range.
        AttentionNotFoundError, UnsupportedLayoutError: from `find_attention`.
        WeightError: parameters that it would write on the meta device, quantised, frozen or tied.
        ConditioningError: a conditioned model; initialise before conditioning.

    Warns: EvidenceWarning where our records say that the method hurts: W_V at scale 1 under a causal mask.

    Example:
        >>> model = nn.MultiheadAttention(8, 2)
        >>> from wellcond import find_attention
        >>> q = find_attention(init_(model, "conditioned"))[0].q.read()
        >>> torch.allclose(q @ q.mT, torch.eye(4).expand(2, 4, 4), atol=1e-5)
        True

    Reference: Saratchandran and Lucey, Conditioned Initialization for Attention, section 3.3.
    """
    check_method("init_", method, sorted(METHODS))
    check_options(method, options)
    inner = unwrap(model)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected torch.Generator().manual_seed(...), got {describe(generator)}")
    reshard_(inner)
    chosen = choose_sites(inner, sites)
    check_writable(inner, chosen, written_projections(method, options), "wellcond.init_")
    rollback = Rollback(inner)
    try:
        writes = METHODS[method](InitContext(inner, chosen, generator, rollback), **options)
        plan = list(checked(writes, next(filter(is_distributed, inner.parameters()), None)))
        _warn_of_values(method, options, chosen)
        for write in plan:
            rollback.keep(write.parameter)
        for write in plan:
            write.commit_()
        _send_to_replicas(model, plan)
    except BaseException:
        rollback.restore()
        raise
    return model


def _warn_of_values(method: str, options: dict[str, Any], sites: Sequence[AttentionSite]) -> None:
    """Warn of W_V at scale 1 under a causal mask, unless something else about the start makes up for it."""
    given = {name: options.get(name, parameter.default) for name, parameter in _options(method).items()}
    large = method in VALUES_AT_ONE and "v" in given["projections"] and given.get("std") is None
    mended = given.get("value_scale", 1.0) != 1.0 or given.get("match_norm") or given.get("keys") == "tied"
    causal = next((site for site in sites if site.causal), None)
    if causal is None or not large or mended:
        return
    avoid = "projections='qk'" + (" or value_scale='default'" if "value_scale" in given else "")
    warnings.warn(
        f"init_(model, {method!r}) starts W_V at scale 1, and {causal.name or 'the model'} is causal: an average of "
        "the past then outweighs the token that it is added to. A small GPT-2 had perplexity 56.6 with 'conditioned', "
        f"44.6 with it on Q and K alone and 45.7 by default (results/evidence/causal). Use {avoid}.",
        EvidenceWarning,
        stacklevel=3,
    )


@torch.no_grad()
def _send_to_replicas(model: nn.Module, plan: list[Write]) -> None:
    """Give what the first process of DistributedDataParallel wrote to the others, whose random state may be another."""
    ddp = find_ddp(model)
    if ddp is None:
        return
    source = torch.distributed.get_global_rank(ddp.process_group, 0)
    for parameter in {id(write.parameter): write.parameter for write in plan}.values():
        torch.distributed.broadcast(parameter.data, source, group=ddp.process_group)


def check_options(method: str, options: dict[str, Any]) -> None:
    """Check the options of a method, without a model.

    Raises:
        UnknownChoiceError: an option that the method does not have, or none of its choices.
        ValueError: one that it needs is missing, or has a value of another type or out of range.
    """
    check_names(method, options)
    check_values(METHODS[method], method, options)
    if method in CHECKS:
        CHECKS[method](**options)


def check_names(method: str, options: dict[str, Any]) -> None:
    """Raise UnknownChoiceError for an option the method does not have, ValueError for one it needs."""
    parameters = _options(method)
    for name in options:
        if name not in parameters:
            raise UnknownChoiceError(f"option of {method!r}", name, list(parameters))
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{method!r} needs the option {missing[0]}=")


def written_projections(method: str, options: dict[str, Any]) -> str:
    """Letters of the projections that a method rewrites with these options.

    A method with the option ``projections`` writes those, one with ``output`` writes W_O if that is set; a method with
    neither writes everything.
    """
    given = {name: options.get(name, parameter.default) for name, parameter in _options(method).items()}
    rewritten = choose_projections(given.get("projections", "qkv"))
    with_output = given.get("output", "projections" not in given)
    return rewritten + "o" if with_output else rewritten


def _options(method: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(METHODS[method]).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

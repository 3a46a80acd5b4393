"""The verb `init_`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import wellcond.init.conditioned
import wellcond.init.mimetic
import wellcond.init.selection
import wellcond.init.standard  # noqa: F401  (each registers its methods)
from wellcond.attention.checks import check_writable, choose_sites
from wellcond.attention.shards import is_distributed, reshard_
from wellcond.attention.site import AttentionSite
from wellcond.attention.wrappers import find_ddp, unwrap
from wellcond.errors import UnknownChoiceError, check_choice
from wellcond.init.plan import METHODS, InitContext, Write, checked


def init_(
    model: nn.Module,
    method: str = "conditioned",
    *,
    sites: Sequence[AttentionSite] | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """Initialise the attention projections of a model in place.

    Everything is planned before anything is written: an error leaves the model as it was.

    Weights that several processes hold together (FSDP2, tensor parallelism), or that each holds (DDP), become those
    that the first process draws, the same as on one process; every process must call this.

    Args:
        model: any model whose attention `find_attention` recognises.
        method: ``conditioned``, ``orthogonal``, ``gaussian``, ``mimetic``, ``weight_selection`` or ``default``.
        sites: only these attentions (from `find_attention(model)`); all by default.
        generator: source of randomness; torch's global one if None. A seed gives the same weights whatever the
            storage layout, dtype or device.
        **options: of the method; see its card in the documentation.

    Returns: the same model.

    Raises:
        UnknownChoiceError: a method or option that does not exist.
        AttentionNotFoundError, UnsupportedLayoutError: from `find_attention`.
        WeightError: parameters on the meta device, quantised, frozen or tied.
        ConditioningError: a conditioned model; initialise before conditioning.

    Example:
        >>> model = nn.MultiheadAttention(8, 2)
        >>> from wellcond import find_attention
        >>> q = find_attention(init_(model, "conditioned"))[0].q.read()
        >>> torch.allclose(q @ q.mT, torch.eye(4).expand(2, 4, 4), atol=1e-5)
        True

    Reference: Saratchandran and Lucey, Conditioned Initialization for Attention, section 3.3.
    """
    check_choice("initialisation method", method, sorted(METHODS))
    check_options(method, options)
    inner = unwrap(model)
    reshard_(inner)
    chosen = choose_sites(inner, sites)
    check_writable(inner, chosen, "qkvo", "wellcond.init_")
    writes = METHODS[method](InitContext(inner, chosen, generator), **options)
    plan = list(checked(writes, next(filter(is_distributed, inner.parameters()), None)))
    for write in plan:
        write.commit_()
    _send_to_replicas(model, plan)
    return model


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
    """Raise UnknownChoiceError for an option the method does not have, ValueError for one it needs."""
    parameters = inspect.signature(METHODS[method]).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise UnknownChoiceError(f"option of {method!r}", name, known)
    missing = [
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in options
    ]
    if missing:
        raise ValueError(f"{method!r} needs the option {missing[0]}=")

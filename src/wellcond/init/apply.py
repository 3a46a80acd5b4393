"""The verb `init_`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import describe
from wellcond.attention.checks import Chosen, Rollback, check_writable, choose_projections, choose_sites
from wellcond.attention.sharding import find_ddp, reshard_, unwrap
from wellcond.attention.site import AttentionSite
from wellcond.errors import EvidenceWarning
from wellcond.init import recommended
from wellcond.init.plan import FACTS, METHODS, InitContext, checked
from wellcond.registry import check_names, check_values, options_of, with_defaults

LOGGER = logging.getLogger("wellcond")


def init_(
    model: nn.Module,
    method: str = recommended.METHOD,
    *,
    sites: Chosen | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """Initialise the attention projections of a model in place.

    An error of any kind, an interrupt included, leaves the model as it was. One line says what was done, to the logger
    ``wellcond`` at the level INFO.

    Sharded weights (FSDP2, tensor parallelism) and replicated ones (DDP) become those that rank 0 draws, the same as in
    a single process; every rank must call this.

    Args:
        model: any model whose attention `find_attention` recognises.
        method: ``calibrated``, the recommended one, which needs ``batch=``; another method of the documentation such as
            ``gaussian`` or ``conditioned`` (a wrong name lists all); or one of `register_init`.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``; all by default.
        generator: source of randomness; torch's global one if None. A seed gives the same weights whatever the
            storage layout, dtype or device.
        **options: of the method; see its card in the documentation.

    Returns: the same model.

    Raises:
        UnknownChoiceError: a method or option that does not exist.
        OptionError: an option of another type or out of range.
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
    METHODS.check(method)
    check_options(method, options)
    inner = unwrap(model)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected torch.Generator().manual_seed(...), got {describe(generator)}")
    reshard_(inner)
    chosen = choose_sites(inner, sites)
    check_writable(inner, chosen, written_projections(method, options), "wellcond.init_")
    context = InitContext(inner, chosen, generator, Rollback(inner))
    try:
        written: dict[int, Tensor] = {}
        values = 0
        for write in checked(context, METHODS[method](context, **options)):
            context.rollback.keep(write.parameter)
            write.commit_()
            written[id(write.parameter)] = write.parameter
            values += write.values.numel()
        _send_to_replicas(model, written.values())
        warn = FACTS[method].warn
        text = None if warn is None else warn(chosen, with_defaults(METHODS[method], options))
        if text is not None:
            warnings.warn(f"init_(model, {method!r}): {text}", EvidenceWarning, stacklevel=2)
        _log(method, chosen, len(written), values)
    except BaseException:
        context.rollback.restore()
        raise
    return model


def _log(method: str, sites: Sequence[AttentionSite], parameters: int, values: int) -> None:
    layers = f"{len(sites)} attention layer{'s' * (len(sites) != 1)}"
    heads = sum(site.num_heads for site in sites)
    size = f"{values / 1e6:.1f} M" if values >= 1e5 else f"{values:,}"
    LOGGER.info("%s: %s, %d heads, %d parameters (%s values) initialised", method, layers, heads, parameters, size)


@torch.no_grad()
def _send_to_replicas(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Give what the first process of DistributedDataParallel wrote to the others, whose random state may be another."""
    ddp = find_ddp(model)
    if ddp is None:
        return
    source = torch.distributed.get_global_rank(ddp.process_group, 0)
    for parameter in parameters:
        torch.distributed.broadcast(parameter.data, source, group=ddp.process_group)


def check_options(method: str, options: dict[str, Any]) -> None:
    """Check the options of a method, without a model.

    Raises:
        UnknownChoiceError: an option that the method does not have, or none of its choices.
        OptionError: one that it needs is missing, or has a value of another type or out of range.
    """
    check_names(METHODS[method], method, options)
    check_values(METHODS[method], method, options)
    check = FACTS[method].check
    if check is not None:
        check(**options)


def takes_batch(method: str) -> bool:
    """Whether an initialisation runs the model on a batch."""
    return "batch" in options_of(METHODS[method])


def written_projections(method: str, options: dict[str, Any]) -> str:
    """Letters of the projections that a method rewrites with these options; see `register_init`."""
    given = with_defaults(METHODS[method], options)
    if "projections" not in given and "output" not in given:
        return FACTS[method].projections
    rewritten = choose_projections(given.get("projections", "qkv"))
    return rewritten + "o" if given.get("output") else rewritten

"""The verb `init_`, and what an initialisation is: a function that yields new values for the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellcond.arguments import INITIALISATIONS as METHODS
from wellcond.arguments import check_names, check_tensor, check_values, describe, options_of, with_defaults
from wellcond.attention.checks import Chosen, Rollback, check_writable, choose_projections, choose_sites, log_change
from wellcond.attention.sharding import (
    broadcast_from_rank_zero,
    find_ddp,
    is_distributed,
    local_shard,
    reshard_,
    to_local,
    unwrap,
)
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import EvidenceWarning, WeightError
from wellcond.init import recommended


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
        for write in checked(context, METHODS[method](context, **options)):
            context.rollback.keep(write.parameter)
            write.commit_()
            written[id(write.parameter)] = write.parameter
        _send_to_replicas(model, written.values())
        warn = FACTS[method].warn
        text = None if warn is None else warn(chosen, with_defaults(METHODS[method], options))
        if text is not None:
            warnings.warn(f"init_(model, {method!r}): {text}", EvidenceWarning, stacklevel=2)
        heads = sum(site.num_heads for site in chosen)
        log_change(f"init_ {method!r}", len(chosen), list(written.values()), num_heads=heads)
    except BaseException:
        context.rollback.restore()
        raise
    return model


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


@dataclass(frozen=True)
class Write:
    """New values of a parameter, or of the heads of a slot: of its weight, or of its bias."""

    what: str
    target: Slot | Tensor
    values: Tensor
    to_bias: bool = False

    @property
    def parameter(self) -> Tensor:
        """The stored tensor that is written."""
        if not isinstance(self.target, Slot):
            return self.target
        bias = self.target.stored_bias() if self.to_bias else None
        return self.target.parameter if bias is None else bias

    def check(self) -> None:
        """Raise WeightError for a frozen parameter, another shape, or values that are not finite."""
        parameter = self.parameter
        if isinstance(parameter, nn.Parameter) and not parameter.requires_grad:
            raise WeightError(
                f"{self.what} is frozen (requires_grad=False); unfreeze or exclude it. Nothing was changed"
            )
        expected = self.target.heads_shape if isinstance(self.target, Slot) else tuple(self.target.shape)
        if not self.to_bias and tuple(self.values.shape) != expected:
            raise WeightError(
                f"{self.what}: expected values of shape {expected}, got {tuple(self.values.shape)}; nothing was changed"
            )
        # The sum is cheap and shows NaN and infinity; a finite overflow of the sum is told apart by looking closely.
        stored = self.values.to(parameter.dtype)
        if not bool(torch.isfinite(stored.sum())) and not bool(torch.isfinite(stored).all()):
            raise WeightError(f"{self.what}: the planned weights are not finite; nothing was changed")

    @torch.no_grad()
    def commit_(self) -> None:
        """Write the values; into a sharded parameter, the part that this process stores."""
        if not isinstance(self.target, Slot):
            part = local_shard(self.target).of(self.values) if is_distributed(self.target) else self.values
            to_local(self.target).copy_(part)
        elif self.to_bias:
            self.target.write_bias_(self.values)
        else:
            self.target.write_(self.values)


@dataclass(frozen=True)
class InitContext:
    """What every initialisation receives."""

    model: nn.Module
    sites: list[AttentionSite]
    generator: torch.Generator | None
    rollback: Rollback
    """A method that tries numbers on the model itself gives every tensor to `rollback.keep` before it writes."""


Planned = Write | tuple[Slot | Tensor, Tensor]
Method = Callable[..., Iterable[Planned]]
M = TypeVar("M", bound=Method)


@dataclass(frozen=True)
class Facts:
    """What `init_` must know of a method beside its options; see `register_init`."""

    check: Callable[..., None] | None = None
    warn: Callable[[Sequence[AttentionSite], Mapping[str, Any]], str | None] | None = None
    projections: str = "qkvo"


FACTS: dict[str, Facts] = {}


def register_init(
    name: str,
    *,
    check: Callable[..., None] | None = None,
    warn: Callable[[Sequence[AttentionSite], Mapping[str, Any]], str | None] | None = None,
    projections: str = "qkvo",
) -> Callable[[M], M]:
    """Decorate a function that plans an initialisation: `init_(model, name)` then finds it.

    The function gets a context (`model`, `sites`, `generator`) and its options as keyword arguments, which are checked
    against their annotations. It yields pairs of a slot and its heads, such as ``site.q, values``, or of a parameter
    and its values, and writes nothing itself. A seed gives the same weights if it draws from `context.generator` only.
    Each pair is checked and written when it is yielded; an error undoes all of them.

    Args:
        name: of the method.
        check: ``check(**options)`` raises for options that exclude each other.
        warn: ``warn(sites, options)`` returns the text of an EvidenceWarning, or None.
        projections: letters of the projections that the method writes, which must not be frozen or tied. The options
            ``projections`` and ``output`` of a method, where it has them, decide instead.

    Raises: OptionError for a name that a method of wellcond has.

    Example:
        >>> @register_init("values_halved")
        ... def values_halved(context, *, factor: float = 0.5):
        ...     for site in context.sites:
        ...         yield site.v, factor * site.v.read()
        >>> from wellcond import init_
        >>> model = nn.MultiheadAttention(8, 2)
        >>> before = model.in_proj_weight[16:].clone()
        >>> torch.equal(init_(model, "values_halved").in_proj_weight[16:], before / 2)
        True
    """

    def decorate(method: M) -> M:
        METHODS.register(name, method)
        FACTS[name] = Facts(check, warn, projections)
        return method

    return decorate


def checked(context: InitContext, planned: Iterable[Planned]) -> Iterator[Write]:
    """What a method yields, as writes that were checked; in a sharded model every rank has the values of rank 0.

    Raises: TypeError for something else than pairs and writes; WeightError for values that cannot be written.
    """
    if not isinstance(planned, Iterable):
        raise TypeError(
            f"an initialisation: expected a function that yields pairs (slot or parameter, values), got {planned!r}"
        )
    sharded = next(filter(is_distributed, context.model.parameters()), None)
    for entry in planned:
        write = entry if isinstance(entry, Write) else _named(context, entry)
        if sharded is not None:  # before the values are looked at, so that all processes see the same
            mesh_of = write.parameter if is_distributed(write.parameter) else sharded
            write = replace(write, values=broadcast_from_rank_zero(write.values, mesh_of))
        write.check()
        yield write


def _named(context: InitContext, entry: object) -> Write:
    if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], (Slot, Tensor)):
        raise TypeError(
            "an initialisation yields pairs: expected a slot such as site.q, or a parameter, and its new values, got "
            f"{describe(entry)}"
        )
    target, values = entry
    name = _name_of(context, target)
    check_tensor(name, values)
    return Write(name, target, values.detach())


def _name_of(context: InitContext, target: Slot | Tensor) -> str:
    for site in context.sites:
        for role, slot in site.slots.items():
            if slot is target:
                return f"{site.name} ({role})"
    stored = target.parameter if isinstance(target, Slot) else target
    for name, parameter in context.model.named_parameters():
        if parameter is stored:
            return name
    raise WeightError(f"expected a parameter of this model, got {describe(stored)}; nothing was changed")

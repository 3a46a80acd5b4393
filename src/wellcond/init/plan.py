"""What an initialisation is: a function that yields new values for the weights, each checked before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellcond.arguments import check_tensor, describe
from wellcond.attention.checks import Rollback
from wellcond.attention.sharding import broadcast_from_rank_zero, is_distributed, local_shard, to_local
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import WeightError
from wellcond.registry import INITIALISATIONS as METHODS


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
        expected = self._shape()
        if expected is not None and tuple(self.values.shape) != expected:
            raise WeightError(
                f"{self.what}: expected values of shape {expected}, got {tuple(self.values.shape)}; nothing was changed"
            )
        # The sum is cheap and shows NaN and infinity; a finite overflow of the sum is told apart by looking closely.
        stored = self.values.to(parameter.dtype)
        if not bool(torch.isfinite(stored.sum())) and not bool(torch.isfinite(stored).all()):
            raise WeightError(f"{self.what}: the planned weights are not finite; nothing was changed")

    def _shape(self) -> tuple[int, ...] | None:
        """The shape that the values must have; None for a bias, which knows its own."""
        slot = self.target
        if not isinstance(slot, Slot):
            return tuple(slot.shape)
        if self.to_bias:
            return None
        heads, width = slot.rows.shape
        return (heads, slot.out_features, width) if slot.heads_on_input else (heads, width, slot.in_features)

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


def head_write(site: AttentionSite, role: str, values: Tensor) -> Write:
    """Plan new heads for one projection of one site."""
    return Write(f"{site.name} ({role})", site.slots[role], values)


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
    """A pair as a write, under the name of its parameter."""
    if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], (Slot, Tensor)):
        raise TypeError(
            "an initialisation yields pairs: expected a slot such as site.q, or a parameter, and its new values, got "
            f"{describe(entry)}"
        )
    target, values = entry
    stored = target.parameter if isinstance(target, Slot) else target
    for name, parameter in context.model.named_parameters():
        if parameter is stored:
            check_tensor(name, values)
            return Write(name, target, values.detach())
    raise WeightError(f"expected a parameter of this model, got {describe(stored)}; nothing was changed")

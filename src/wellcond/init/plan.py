"""An initialisation is first planned, then written: a failure while planning leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from wellcond.attention.rollback import Rollback
from wellcond.attention.sharding import box_of, broadcast_from_rank_zero, is_distributed, local_part
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import WeightError


class Write(Protocol):
    """One pending assignment."""

    @property
    def what(self) -> str:
        """What is written, for messages."""
        ...

    @property
    def values(self) -> Tensor:
        """The values to be written."""
        ...

    @property
    def parameter(self) -> Tensor:
        """The parameter that is written."""
        ...

    def commit_(self) -> None:
        """Write them."""
        ...


@dataclass(frozen=True)
class HeadWrite:
    """New per-head weights, or biases, of one slot."""

    what: str
    slot: Slot
    values: Tensor
    to_bias: bool = False

    @property
    def parameter(self) -> Tensor:
        """The weight, or the bias."""
        bias = self.slot.stored_bias()
        return bias if self.to_bias and bias is not None else self.slot.parameter

    def commit_(self) -> None:
        """Write into the parameter."""
        if self.to_bias:
            self.slot.write_bias_(self.values)
        else:
            self.slot.write_(self.values)


@dataclass(frozen=True)
class ParameterWrite:
    """New values of a whole parameter."""

    what: str
    parameter: Tensor
    values: Tensor

    @torch.no_grad()
    def commit_(self) -> None:
        """Write into the parameter."""
        if is_distributed(self.parameter):
            local_part(self.parameter).copy_(box_of(self.parameter).of(self.values))
        else:
            self.parameter.copy_(self.values)


@dataclass(frozen=True)
class InitContext:
    """What every initialisation method receives."""

    model: nn.Module
    sites: list[AttentionSite]
    generator: torch.Generator | None
    rollback: Rollback
    """A method that tries numbers on the model itself gives every tensor to `rollback.keep` before it writes."""


Method = Callable[..., Iterable[Write]]
METHODS: dict[str, Method] = {}
CHECKS: dict[str, Callable[..., None]] = {}


def register_init(name: str, *, check: Callable[..., None] | None = None) -> Callable[[Method], Method]:
    """Decorate a function `(context, **options) -> writes` that plans an initialisation.

    `check(**options)` raises for options that exclude each other; each by itself is checked against its annotation.
    """

    def decorate(method: Method) -> Method:
        METHODS[name] = method
        if check is not None:
            CHECKS[name] = check
        return method

    return decorate


def head_write(site: AttentionSite, role: str, values: Tensor) -> HeadWrite:
    """Plan new heads for one projection of one site."""
    return HeadWrite(f"{site.name} ({role})", site.slots[role], values)


def checked(writes: Iterable[Write], shared: Tensor | None = None) -> Iterator[Write]:
    """Pass planned writes through; raise WeightError for values that are not finite.

    In a sharded model every rank takes the values of rank 0.

    Args:
        writes: what is planned.
        shared: one of its distributed parameters, if it has any.
    """
    for write in writes:
        if isinstance(write, ParameterWrite) and isinstance(write.parameter, nn.Parameter):
            if not write.parameter.requires_grad:
                raise WeightError(
                    f"{write.what} is frozen (requires_grad=False); unfreeze or exclude it. Nothing was changed"
                )
        if shared is not None:  # before the values are looked at, so that all processes see the same
            mesh_of = write.parameter if is_distributed(write.parameter) else shared
            write = replace(write, values=broadcast_from_rank_zero(write.values, mesh_of))  # type: ignore[type-var]
        # The sum is cheap and shows NaN and infinity; a finite overflow of the sum is told apart by looking closely.
        stored = write.values.to(write.parameter.dtype)
        if not bool(torch.isfinite(stored.sum())) and not bool(torch.isfinite(stored).all()):
            raise WeightError(f"{write.what}: the planned weights are not finite; nothing was changed")
        yield write

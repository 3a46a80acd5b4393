"""An initialisation is first planned, then written: a failure while planning leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from wellcond.attention.site import AttentionSite, Slot
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
    def dtype(self) -> torch.dtype:
        """Of the parameter that is written."""
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
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.slot.parameter.dtype

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

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.parameter.dtype

    @torch.no_grad()
    def commit_(self) -> None:
        """Write into the parameter."""
        self.parameter.copy_(self.values)


@dataclass(frozen=True)
class InitContext:
    """What every initialisation method receives."""

    model: nn.Module
    sites: list[AttentionSite]
    generator: torch.Generator | None


Method = Callable[..., Iterable[Write]]
METHODS: dict[str, Method] = {}


def register_init(name: str) -> Callable[[Method], Method]:
    """Decorate a function `(context, **options) -> writes` that plans an initialisation."""

    def decorate(method: Method) -> Method:
        METHODS[name] = method
        return method

    return decorate


def head_write(site: AttentionSite, role: str, values: Tensor) -> HeadWrite:
    """Plan new heads for one projection of one site."""
    return HeadWrite(f"{site.name} ({role})", site.slots[role], values)


def checked(writes: Iterable[Write]) -> Iterator[Write]:
    """Pass planned writes through, refusing values that are not finite."""
    for write in writes:
        if isinstance(write, ParameterWrite) and isinstance(write.parameter, nn.Parameter):
            if not write.parameter.requires_grad:
                raise WeightError(
                    f"{write.what} is frozen (requires_grad=False); unfreeze or exclude it. Nothing was changed"
                )
        # The sum is cheap and shows NaN and infinity; a finite overflow of the sum is told apart by looking closely.
        stored = write.values.to(write.dtype)
        if not bool(torch.isfinite(stored.sum())) and not bool(torch.isfinite(stored).all()):
            raise WeightError(f"{write.what}: the planned weights are not finite; nothing was changed")
        yield write

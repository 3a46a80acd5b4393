"""Exponential moving average of the weights, for whole and for sharded parameters alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """a <- decay a + (1 - decay) w after every update, over parameters; buffers are the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """The average starts as the weights."""
        self.decay, self._model = decay, model
        self._weights = dict(model.named_parameters())
        self._average = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        current = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self._average.values()), current, 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average for a while."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._copy_(self._average)
        try:
            yield
        finally:
            self._copy_(kept)

    @torch.no_grad()
    def _copy_(self, values: dict[str, Tensor]) -> None:
        reshard(self._model)
        for name, weight in self._weights.items():
            weight.copy_(values[name])

    def state(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU; every process must call it."""
        return {name: _whole(value).cpu() for name, value in self._average.items()}

    @torch.no_grad()
    def load_(self, state: dict[str, Tensor]) -> None:
        """The reverse of `state`; every process must have it."""
        for name, value in self._average.items():
            stored = state[name].to(value.device)
            value.copy_(_shard_like(stored, value))


def reshard(model: nn.Module) -> None:
    """Make FSDP2 forget gathered weights: after a forward pass without a backward it would use them once more."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _shard_like(stored: Tensor, like: Tensor) -> Tensor:
    if not hasattr(like, "full_tensor"):
        return stored
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(stored, like.device_mesh, like.placements)  # type: ignore[attr-defined]

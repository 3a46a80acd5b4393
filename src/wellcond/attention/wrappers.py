"""Models inside other modules' clothes."""

from __future__ import annotations

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers: same parameters, plain names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def find_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """DistributedDataParallel, if it is one of the wrappers."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    return model


def update_buffers(model: nn.Module) -> None:
    """Tell DistributedDataParallel which buffers its model has now: it sends those that it knows of."""
    ddp = find_ddp(model)
    if ddp is not None:
        ddp._assign_modules_buffers()

"""Refuse to build a model that does not fit into memory, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.errors import ModelTooLargeError
from wellcond.linalg.spectrum import available_bytes

MOST_TENSORS = 200_000
"""The largest published models have some ten thousand; a constructor that makes more of them never ends."""
SMALL = 2**24
"""Bytes that are not worth asking the system for."""
LARGE = 2**31
"""Bytes of weights from which a model is first built without them, to count them all."""
_aten = torch.ops.aten
FILLED = ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "randint", "normal")
LIKE = ("new_empty", "new_zeros", "new_ones", "new_full")
SIZED = {
    getattr(getattr(_aten, name), overload)
    for name in (*FILLED, *LIKE)
    for overload in getattr(_aten, name).overloads()
}


class LargeModel(Exception):
    """A model of more than LARGE bytes is being built."""


class MemoryGuard(TorchDispatchMode):
    """Raises ModelTooLargeError before a tensor is made that does not fit into the memory that is left."""

    def __init__(self, *, stop_at_large: bool = False) -> None:
        """Counts from here on; with `stop_at_large` it raises LargeModel before LARGE bytes are made."""
        super().__init__()
        self._made = self._bytes = 0
        self._stop_at_large = stop_at_large

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Looks at what makes tensors; everything else passes."""
        kwargs = kwargs or {}
        if func in SIZED:
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._made += 1
        if self._made > MOST_TENSORS:
            raise ModelTooLargeError(f"more than {MOST_TENSORS:,} tensors; take fewer layers")
        size = next((value for value in (*args, *kwargs.values()) if _is_size(value)), ())
        device = kwargs.get("device") or torch.get_default_device()
        width = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
        wanted = width * math.prod(size)
        if torch.device(device).type != "cpu":
            return
        self._bytes += wanted
        if self._stop_at_large and self._bytes > LARGE:
            raise LargeModel
        if wanted < SMALL:
            return
        left = available_bytes()
        if wanted > left:
            raise ModelTooLargeError(
                f"a tensor of {' x '.join(map(str, size))} needs {wanted / 2**30:,.1f} GiB, and "
                f"{left / 2**30:,.1f} GiB of memory are free; take a smaller model"
            )


def check_fits(model: nn.Module) -> None:
    """Raise ModelTooLargeError if the weights of a model on the meta device would not fit into memory."""
    held = [*model.parameters(), *model.buffers()]
    wanted, left = sum(tensor.numel() * tensor.element_size() for tensor in held), available_bytes()
    if wanted > left:
        raise ModelTooLargeError(
            f"its weights need {wanted / 2**30:,.1f} GiB, and {left / 2**30:,.1f} GiB of memory are free; take a "
            "smaller model"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(type(part) is int for part in value)

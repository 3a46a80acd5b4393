"""Memory of tensors and elementwise operations, counted as they happen: the same on every machine."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that operations make while it is active, at their highest."""

    def __init__(self) -> None:
        """Nothing is counted that exists before."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it made."""
        for value in tree_iter((args, kwargs or {})):
            self._note(value, made=False)
        made = func(*args, **(kwargs or {}))
        for value in tree_iter(made):
            self._note(value, made=True)
        return made

    def _note(self, value: Any, *, made: bool) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes() if made else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


ELEMENTWISE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor)


class ElementwiseCount(TorchDispatchMode):
    """Additions, subtractions and multiplications of entries while it is active."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        made = func(*args, **(kwargs or {}))
        self.total += made.numel() if func in ELEMENTWISE else 0
        return made

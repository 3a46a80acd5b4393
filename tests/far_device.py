"""A device that is not the CPU, on a machine that has none: what mixes the two fails here as it fails with CUDA.

Tensors of the type `Far` say that they are on ``cuda:0``. While a `FarDevice` is active, every call of torch computes
on the CPU, gives far tensors for far arguments, and refuses what CUDA refuses: a CPU tensor with dimensions beside a
far one, `numpy` of a far one. Only moving, copying and indexing may cross. What ran is counted in `calls`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FAR = torch.device("cuda", 0)
CROSSING = {"copy_", "__getitem__", "__setitem__", "index_select", "to"}


class Far(Tensor):
    """Marks what is far."""


class FarDevice(TorchFunctionMode):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func == Tensor.device.__get__ and isinstance(args[0], Far):
                return FAR
            return self._run(func, args, kwargs, any(isinstance(a, Far) for a in args))
        flat = list(_leaves((args, kwargs)))
        far = any(isinstance(leaf, Far) for leaf in flat)
        target = next((leaf for leaf in flat if isinstance(leaf, torch.device)), None)
        if name in ("cpu", "numpy") or (name == "to" and target is not None and target.type == "cpu"):
            if far and name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return self._run(func, args, kwargs, False)
        if target == FAR:
            args, kwargs = _without_device(args), {k: v for k, v in kwargs.items() if k != "device"}
            if name == "to" and len(args) == 1 and not kwargs:
                return args[0].as_subclass(Far)
            far = True
        near = [leaf for leaf in flat if isinstance(leaf, Tensor) and not isinstance(leaf, Far) and leaf.dim()]
        if far and target is None and near and name not in CROSSING:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")
        if far:
            self.calls[name] += 1
        if name in ("copy_", "__setitem__") or (name == "to" and isinstance(args[0], Tensor) and target is None):
            far = isinstance(args[0], Far)
        return self._run(func, args, kwargs, far)

    def _run(self, func: Any, args: Any, kwargs: Any, far: bool) -> Any:
        with torch._C.DisableTorchFunction():
            found = func(*_map(_near, args), **_map(_near, kwargs))
        return _map(lambda leaf: leaf.as_subclass(Far) if far and isinstance(leaf, Tensor) else leaf, found)


def _near(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, Far) else leaf


def _leaves(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from _leaves(branch)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def _map(change: Any, tree: Any) -> Any:
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, (tuple, list)):
        changed = [_map(change, branch) for branch in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    if isinstance(tree, dict):
        return {key: _map(change, value) for key, value in tree.items()}
    return change(tree)


def _without_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a for a in args if not isinstance(a, torch.device))

"""Where numbers stop being finite: in the batch, in the weights, or in what a module computes from finite ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from wellcond.attention.sharding import to_local
from wellcond.doctor.records import NotFinite


class FiniteWatch:
    """The first places of a forward pass where numbers are not finite; empty text where all are.

    It is the `modules` of `wellcond.attention.record.record`.
    Minus infinity does not count: masks hold it, and where it is no mask, NaN follows.
    """

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.batch = ""
        self.activations = ""

    def entered(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at what a module is called with."""
        if self.activations:
            return
        found = _first_bad({"argument": args, **kwargs})
        if name:
            self.activations = found and f"what reaches {name} ({type(module).__name__}) has {found}"
        else:
            self.batch = self.batch or found

    def left(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Look at what a module puts out."""
        if not self.activations:
            found = _first_bad({"output": output})
            self.activations = found and f"{name or 'the model'} ({type(module).__name__}) puts out {found}"


def find_not_finite(model: nn.Module, watch: FiniteWatch) -> NotFinite | None:
    """What is not finite, by cause; None if nothing is, or nothing but arguments that the model makes no use of."""
    found = NotFinite(batch=watch.batch, weights=_in_weights(model), activations=watch.activations)
    return found if found.weights or found.activations else None


def _in_weights(model: nn.Module) -> str:
    """The first parameter with NaN or infinity, or buffer with NaN: buffers may be masks."""
    for name, parameter in model.named_parameters():
        values = to_local(parameter.detach())
        if values.is_floating_point() and not bool(values.isfinite().all()):
            return _describe(values, ~values.isfinite(), name)
    for name, buffer in model.named_buffers():
        values = to_local(buffer)
        if values.is_floating_point() and bool(values.isnan().any()):
            return _describe(values, values.isnan(), name)
    return ""


def _first_bad(values: Any) -> str:
    """The first NaN or infinity in nested values; empty text if there is none."""
    for path, tensor in tensors_in(values):
        bad = tensor.isnan() | tensor.isposinf()
        if bool(bad.any()):
            return _describe(tensor, bad, path)
    return ""


def _describe(tensor: Tensor, bad: Tensor, path: str) -> str:
    """The first bad entry, and how many there are."""
    at = [int(index) for index in bad.nonzero()[0]]
    value = "NaN" if bool(tensor[tuple(at)].isnan()) else "infinity"
    rest = f"the first of {int(bad.sum()):,} such entries of {tensor.numel():,}"
    return f"{value} at {path}{at if at else ''}, {rest}"


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of floating-point numbers in nested tuples, lists and mappings, with the way to each."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_meta:
            yield path, to_local(value.detach())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{path}[{index}]" if path != "argument" else f"argument {index}")

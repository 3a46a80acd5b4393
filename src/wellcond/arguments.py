"""Checks of arguments: an error that says what was expected, what was found and what to do, before anything happens."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HINTS = {
    str: "; build the model first, for example with timm.create_model(name) or AutoModel.from_pretrained(name)",
    type: "; give an instance of the class",
    dict: "; build the model and call load_state_dict",
}
SHAPES = {1: "a vector", 2: "a matrix", 3: "several matrices"}


def describe(value: object) -> str:
    """A value in an error message: its type, and its shape or its beginning."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    shown = repr(value).splitlines()[0][:60]
    return f"{type(value).__name__} {shown}"


def check_model(model: object) -> None:
    """Raise TypeError unless this is a module."""
    if not isinstance(model, nn.Module):
        hint = next((text for kind, text in HINTS.items() if isinstance(model, kind)), "")
        raise TypeError(f"model: expected a torch.nn.Module, got {describe(model)}{hint}")


def check_batch(batch: object) -> None:
    """Raise TypeError for what no model is called with, ValueError for a batch without samples."""
    if batch is None or isinstance(batch, (str, bytes, numbers.Number)):
        raise TypeError(
            "batch: expected what the model is called with: a tensor, a mapping of keyword arguments, a tuple of "
            f"arguments or a function of the model, got {describe(batch)}"
        )
    if isinstance(batch, Tensor) and batch.numel() == 0:
        raise ValueError(f"batch: expected at least one sample, got {describe(batch)}")


def check_int(name: str, value: Any, *, at_least: int | None = None) -> int:
    """The value as an int; a bool or a float is none, whatever its value.

    Raises: TypeError, ValueError.
    """
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {describe(value)}")
    found = operator.index(value)
    if at_least is not None and found < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {found}")
    return found


def check_ints(name: str, values: Any, *, at_least: int | None = None) -> list[int]:
    """The values as a list of ints.

    Raises: TypeError, ValueError.
    """
    if isinstance(values, (str, bytes, Tensor)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of whole numbers such as [0, 2], got {describe(values)}")
    return [check_int(name, value, at_least=at_least) for value in values]


def check_number(
    name: str, value: Any, *, at_least: float | None = None, below: float | None = None, finite: bool = True
) -> float:
    """The value as a float; a bool is none.

    Raises: TypeError, ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    try:
        found = float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that float64 can hold, got {describe(value)}") from error
    if math.isnan(found) or (finite and math.isinf(found)):
        raise ValueError(f"{name}: expected a finite number, got {found}")
    if (at_least is not None and found < at_least) or (below is not None and not found < below):
        upper = "" if below is None else f" and below {below:g}"
        raise ValueError(f"{name}: expected at least {at_least:g}{upper}, got {found:g}")
    return found


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless this is True or False (numpy's too)."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")


def check_tensor(name: str, value: Any, dims: Sequence[int] = ()) -> None:
    """Raise TypeError unless this is a tensor of real numbers that are there, ValueError for other dimensions or none.

    Args:
        name: of the argument.
        value: what was given.
        dims: numbers of dimensions that it may have; any if empty.
    """
    if not isinstance(value, Tensor):
        hint = "; torch.as_tensor(...) makes one" if hasattr(value, "__array__") or isinstance(value, list) else ""
        raise TypeError(f"{name}: expected a tensor, got {describe(value)}{hint}")
    if value.dtype.is_complex:
        raise TypeError(f"{name}: expected real numbers, got {describe(value)}")
    if value.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor, got {describe(value)} in layout {value.layout}; use to_dense()"
        )
    if value.is_meta and type(value) in (Tensor, nn.Parameter):
        raise TypeError(f"{name}: expected numbers, got {describe(value)} on the meta device, which has none")
    if dims and value.dim() not in dims:
        expected = " or ".join(SHAPES[number] for number in dims)
        raise ValueError(f"{name}: expected {expected}, got {describe(value)}")
    if value.numel() == 0:
        raise ValueError(f"{name}: expected at least one entry, got {describe(value)}")


def check_mapping(name: str, value: Any) -> None:
    """Raise TypeError unless this is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a mapping, got {describe(value)}")


def check_biases(biases: object) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Biases of q, k and v.

    Raises: TypeError, ValueError for anything but three tensors or Nones.
    """
    if biases is None:
        return None, None, None
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise TypeError("biases: expected a tuple of three, of q, k and v, each a tensor or None")
    for role, bias in zip("qkv", biases, strict=True):
        if bias is not None:
            check_tensor(f"biases, of {role}", bias, (1, 2) if role == "q" else (1,))
    b_q, b_k, b_v = biases
    return b_q, b_k, b_v

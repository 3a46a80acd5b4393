"""What a measurement is of: which model, which input, which version of wellcond."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.sharding import unwrap
from wellcond.version import __version__


def run_facts(model: nn.Module, batch: Any) -> dict[str, str]:
    """Model, input and version, in words."""
    return {"model": describe_model(model), "input": describe_input(batch), "version": __version__}


def describe_model(model: nn.Module) -> str:
    """Its class, the name under which its library knows it, and its size; parameters that are tied count once.

    Example:
        >>> describe_model(nn.Linear(3, 2))
        'Linear, 8 parameters'
    """
    plain = unwrap(model)
    name = _library_name(plain)
    size = sum(parameter.numel() for parameter in plain.parameters())
    return f"{type(plain).__name__}{f' ({name})' if name else ''}, {size:,} parameters"


def _library_name(model: nn.Module) -> str:
    cfg: Any = getattr(model, "pretrained_cfg", None)  # timm
    config: Any = getattr(model, "config", None)  # transformers
    named = cfg.get("architecture") if isinstance(cfg, Mapping) else None
    for found in (named, getattr(config, "_name_or_path", None), getattr(config, "model_type", None)):
        if isinstance(found, str) and found:
            return found
    return ""


def describe_input(batch: Any) -> str:
    """Types and shapes of its tensors, and a digest by which the same input is recognised.

    Example:
        >>> describe_input({"input_ids": torch.arange(6).view(1, 6)})
        'input_ids int64 (1, 6), sha256 f4609d52'
    """
    if batch is None:
        return "not given"
    found = list(named_tensors(batch))
    if not found:
        return type(batch).__name__
    shapes = [f"{name} {_kind(tensor)}".strip() for name, tensor in found]
    known = all(has_bytes(tensor) for _, tensor in found)
    return ", ".join(shapes) + (f", sha256 {digest([tensor for _, tensor in found])}" if known else "")


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a batch, or of a state dict, under their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from named_tensors(inner, name)
    elif hasattr(value, "args") and hasattr(value, "kwargs"):
        yield from named_tensors((value.args, value.kwargs), name)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def has_bytes(tensor: Tensor) -> bool:
    """Whether there is an array behind it: not of a sharded, quantised or meta tensor."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized


def digest(tensors: list[Tensor]) -> str:
    """Eight hexadecimal digits by which the same types, shapes and bytes are recognised."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(_kind(tensor).encode())
        flat = tensor.detach().cpu().reshape(-1)
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
        found.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:8]

"""Running a model on a batch in evaluation mode, everything as before afterwards: what ran, in words; copies of it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention.sharding import full_tensor, unwrap
from wellcond.private import compiler_is_loaded
from wellcond.version import __version__

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
FSDP_STATE = "__composable_api_state_key"
SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a module is called with, where that is positional and by name at once."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def run(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a tensor, a mapping of keyword arguments, a tuple of arguments, or a function of it."""
    if callable(batch):
        return batch(model)
    if isinstance(batch, Arguments):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@contextlib.contextmanager
def eval_scope(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, plain kernels; everything as before afterwards."""
    with torch.no_grad(), forked_rng(model), plain_kernels(), not_compiled(), evaluation_mode(model):
        yield


@contextlib.contextmanager
def forked_rng(model: nn.Module) -> Iterator[None]:
    """The random states of the CPU and of every device of a model are afterwards as before."""
    devices: dict[str, set[int]] = {}
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            devices.setdefault(parameter.device.type, set()).add(parameter.device.index or 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, numbers in devices.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(numbers), device_type=kind))
        yield


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention as products and a softmax, which can be recorded and differentiated twice."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def not_compiled() -> contextlib.AbstractContextManager[Any]:
    """Compiled code calls no hooks, and flex_attention compiles itself: run the original.

    Where torch's compiler was never loaded, nothing can be compiled; loading it takes seconds.
    """
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else contextlib.nullcontext()


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then each module's own flag again."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            # Some classes act on the change: LeViT forgets the position biases that it kept for evaluation.
            if type(module).train is not nn.Module.train:
                module.train(flag)
        for module, flag in flags:
            module.training = flag


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    for part in parts:
        yield from tensors_in(part)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists and mappings."""
    return next(tensors_in(value), None)


def copy_argument(value: Any, memo: dict[int, Any], cast: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """A copy of a call's arguments that later writes cannot reach; tensors that are one object stay one object.

    A cache is left out (None): it is filled by the call itself, so that a second call would see each key twice.
    """
    if isinstance(value, Tensor):
        if id(value) not in memo:
            # The original is kept as well, or its id might be given to another tensor.
            memo[id(value)] = (cast(value.detach()), value)
        return memo[id(value)][0]
    if isinstance(value, SIMPLE) or isinstance(value, nn.Module):
        return value
    if isinstance(value, tuple):
        parts = [copy_argument(part, memo, cast) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [copy_argument(part, memo, cast) for part in value]
    if isinstance(value, dict):
        copied = {} if type(value) is dict else copy.copy(value)
        copied.update({name: copy_argument(part, memo, cast) for name, part in value.items()})
        return copied
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):  # Hugging Face's cache of keys and values
        return None
    try:
        return copy.deepcopy(value)
    except Exception:  # an arbitrary object may refuse to be copied in any way; it is then handed on as it is
        return value


# What ran, in words


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


# Copies of modules


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before FSDP2 put its own in front."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return type(module)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, fsdp.FSDPModule))


def gathered(tensor: Tensor) -> Tensor:
    """The values of a tensor on the CPU; every process that holds a part must call this."""
    return full_tensor(tensor.detach()).cpu().clone()


def plain_copy(
    module: nn.Module,
    values: Callable[[Tensor], Tensor] = gathered,
    class_of: Callable[[nn.Module], type[nn.Module]] = plain_class,
) -> nn.Module:
    """Copy a module to the CPU without its hooks, with `values` of its parameters and buffers.

    `copy.deepcopy` does not work on what FSDP2 manages, and would copy hooks that talk to other processes.
    """
    copies = {part: object.__new__(class_of(part)) for part in module.modules()}
    memo: dict[int, Any] = {id(part): made for part, made in copies.items()}
    for part in copies:
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(values(parameter), parameter.requires_grad)
        for buffer in part._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = values(buffer)
    for part, made in copies.items():
        for name, content in part.__dict__.items():
            if not name.startswith(FSDP_STATE):
                made.__dict__[name] = OrderedDict() if name in HOOKS else copy.deepcopy(content, memo)
    return copies[module]

"""Private names of torch and other libraries that wellcond relies on, in one place, with what they were tried on.

Every function says what it needs, why no public name serves, and with which versions it was tried. Code elsewhere in
wellcond uses public names only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Function = TypeVar("Function", bound=Callable[..., Any])


@contextlib.contextmanager
def without_callbacks(trainer: Any, *kinds: type) -> Iterator[list[Any]]:
    """Leave callbacks of some classes out of what a Trainer of transformers calls; yields those left out.

    Needs `Trainer.callback_handler.callbacks`: a log cannot be kept from one callback in public, and `pop_callback`
    changes the list while the handler, which calls us, goes through it. Tried with transformers 5.23.
    """
    handler = trainer.callback_handler
    everyone = handler.callbacks
    left_out = [one for one in everyone if isinstance(one, kinds)]
    handler.callbacks = [one for one in everyone if not isinstance(one, kinds)]
    try:
        yield left_out
    finally:
        handler.callbacks = everyone


@contextlib.contextmanager
def without_mixed_precision(model: nn.Module) -> Iterator[None]:
    """Take off the forward pass that Accelerate puts around a model for mixed precision.

    Needs `_original_forward`, under which Accelerate keeps the model's own: its public `unwrap_model` takes the wrapper
    off for good. Tried with accelerate 1.15.
    """
    wrapped, original = vars(model).get("forward"), vars(model).get("_original_forward")
    if wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


def local_sizes_and_offsets(shape: tuple[int, ...], mesh: Any, placements: Any) -> tuple[Any, Any]:
    """Sizes of this rank's shard of a distributed tensor, and where it begins on each axis.

    Needs `torch.distributed.tensor._utils.compute_local_shape_and_global_offset`, which torch's own distributed
    checkpoints ask: right for any mesh, also of FSDP over tensor parallelism. DTensor has no public method that tells
    offsets. Tried with torch 2.15.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(sizes), tuple(offsets)


def constant_when_compiled(function: Function) -> Function:
    """Decorate a function whose result torch.compile may take for a constant, instead of tracing it.

    Sets the attribute that `torch.compiler.assume_constant_result` sets. That one is public, but importing
    torch._dynamo for it makes `import wellcond` take seconds more. Tried with torch 2.15.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def refresh_ddp_buffers(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Let DistributedDataParallel list the buffers of its module again.

    Needs `DistributedDataParallel._assign_modules_buffers`; the list is made once, when a model is wrapped, and no
    public method makes it again. Tried with torch 2.15.
    """
    ddp._assign_modules_buffers()


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Whether a tensor holds its numbers in other tensors, as those of torchao do.

    Needs `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, the only name for it. Tried with torch 2.15.
    """
    return is_traceable_wrapper_subclass(tensor)

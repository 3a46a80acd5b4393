"""Private names of torch and other libraries that wellcond relies on, in one place, with what they were tried on.

Every function says what it needs, why no public name serves, and with which versions it was tried. Code elsewhere in
wellcond uses public names only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

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


def keep_from_ddp_(model: nn.Module, buffers: Collection[str]) -> None:
    """Let DistributedDataParallel, when it wraps a model, leave some buffers as every rank has them.

    Needs `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`; in public one can only switch off the
    broadcast of all buffers, those of batch norms too. Tried with torch 2.15.
    """
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(buffers))


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Whether a tensor holds its numbers in other tensors, as those of torchao do.

    Needs `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, the only name for it. Tried with torch 2.15.
    """
    return is_traceable_wrapper_subclass(tensor)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass.

    Needs `torch._C._current_graph_task_id`, which is -1 outside. No public name tells; a module that is run again by
    activation checkpointing has to know. Tried on torch 2.15.
    """
    return torch._C._current_graph_task_id() != -1


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are being computed.

    Needs `torch.autograd.forward_ad._current_level`; the public API enters a level but does not say whether one is
    entered. Tried on torch 2.15.
    """
    return forward_ad._current_level >= 0


def is_functorch_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper of torch.func (grad, vmap, jvp).

    Needs `torch._C._functorch.is_functorch_wrapped_tensor`; torch.func has no public test. Tried on torch 2.15.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_symbolic_tracing() -> bool:
    """Whether torch.fx is tracing a module symbolically.

    Needs `torch.fx._symbolic_trace.is_fx_symbolic_tracing`; torch.fx exports no such question. Tried on torch 2.15.
    """
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing

    return is_fx_symbolic_tracing()


def is_sharded_by_fsdp(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 holds the parameter `name` of a module in shards just now.

    Then no forward pass can be reading it, since FSDP2 puts the full weight in its place for that: it is FSDP2's own
    book-keeping, which wants the parameter itself. Needs `_module_state_mapping` and the parameter groups of the state;
    FSDP2 offers no public way from a parameter to its state. Tried on torch 2.15.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for held in list(_module_state_mapping.values()):
        state = held() if callable(held) else held
        for group in getattr(state, "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                info = parameter._module_info
                places = [(info.module, info.param_name)]
                places += zip(info.shared_modules, info.shared_param_names, strict=True)
                if any(owner is module and own == name for owner, own in places):
                    return parameter.sharded_state.name == "SHARDED"
    return False


_WRAPPED: set[type] = set()


def wrap_loading_of_trainer(around: Callable[[str, nn.Module], AbstractContextManager[None]]) -> None:
    """Let the Trainer of transformers, if it is imported, load every checkpoint within `around(folder, model)`.

    Needs `Trainer._load_from_checkpoint` and `Trainer._load_best_model`; callbacks are not told the folder before it is
    read. Tried on transformers 5.23.
    """
    trainers = sys.modules.get("transformers.trainer")
    if trainers is None or trainers.Trainer in _WRAPPED:
        return
    load, load_best = trainers.Trainer._load_from_checkpoint, trainers.Trainer._load_best_model

    @functools.wraps(load)
    def load_from_checkpoint(trainer: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> Any:
        with around(resume_from_checkpoint, trainer.model if model is None else model):
            return load(trainer, resume_from_checkpoint, model)

    @functools.wraps(load_best)
    def load_best_model(trainer: Any) -> Any:
        with around(trainer.state.best_model_checkpoint, trainer.model):
            return load_best(trainer)

    trainers.Trainer._load_from_checkpoint = load_from_checkpoint
    trainers.Trainer._load_best_model = load_best_model
    _WRAPPED.add(trainers.Trainer)


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode that does not load torch's compiler; once it is loaded, it does not trace the mode's code.

    Needs `TorchDispatchMode._should_skip_dynamo`: by default torch loads its compiler at the first operator that a mode
    sees, which takes three seconds in a process that compiles nothing. Tried with torch 2.15.
    """

    skips_compiler = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        cls = type(self)
        if compiler_is_loaded() and not cls.skips_compiler:
            cls.skips_compiler = True
            cls.__torch_dispatch__ = torch.compiler.disable(cls.__torch_dispatch__)  # type: ignore[method-assign]
        return super().__enter__()


def compiler_is_loaded() -> bool:
    """Whether something may be compiled in this process: torch's compiler is there, or flex_attention, which calls it.

    Needs the name of torch._dynamo: `torch.compiler` loads it to answer. Tried with torch 2.15.
    """
    return "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules


def higher_order_name(operator: Any) -> str | None:
    """Name of a higher-order operator (flex_attention); None for an ordinary one.

    Needs the class torch._ops.HigherOrderOperator: nothing public tells what a dispatch mode was called with. Tried
    with torch 2.15.
    """
    return operator.name() if isinstance(operator, HigherOrderOperator) else None


def operator_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an operator was called with, by the names of its schema, defaults included.

    Needs `OpOverload._schema`, and `__call__` of the class of a higher-order operator: no public function gives the
    names of an operator's arguments. Tried with torch 2.15.
    """
    if isinstance(operator, HigherOrderOperator):
        return dict(inspect.signature(type(operator).__call__).bind(operator, *args, **kwargs).arguments)
    declared = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given = {argument.name: value for argument, value in zip(declared, args, strict=False)}
    return {**defaults, **given, **kwargs}


def plain_tensor(tensor: Tensor) -> Tensor | None:
    """The tensor of this process behind what torch.distributed wraps around it; None behind another subclass.

    A subclass without memory of its own must not be computed on where dispatch is off: torch crashes. What an
    asynchronous collective returns (`AsyncCollectiveTensor`, after a row-wise layer of tensor parallelism) is waited
    for, as its next reader does. Needs the method `trigger_wait` of that private class. Tried with torch 2.15.
    """
    if hasattr(tensor, "placements") and hasattr(tensor, "to_local"):
        if any(placement.is_partial() for placement in tensor.placements):
            return None
        tensor = tensor.to_local()
    if hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    return tensor if type(tensor) in (Tensor, nn.Parameter) else None


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Compute on plain tensors beside a forward pass: without gradients and autocast, seen by no mode of torch.

    A mode that selective activation checkpointing puts around a forward pass counts operators, and must not count
    ours. Needs `torch._C._DisableTorchDispatch` and `torch._C.DisableTorchFunction`, the guards under torch's own
    modes. Tried with torch 2.15.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        for device in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield


def return_names(operator: Any) -> tuple[str, ...]:
    """Names of what an operator returns, empty where its schema gives none.

    Needs `OpOverload._schema`: as `operator_arguments`. Tried with torch 2.15.
    """
    return tuple(value.name for value in operator._schema.returns)


_PRODUCTS = {
    "BmmBackward0": ("_saved_self", "_saved_mat2", 0),
    "MmBackward0": ("_saved_self", "_saved_mat2", 0),
    "BaddbmmBackward0": ("_saved_batch1", "_saved_batch2", 1),
}


def product_operands(node: Node) -> tuple[Tensor, Tensor, int] | None:
    """Both operands of a node of a matrix product, and the number of its first input; None for another node.

    Needs the names of autograd nodes and their `_saved_*` tensors: `torch.autograd.graph` gives nodes and edges, but
    not what they multiply. Where a name changes, an attention is differentiated through its module instead. Tried with
    torch 2.15.
    """
    known = _PRODUCTS.get(node.name().split("::")[-1])
    return None if known is None else (getattr(node, known[0]), getattr(node, known[1]), known[2])


def softmax_result(node: Node) -> Tensor | None:
    """What the node of a softmax put out; None for another node.

    Needs the name of the node and its `_saved_result`, as `product_operands` does. Tried with torch 2.15.
    """
    if "SoftmaxBackward" not in node.name() or "Log" in node.name():
        return None
    return node._saved_result  # type: ignore[attr-defined]


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that a view is a view of; None if it is none.

    Needs `Tensor._base`: that two tensors share memory can be asked in public, which one the other is a view of cannot.
    Tried with torch 2.15.
    """
    return tensor._base

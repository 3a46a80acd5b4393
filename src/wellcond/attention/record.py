"""One watched forward pass: what each attention was called with, what its projections read, what it multiplied.

The pass is the model's own, in its dtype and on its device. Nothing of the model is left changed: training flags,
hooks, random state, gradients and global switches of torch are what they were.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention.products import ProductRecorder
from wellcond.attention.site import AttentionSite

ROLES = ("query", "key", "value")
JOINED = "it is a second stream of an attention layer, of which the first is watched"
TORCH_OPERATORS = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a module is called with, where that is positional and by name at once."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class SiteCall:
    """The first call of an attention module in a forward pass.

    `inputs` are what the projection modules read, by role; a projection whose weight is used without calling its module
    has no entry, nor has one that is called several times. `heads` is what W_O read, where W_O is a module that is
    called inside this attention.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    heads: Tensor | None = None
    output: Any = None
    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    softmaxes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    """Operators outside torch's own set, and higher-order ones (flex_attention): what happens inside is not seen."""
    repeated: set[str] = field(default_factory=set)
    done: bool = False


class SiteRecorder(ProductRecorder):
    """Records products and softmaxes, but only while an attention is running: other operations cost nothing more."""

    call: SiteCall | None = None
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation; of one that cannot be looked into, its name."""
        higher_order = isinstance(func, HigherOrderOperator)
        if self.call is not None and (higher_order or func.namespace not in TORCH_OPERATORS):
            self.call.kernels.append(func.name() if higher_order else str(func.overloadpacket))
        if higher_order:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self, call: SiteCall) -> None:
        """Record into this call from now on."""
        self.call, self.products, self.softmaxes = call, call.products, call.softmaxes
        self.__enter__()

    def end(self) -> None:
        """Stop recording, if it is still active."""
        if self.call is not None:
            self.__exit__(None, None, None)
            self.call, self.products, self.softmaxes = None, [], []


def watch_sites(
    model: nn.Module, batch: Any, sites: Sequence[AttentionSite], finish: Callable[[AttentionSite, SiteCall], None]
) -> list[int]:
    """Run the model once; `finish(site, call)` is called as soon as the first call of a site has returned.

    Returns: how often each site was called.
    """
    recorder, counts = SiteRecorder(), [0] * len(sites)
    with contextlib.ExitStack() as stack:
        for index, site in enumerate(sites):
            for handle in _watch(site, index, counts, recorder, finish):
                stack.callback(handle.remove)
        with undisturbed(model):
            stack.callback(recorder.end)  # of an attention that raised
            run(model, batch)
    return counts


def run(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a tensor, a mapping of keyword arguments, a tuple of arguments, or a function of it."""
    if callable(batch):
        return batch(model)
    if isinstance(batch, Arguments):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _watch(
    site: AttentionSite,
    index: int,
    counts: list[int],
    recorder: SiteRecorder,
    finish: Callable[[AttentionSite, SiteCall], None],
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    current: list[SiteCall] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        counts[index] += 1
        if counts[index] == 1 and recorder.call is None:
            memo: dict[int, Any] = {}
            current.append(SiteCall(copy_argument(args, memo), copy_argument(kwargs, memo)))
            recorder.begin(current[0])

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if current and not current[0].done:
            recorder.end()
            current[0].done = True
            current[0].output = copy_argument(first_tensor(output), {})
            finish(site, current[0])
            current[0].products.clear()
            current[0].softmaxes.clear()

    yield site.module.register_forward_pre_hook(before, with_kwargs=True)
    yield site.module.register_forward_hook(after, with_kwargs=True)

    def reads(role: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            read, call = first_tensor((*args, *kwargs.values())), recorder.call
            if read is None or call is None or not current or call is not current[0]:
                return
            if role == "output":
                call.heads = read.detach().clone() if call.heads is None else call.heads
            elif role in call.inputs or role in call.repeated:
                call.repeated.add(role)
                call.inputs.pop(role, None)
            else:
                call.inputs[role] = read.detach().clone()

        return keep

    for role in ROLES:
        owner = site.by_role(role).owner
        if owner is not site.module:
            yield owner.register_forward_pre_hook(reads(role), with_kwargs=True)
    if site.o is not None and site.o.owner is not site.module:
        yield site.o.owner.register_forward_pre_hook(reads("output"), with_kwargs=True)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for part in value if (found := first_tensor(part)) is not None), None)
    return None


def is_cache(value: Any) -> bool:
    """Whether this is a cache of keys and values, as Hugging Face hands to its layers."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


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
    if is_cache(value):
        return None
    try:
        return copy.deepcopy(value)
    except Exception:  # an arbitrary object may refuse to be copied in any way; it is then handed on as it is
        return value


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, plain kernels; everything as before afterwards."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        plain_kernels(),
        _not_compiled(),
        evaluation_mode(model),
    ):
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


def _not_compiled() -> contextlib.AbstractContextManager[Any]:
    """Compiled code calls no hooks, and flex_attention compiles itself: run the original.

    Where torch's compiler was never loaded, nothing can be compiled; loading it takes seconds.
    """
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


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

"""A float64 copy of an attention module that can be run again with other weights, up to the input of W_O."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from wellcond.attention.evaluation import HOOKS, copy_argument, first_tensor, plain_kernels
from wellcond.attention.layout import head_rows
from wellcond.attention.record import SiteRecord
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot, corrections_of, effective_weight, remove_conditioning
from wellcond.errors import CopyError, UnsupportedLayoutError

SHORT = (torch.float32, torch.float16, torch.bfloat16)
TO_SHORT = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class InDouble(TorchFunctionMode):
    """Casts to float32 and below become casts to float64.

    Many forward passes compute their softmax in float32, whatever the dtype of the model. Such rounding is no part of
    the function that is differentiated, and would hide all of a Jacobian below 1e-7 of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation with float64 in place of shorter dtypes."""
        if func in TO_SHORT:
            return args[0].double()
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*(_widen(value) for value in args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in SHORT else value


def as_double(tensor: Tensor) -> Tensor:
    """A copy in float64 or complex128 on the CPU; integers and booleans stay what they are."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


@dataclass(frozen=True)
class BatchAxis:
    """Where the samples (or windows) of a call are: an axis of its first argument, and how many there are."""

    axis: int
    count: int

    def rows(self, samples: Sequence[int], total: int) -> Tensor | None:
        """Rows of these samples among all `total` rows that the call puts out; None if they cannot be told apart.

        They are in the order in which a call on these samples alone has them.
        """
        if total % self.count:
            return None
        every, chosen = torch.arange(total), list(samples)
        return (
            every.view(self.count, -1)[chosen] if self.axis == 0 else every.view(-1, self.count)[:, chosen]
        ).flatten()


def batch_axis(site: AttentionSite, call: SiteRecord, num_tokens: Collection[int]) -> BatchAxis:
    """The batch of a call: (B, N, D) or maps (B, D, h, w), or (N, B, D).

    A module may say so itself (`batch_first`), else the numbers of query and key tokens tell, as far as they are known.
    What has no batch, (N, D), is one sample.
    """
    first = first_tensor((*call.args, *call.kwargs.values()))
    if first is None or first.dim() < 3:
        return BatchAxis(0, 1)
    said = getattr(site.module, "batch_first", None)
    transposed = first.shape[0] in num_tokens and first.shape[1] not in num_tokens
    if isinstance(said, bool):
        transposed = not said
    axis = int(transposed and first.dim() == 3)
    return BatchAxis(axis, first.shape[axis])


class _Reached(Exception):  # noqa: N818 - no error: it carries what W_O was about to read out of the forward pass
    def __init__(self, heads: Tensor) -> None:
        self.heads = heads


class Replica:
    """The module of one captured call, in float64, evaluation mode and without hooks.

    What is read is the input of W_O. Where W_O stands outside the module, or there is none, the module returns the
    heads itself. Where W_O is used without calling its module (nn.MultiheadAttention), the copy has the identity in its
    place.
    """

    def __init__(self, site: AttentionSite, call: SiteRecord) -> None:
        """Copy the module and the arguments of the call.

        Raises:
            UnsupportedLayoutError: the place of the projections or of the heads in this module is not known.
            CopyError: the module cannot be copied.
        """
        self.site = site
        self.module = _double_copy(site.module, site.name)
        memo: dict[int, Any] = {}
        self.args = copy_argument(call.args, memo, as_double)
        self.kwargs = copy_argument(call.kwargs, memo, as_double)
        self.names = {id(module): name for name, module in site.module.named_modules()}
        self.reads_o = call.heads is not None
        if self.reads_o:
            assert site.o is not None
            self._counterpart(site.o).register_forward_pre_hook(_stop)
        elif self.has_own_o:
            self._forget_o()

    def _counterpart(self, slot: Slot) -> nn.Module:
        name = self.names.get(id(slot.owner))
        if name is None:
            raise UnsupportedLayoutError(
                self.site.name,
                f"its {type(slot.owner).__name__} is no part of the module, which cannot be run with other weights.",
                class_name=type(self.site.module).__name__,
            )
        return self.module.get_submodule(name)

    @property
    def has_own_o(self) -> bool:
        """Whether W_O is stored in the module."""
        return self.site.o is not None and id(self.site.o.owner) in self.names

    def _forget_o(self) -> None:
        """W_O = I, b_O = 0."""
        slot = self.site.o
        assert slot is not None
        if slot.in_features != slot.out_features or slot.rows.numel() != slot.in_features:
            raise UnsupportedLayoutError(
                self.site.name,
                "its output projection is used without being called, and is not square: its input cannot be read.",
                class_name=type(self.site.module).__name__,
            )
        owner = self._counterpart(slot)
        with torch.no_grad():
            stored = owner.get_parameter(slot.weight_name)
            stored.copy_(slot.with_matrix(stored, torch.eye(slot.in_features)))
            if slot.bias_name is not None:
                getattr(owner, slot.bias_name).zero_()

    def weight_key(self, slot: Slot) -> str:
        """Name of a slot's weight in the state of the copy."""
        self._counterpart(slot)
        name = self.names[id(slot.owner)]
        return f"{name}.{slot.weight_name}" if name else slot.weight_name

    def stored(self, slot: Slot) -> Tensor:
        """The copied parameter that holds this slot, corrections of `condition_` included."""
        return self._counterpart(slot).get_parameter(slot.weight_name)

    def weight(self, slot: Slot) -> Tensor:
        """Its numbers."""
        return self.stored(slot).detach()

    def heads(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Concatenated heads (tokens, width) with these weights in place of the stored ones."""
        memo: dict[int, Any] = {}  # the forward pass may write into its arguments
        args, kwargs = copy_argument(self.args, memo), copy_argument(self.kwargs, memo)
        try:
            with plain_kernels(), InDouble():
                out = first_tensor(functional_call(self.module, dict(weights), args, kwargs))
        except _Reached as reached:
            return self.as_rows(reached.heads)
        assert out is not None
        return self.as_rows(out)

    def only(self, samples: Sequence[int], batch: BatchAxis) -> Replica:
        """The same copy, run on these samples by themselves."""
        memo: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            batched = tensor.dim() > batch.axis and tensor.shape[batch.axis] == batch.count
            return tensor.index_select(batch.axis, torch.tensor(samples)) if batched else tensor.clone()

        alone = copy.copy(self)
        alone.args, alone.kwargs = copy_argument(self.args, memo, keep), copy_argument(self.kwargs, memo, keep)
        return alone

    def as_rows(self, heads: Tensor) -> Tensor:
        """What W_O reads, or the module returns, as (tokens, width)."""
        # What works on maps with 1x1 convolutions hands on maps (B, width, h, w).
        slot = self.site.o or self.site.by_role("query")
        if isinstance(slot.owner, (nn.Conv1d, nn.Conv2d)) and heads.dim() > 2:
            heads = heads.movedim(1, -1)
        return heads.reshape(-1, heads.shape[-1])

    @property
    def width(self) -> int:
        """All heads side by side."""
        return self.columns.numel()

    @property
    def columns(self) -> Tensor:
        """Columns of each head (H, dv)."""
        if self.site.o is not None:
            return self.site.o.rows
        return head_rows(self.site.num_heads, self.site.by_role("value").head_dim)


def _stop(module: nn.Module, args: Any) -> None:
    raise _Reached(args[0])


def _double_copy(module: nn.Module, name: str) -> nn.Module:
    """A copy in float64 on the CPU, without hooks, which may hold what cannot be copied.

    Raises: CopyError if something else in it cannot be copied.
    """
    hooks = [part.__dict__[kind] for part in module.modules() for kind in HOOKS if kind in part.__dict__]
    memo: dict[int, Any] = {id(held): OrderedDict() for held in hooks}
    try:
        replica = copy.deepcopy(module, memo)
    except Exception as error:  # an arbitrary attribute may raise anything
        raise CopyError(
            f"{name or type(module).__name__}: its module cannot be copied ({type(error).__name__}: {error}), "
            "so its derivatives cannot be computed"
        ) from error
    for part in replica.modules():
        _fold(part)
    replica = replica.to("cpu").double()
    replica.eval()
    return replica.requires_grad_(False)


def _fold(module: nn.Module) -> None:
    """Store what a conditioned module reads as its weight, and make it a plain module again.

    The correction has no gradient, so that derivatives with respect to the stored and to the effective weight are the
    same.
    """
    effective = {name: effective_weight(module, name).detach().clone() for name in corrections_of(module)}
    remove_conditioning(module)
    for name, value in effective.items():
        module.register_parameter(name, nn.Parameter(value))

r"""The Jacobian of any attention, plain or not, through a float64 copy of its own module.

    f(W_q, W_k, W_v) = what W_O reads from the heads of one group, (g, tokens, dv)

with every other weight of the module fixed. J^T u is reverse-mode differentiation, as in training, and J v the same
twice: J v = d<J^T u, v>/du.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from wellcond.attention.evaluation import HOOKS, copy_argument, first_tensor, plain_kernels
from wellcond.attention.layout import head_rows
from wellcond.attention.record import ROLES
from wellcond.attention.slot import Slot, corrections_of, effective_weight, remove_conditioning
from wellcond.errors import CopyError, ReplayError, UnsupportedLayoutError, WeightError
from wellcond.jacobian.capture import CapturedAttention, is_map, tolerance
from wellcond.jacobian.operator import GramOperator, JacobianOperator, RankBound, Side
from wellcond.linalg.spectrum import numerical_rank

LARGEST_BATCH = 32
BATCH_BYTES = 2**27
SHORT = (torch.float32, torch.float16, torch.bfloat16)
TO_SHORT = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class InDouble(TorchFunctionMode):
    """Casts to float32 and below become casts to float64.

    Many forward passes compute their softmax in float32, whatever the dtype of the model. Such rounding is no part of
    the function that is differentiated, and would hide all of a Jacobian below 1e-7 of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def take(self, tensor: Tensor, samples: Sequence[int]) -> Tensor:
        """A copy of a tensor of the call that has these samples alone, if it has samples."""
        if tensor.dim() <= self.axis or tensor.shape[self.axis] != self.count:
            return tensor.clone()
        return tensor.index_select(self.axis, torch.tensor(samples, device=tensor.device))

    def rows(self, samples: Sequence[int], total: int) -> Tensor | None:
        """Rows of these samples among all `total` rows that the call puts out; None if they cannot be distinguished.

        They are in the order in which a call on these samples alone has them.
        """
        if total % self.count:
            return None
        every, chosen = torch.arange(total), list(samples)
        return (
            every.view(self.count, -1)[chosen] if self.axis == 0 else every.view(-1, self.count)[:, chosen]
        ).flatten()


def batch_axis(captured: CapturedAttention) -> BatchAxis:
    """The batch of a captured call, plain or not: (B, N, D) or maps (B, D, h, w), or (N, B, D).

    A module may say so itself (`batch_first`), else the numbers of query and key tokens tell, as far as they are known.
    What has no batch, (N, D), is one sample.
    """
    call, site = captured.call, captured.site
    assert call is not None
    num_tokens = [tokens.shape[1] for tokens in (captured.x, captured.memory) if tokens is not None]
    first = first_tensor((*call.args, *call.kwargs.values()))
    if first is None or first.dim() < 3:
        return BatchAxis(0, 1)
    batch_first = getattr(site.module, "batch_first", None)
    transposed = first.shape[0] in num_tokens and first.shape[1] not in num_tokens
    if isinstance(batch_first, bool):
        transposed = not batch_first
    axis = int(transposed and first.dim() == 3)
    return BatchAxis(axis, first.shape[axis])


class _Reached(Exception):  # noqa: N818 - no error: it carries what W_O was about to read out of the forward pass
    def __init__(self, heads: Tensor) -> None:
        self.heads = heads


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


def _grad(output: Tensor, inputs: tuple[Tensor, ...], weight: Tensor | None, **options: bool) -> tuple[Tensor, ...]:
    """Gradients; zero where no path leads from an input to the output (the queries of a single token)."""
    if not output.requires_grad:
        count = weight.shape[:1] if options.get("is_grads_batched") and weight is not None else ()
        return tuple(w.new_zeros(*count, *w.shape) for w in inputs)
    return torch.autograd.grad(
        output, inputs, weight, retain_graph=True, allow_unused=True, materialize_grads=True, **options
    )


def _close(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and bool((mine - theirs).norm() <= 1e-9 * theirs.norm())


class ModuleJacobian(JacobianOperator):
    """The query heads of one key/value head as a function of their weights, whatever the attention does with them.

    The module of the captured call is run in float64, evaluation mode and without hooks. What is read is the input of
    W_O; where that stands outside the module, or there is none, the module returns the heads itself, and where it is
    used without being called (nn.MultiheadAttention), the copy has the identity in its place.

    Rows of the Jacobian are ordered (query head, token, o), over all tokens of the captured call; columns Q, K, V, each
    flattened as the D x d matrix row by row (Q per query head), as in `dense_jacobian`. Under talking heads the weights
    act on the other heads too; the output is that of this group alone. Where there is no W_O and the module mixes the
    heads before it returns, the output is all that it returns, (1, tokens, width). Everything is float64 on the CPU.

    Example:
        >>> from torch import nn
        >>> from wellcond.jacobian.capture import capture_attention
        >>> x = torch.randn(1, 5, 8)
        >>> [captured] = capture_attention(nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x))
        >>> head = ModuleJacobian(captured, 0)
        >>> head.shape
        (20, 96)
    """

    def __init__(
        self,
        captured: CapturedAttention,
        kv_head: int = 0,
        *,
        samples: Sequence[int] | None = None,
        alone: bool = False,
        query_head: int | None = None,
    ) -> None:
        """Copy the module of a captured call, and check that the copy gives what the model gave.

        `samples` are those of the call (`batch_axis`) whose outputs count; all by default. Where the module gives the
        same for them by themselves, or if `alone`, it is run on them only: attention that depends on the rest of the
        batch then gives other outputs than in it. `query_head` takes one of the query heads by itself.

        Raises:
            ValueError: the attention was not called.
            IndexError: no such head or sample.
            WeightError: the weights changed since the capture.
            UnsupportedLayoutError: where the heads leave the module is not known.
            CopyError: the module cannot be copied.
            ReplayError: the copy gives something else, for instance because it keeps state between calls.
        """
        call, site = captured.call, captured.site
        if call is None:
            raise ValueError(f"{site.name}: {captured.why_not_plain}")
        self.captured, self.site, self.kv_head = captured, site, kv_head
        self.group = captured.query_heads(kv_head, query_head)
        captured.check_weights()
        self._module = _double_copy(site.module, site.name)
        memo: dict[int, Any] = {}
        self._arguments = copy_argument((call.args, call.kwargs), memo, as_double)
        self._names = {id(module): name for name, module in site.module.named_modules()}
        self._reads_o = call.heads is not None
        self._has_own_o = site.o is not None and id(site.o.owner) in self._names
        if self._reads_o:
            assert site.o is not None
            self._counterpart(site.o).register_forward_pre_hook(_stop)
        elif self._has_own_o:
            self._forget_o()
        self._slots = [site.by_role(role) for role in ROLES]
        chosen = (self.group, slice(kv_head, kv_head + 1), slice(kv_head, kv_head + 1))
        self._rows = [slot.rows[some] for slot, some in zip(self._slots, chosen, strict=True)]
        each = zip(self._slots, self._rows, strict=True)
        heads = [slot.as_matrix(self.stored(slot))[rows].clone() for slot, rows in each]
        self._weights = self.w_q, self.w_k, self.w_v = heads[0], heads[1][0], heads[2][0]
        every_column = head_rows(site.num_heads, site.by_role("value").head_dim) if site.o is None else site.o.rows
        self._width = every_column.numel()
        self.columns = every_column[self.group]
        """Columns of each query head of the group in what W_O reads, (g, dv)."""
        self._batch = batch_axis(captured)
        self.samples = list(range(self._batch.count))
        self._kept: Tensor | None = None
        with torch.no_grad():
            everything = self._all_heads(*self._weights)
        self._check_replay(everything)
        if samples is not None:
            everything = self._choose(list(samples), everything, alone)
        self.num_rows = everything.shape[0]
        if not self._heads_are_apart(everything):
            self.columns = torch.arange(everything.shape[1])[None]

    # --- the copy of the module ---------------------------------------------------------------------------------------

    def _counterpart(self, slot: Slot) -> nn.Module:
        name = self._names.get(id(slot.owner))
        if name is None:
            raise self._unsupported(
                f"its {type(slot.owner).__name__} is no part of the module, which cannot be run with other weights."
            )
        return self._module.get_submodule(name)

    def _unsupported(self, reason: str) -> UnsupportedLayoutError:
        return UnsupportedLayoutError(self.site.name, reason, class_name=type(self.site.module).__name__)

    def _forget_o(self) -> None:
        """W_O = I, b_O = 0."""
        slot = self.site.o
        assert slot is not None
        if slot.in_features != slot.out_features or slot.rows.numel() != slot.in_features:
            raise self._unsupported(
                "its output projection is used without being called, and is not square: its input cannot be read."
            )
        owner = self._counterpart(slot)
        with torch.no_grad():
            stored = owner.get_parameter(slot.weight_name)
            stored.copy_(slot.with_matrix(stored, torch.eye(slot.in_features)))
            if slot.bias_name is not None:
                getattr(owner, slot.bias_name).zero_()

    def stored(self, slot: Slot) -> Tensor:
        """The copied weight that holds a slot, the very tensor that `run` multiplies; corrections are included."""
        return self._counterpart(slot).get_parameter(slot.weight_name)

    def run(self, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """What W_O reads, or the module returns, (tokens, width), with these weights in place of the stored ones."""
        args, kwargs = copy_argument(self._arguments, {})  # the forward pass may write into its arguments
        try:
            with plain_kernels(), InDouble():
                out = first_tensor(functional_call(self._module, dict(weights or {}), args, kwargs))
        except _Reached as reached:
            out = reached.heads
        assert out is not None
        everything = self._as_rows(out)
        return everything if self._kept is None else everything[self._kept]

    def _as_rows(self, heads: Tensor) -> Tensor:
        # What works on maps with 1x1 convolutions hands on maps (B, width, h, w).
        slot = self.site.o or self.site.by_role("query")
        heads = heads.movedim(1, -1) if is_map(slot, heads) else heads
        return heads.reshape(-1, heads.shape[-1])

    @torch.no_grad()
    def _choose(self, samples: list[int], everything: Tensor, alone: bool) -> Tensor:
        """Take these samples out of the call; returns what W_O reads of them."""
        outside = [sample for sample in samples if not 0 <= sample < self._batch.count]
        if outside:
            raise IndexError(f"{self.site.name}: expected a sample below {self._batch.count}, got {outside[0]}")
        if samples == self.samples:
            return everything
        self.samples, whole = samples, self._arguments
        # As many samples as tokens: the shape does not say which axis is which, but running it does.
        for batch in (self._batch, BatchAxis(1 - self._batch.axis, self._batch.count)):
            self._arguments = copy_argument(whole, {}, functools.partial(batch.take, samples=samples))
            try:
                found = self._all_heads(self.w_q, self.w_k, self.w_v)
            except Exception:  # an arbitrary forward pass: windows of one image may come with masks for all of them
                if alone:
                    raise
                continue
            rows = batch.rows(samples, len(everything))
            if alone or (rows is not None and _close(found, everything[rows])):
                self._batch = batch
                return found
        rows = self._batch.rows(samples, len(everything))
        self._arguments, self._kept = whole, rows
        return everything if rows is None else everything[rows]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs g * tokens * dv, of the call or of the samples chosen, and the entries of W_q, W_k and W_v."""
        return self.num_rows * self.columns.numel(), sum(w.numel() for w in self._weights)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T, or the smaller of J J^T and J^T J, from J itself."""
        n, p = self.shape
        size = n if side == "outputs" else min(n, p)
        return GramOperator(size, lambda u: self.matvec(self.rmatvec(u)), lambda: self._squared_on(size), scratch=n * p)

    def _squared_on(self, size: int) -> Tensor:
        jacobian = self.as_matrix()
        return jacobian @ jacobian.T if size == len(jacobian) else jacobian.T @ jacobian

    def rank_bound(self) -> RankBound:
        """What null directions any attention has leave: weights outside the span of what they multiply change nothing.

        It is an upper bound, which an attention need not reach.
        """
        ranks, missing = [], 0
        for role, slot, weight in zip(ROLES, self._slots, self._weights, strict=True):
            ranks.append(self._token_rank(role, slot))
            missing += (weight.numel() // slot.in_features) * (slot.in_features - ranks[-1])
        outputs, seen = self.shape[0], self.shape[1] - missing
        named = f"outside the span of the tokens: {missing}" if missing and seen < outputs else ""
        return RankBound(min(outputs, seen), named, ranks[1])

    def _token_rank(self, role: str, slot: Slot) -> int:
        call = self.captured.call
        assert call is not None
        tokens = call.inputs.get(role)
        if tokens is None:  # used by other means than one call of its module: nothing is known
            return slot.in_features
        tokens = self._batch.take(tokens, self.samples)
        tokens = tokens.movedim(1, -1) if is_map(slot, tokens) else tokens
        return numerical_rank(as_double(tokens).reshape(-1, slot.in_features))

    def _all_heads(self, *heads: Tensor) -> Tensor:
        """What W_O reads (tokens, width) with these rows in place of the stored ones."""
        weights: dict[str, Tensor] = {}
        for slot, rows, head in zip(self._slots, self._rows, heads, strict=True):
            key = ".".join(filter(None, (self._names[id(slot.owner)], slot.weight_name)))
            stored = weights.get(key, self.stored(slot))
            matrix = slot.as_matrix(stored).index_copy(0, rows.flatten(), head.reshape(rows.numel(), -1))
            weights[key] = slot.with_matrix(stored, matrix)
        return self.run(weights)

    def output(self, w_q: Tensor | None = None, w_k: Tensor | None = None, w_v: Tensor | None = None) -> Tensor:
        """Output (g, tokens, dv) with other weights (g, d, D), (d, E), (dv, E); the captured ones where None."""
        given = (w_q, w_k, w_v)
        heads = [own if new is None else new for own, new in zip(self._weights, given, strict=True)]
        return self._all_heads(*heads)[:, self.columns].transpose(0, 1)

    @torch.no_grad()
    def _heads_are_apart(self, everything: Tensor) -> bool:
        """Whether the columns of this group can be taken out of what the module returns, where there is no W_O to ask.

        Another value of W_v must change these columns and no others.
        """
        if self._reads_o or self._has_own_o:
            return True
        if everything.shape[1] != self._width:
            return False
        other = self._all_heads(self.w_q, self.w_k, self.w_v + 1.0)
        changed = (other - everything).norm(dim=0) > 1e-9 * other.norm()
        own = torch.zeros_like(changed).index_fill(0, self.columns.flatten(), True)
        return not bool((changed & ~own).any())

    def _check_replay(self, everything: Tensor) -> None:
        call, slot = self.captured.call, self.site.o
        assert call is not None
        found = everything
        if call.heads is not None:
            expected = call.heads
        else:
            expected = call.output
            if self._has_own_o:  # the copy has the identity in the place of W_O
                assert slot is not None
                found = everything @ as_double(slot.as_matrix(getattr(slot.owner, slot.weight_name))).T
                bias = slot.read_bias()
                found = found if bias is None else found + as_double(bias)
        expected = self._as_rows(as_double(expected))
        off = float((found - expected).norm()) / max(float(expected.norm()), torch.finfo(torch.float64).tiny)
        if not off <= 10 * tolerance(self.captured.dtype):
            raise ReplayError(
                f"{self.site.name}: run again in float64, its module gives something else than in the model (relative "
                f"difference {off:.1e}); it depends on more than its arguments and weights"
            )

    @cached_property
    def _recorded(self) -> Tensor:
        """The output with the graph that leads to `_leaves`."""
        with torch.enable_grad():
            return self.output(*self._leaves)

    @cached_property
    def _leaves(self) -> tuple[Tensor, ...]:
        return tuple(w.clone().requires_grad_(True) for w in self._weights)

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u."""
        return self.flatten(*_grad(self._recorded, self._leaves, u.view_as(self._recorded)))

    def matvec(self, v: Tensor) -> Tensor:
        """J v."""
        with torch.enable_grad():
            u = torch.zeros_like(self._recorded, requires_grad=True)
            pulled = _grad(self._recorded, self._leaves, u, create_graph=True)
            total = torch.stack([(p * t).sum() for p, t in zip(pulled, self.unflatten(v), strict=True)]).sum()
        return _grad(total, (u,), None)[0].flatten()

    def flatten(self, *weights: Tensor) -> Tensor:
        """Weights as one vector (p,), in the order of the columns."""
        return torch.cat([w.mT.reshape(-1) for w in weights])

    def unflatten(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `flatten`."""
        parts = vector.split([w.numel() for w in self._weights])
        return tuple(part.view(w.mT.shape).mT for part, w in zip(parts, self._weights, strict=True))

    @property
    def batch_size(self) -> int:
        """Products that are computed together: the attention maps of all of them fit in `BATCH_BYTES`."""
        rows = self.num_rows if self._kept is None else self._batch.count * self.num_rows // len(self.samples)
        maps = 8 * self.site.num_heads * rows * max(rows, self._width)
        return max(1, min(LARGEST_BATCH, BATCH_BYTES // maps))

    def as_matrix(self) -> Tensor:
        """J (n, p), by reverse passes for all outputs.

        Raises: WeightError if it has NaN or infinite entries.
        """
        outputs, together = self.shape[0], True
        jacobian = torch.empty(self.shape, dtype=torch.float64)
        for first in range(0, outputs, self.batch_size):
            rows = jacobian[first : first + self.batch_size]
            units = torch.zeros(len(rows), outputs, dtype=torch.float64)
            units.diagonal(first).fill_(1.0)
            if together:
                try:
                    cotangents = units.view(-1, *self._recorded.shape)
                    pulled = _grad(self._recorded, self._leaves, cotangents, is_grads_batched=True)
                    rows.copy_(torch.cat([w.mT.flatten(1) for w in pulled], dim=1))
                    continue
                except (NotImplementedError, RuntimeError, ValueError):
                    together = False  # an operation of this module cannot be batched (or must fail by itself)
            rows.copy_(torch.stack([self.rmatvec(unit) for unit in units]))
        if not bool(torch.isfinite(jacobian).all()):
            raise WeightError(f"{self.site.name}: its derivative has NaN or infinite entries")
        return jacobian

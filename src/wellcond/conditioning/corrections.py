"""The correction of one stored weight: what a forward pass uses in its place.

A stored weight may hold several projections (fused q, k, v; a bank of matrices), so a correction acts on some rows of
it. There are three kinds. A *fixed* one adds lam to a few entries. A *following* one is a function of the present
weight, computed in every forward pass: nothing is remembered, so nothing can be out of date, and a compiled graph or a
CUDA graph contains all of it. A *frozen* one keeps the first C of a following one as a buffer of the module.

    effective(module, W) = W + C        gradient of W = gradient of W + C, unless the correction brings its own

Under tensor parallelism each rank corrects the shard that it stores. What FSDP2 shards is whole while a forward pass
reads it, and needs nothing here; a frozen C is a buffer, which FSDP2 keeps whole on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from wellcond.attention.sharding import LocalShard, from_local, full_tensor, is_distributed, local_shard, to_local
from wellcond.attention.slot import Slot
from wellcond.errors import ConditioningError
from wellcond.linalg.orthogonal import identity_heads
from wellcond.private import in_forward_mode, is_functorch_tensor

FOLD_FIRST = "call wellcond.fold_(model) first, or do it inside `with wellcond.folded(model):`"
FOLLOWS = (
    "a model whose correction follows its weights would compute it in every call of the exported program; " + FOLD_FIRST
)
Correct = Callable[..., Tensor]
"""Matrices (count, rows, in) of a weight to those that a forward pass uses; learned tensors come as keywords."""


class _StraightThrough(torch.autograd.Function):
    """The value W + C with the gradient of W."""

    generate_vmap_rule = True

    @staticmethod
    def forward(raw: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _StraightThroughForward(_StraightThrough):
    """With forward-mode derivatives, which a compiled graph cannot have."""

    @staticmethod
    def jvp(ctx: Any, raw_tangent: Tensor, value_tangent: Tensor | None) -> Tensor:  # type: ignore[override]
        return raw_tangent.view_as(raw_tangent)


@torch.library.custom_op("wellcond::straight_through", mutates_args=())
def _recorded_straight_through(raw: Tensor, value: Tensor) -> Tensor:
    """The value W + C with the gradient of W, as one operator: make_fx records it, and would drop a `detach`."""
    return value.clone()


_recorded_straight_through.register_fake(lambda raw, value: torch.empty_like(value))
_recorded_straight_through.register_autograd(lambda ctx, gradient: (gradient, None))


def straight_through(raw: Tensor, value: Tensor) -> Tensor:
    """`value` as if it were `raw` plus a constant."""
    if torch.compiler.is_compiling():
        return _StraightThrough.apply(raw, value) if torch.is_grad_enabled() else value
    if get_proxy_mode() is not None and not is_functorch_tensor(raw):
        return _recorded_straight_through(raw, value)  # whoever differentiates does so after it was recorded
    if not torch.is_grad_enabled() and not in_forward_mode():
        return value
    return _StraightThroughForward.apply(raw, value)


@dataclass(frozen=True)
class MatrixView:
    """How a stored tensor is read as one matrix (rows, in): the matrices of a stack one below the other."""

    transposed: bool
    stack: tuple[int, int, int] | None
    """Shape of a stack of matrices; None for a single one, a Linear, Conv1D or 1x1 convolution."""

    def matrices(self, stored: Tensor) -> Tensor:
        """(count, *shape of the weight) to (count, rows, in)."""
        if self.stack is None:
            return stored.mT if self.transposed else stored.flatten(2)
        stack = stored.reshape(len(stored), *self.stack)
        return (stack.mT if self.transposed else stack).flatten(1, 2)

    def stored(self, matrices: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `matrices`."""
        if self.stack is None:
            return matrices.mT if self.transposed else matrices.view(shape)
        stack = matrices.unflatten(1, (self.stack[0], -1))
        return (stack.mT if self.transposed else stack).reshape(shape)


def view_of(slot: Slot) -> MatrixView:
    """How the weight of a slot is read as one matrix."""
    if not slot.is_stacked:
        return MatrixView(slot.transposed, None)
    return MatrixView(slot.transposed, tuple(slot.view or slot.parameter.shape))  # type: ignore[arg-type]


def rows_of(slot: Slot) -> Tensor:
    """Rows (heads, head_dim) of a slot in the matrix of its `view_of`."""
    if slot.by_head:
        return torch.arange(slot.num_heads * slot.head_dim).view(slot.num_heads, slot.head_dim)
    return slot.rows + (slot.index or 0) * slot.out_features


class StoredCorrection(ABC):
    """The correction of one stored weight; how gradients and ranks see it is the same for all."""

    differentiable = True
    """Whether `value` is differentiated as it is computed; otherwise the gradient of W is that of W + C."""
    state_names: tuple[str, ...] = ()
    """Buffers and parameters that it keeps beside the weight."""
    is_batched = False
    """Whether several weights of one kind may be corrected together."""

    @abstractmethod
    def value(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """W + C for a full weight W and what is kept beside it."""

    @abstractmethod
    def shard(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The part of W + C that this rank stores of a distributed weight."""

    def first_state(self, raw: Tensor) -> dict[str, Tensor]:
        """What is kept beside a weight from the beginning: buffers, or parameters that are trained with it."""
        return {}

    def state_of(self, module: nn.Module) -> dict[str, Tensor]:
        """What a module keeps beside its weight."""
        kept = {**module._buffers, **module._parameters} if self.state_names else {}
        return {name: kept[name] for name in self.state_names}  # type: ignore[misc]

    def before_pass(self, module: nn.Module, raw: Tensor) -> None:  # noqa: B027
        """Called where a forward pass reads the weight, and only there: what is kept beside it may change."""

    def effective(self, module: nn.Module, raw: Tensor) -> Tensor:
        """The weight that a forward pass uses, with its gradient; distributed as `raw` is."""
        return self.apply(raw, self.state_of(module))

    def apply(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """As `effective`, with what is kept beside the weight given."""
        if not is_distributed(raw):
            value = self.value(raw, state)
            return value if self.differentiable else straight_through(raw, value)
        shard = self.shard(raw, state)
        return from_local(raw, shard if self.differentiable else straight_through(to_local(raw), shard))


class FixedCorrection(StoredCorrection):
    """C = lam I on some projections: a few entries of a copy of the weight; nothing of the weight's size is stored."""

    def __init__(self, parts: Sequence[tuple[Slot, float]], layout: str) -> None:
        """``joint`` puts one identity on all heads stacked, ``per_head`` the same one in each head."""
        slot = parts[0][0]
        self.shape = tuple(slot.parameter.shape)
        positions, lams = [], []
        for part, lam in parts:
            mask = torch.zeros(self.shape, dtype=torch.bool)
            part.put_heads_(mask, identity_heads(part.num_heads, part.head_dim, part.in_features, layout))
            positions.append(mask.nonzero())
            lams.append(torch.full((len(positions[-1]),), lam, dtype=torch.float64))
        # Not views of one tensor, which torch.export.save refuses.
        self.position = tuple(axis.clone() for axis in torch.cat(positions).unbind(1))
        self.lams = torch.cat(lams)
        self.placed: dict[object, tuple[tuple[Tensor, ...], Tensor]] = {}
        self._entries(slot.parameter, None)  # filled before torch.compile traces, else it recompiles

    def value(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The weight with lam added on its diagonals."""
        return self._add(raw, None)

    def shard(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The entries that lie in this rank's part."""
        return self._add(to_local(raw), local_shard(raw, self.shape))

    def _add(self, stored: Tensor, box: LocalShard | None) -> Tensor:
        position, lams = self._entries(stored, box)
        return torch.index_put(stored, position, lams, accumulate=True)

    def _entries(self, stored: Tensor, box: LocalShard | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """Positions and values in the part `box` of the weight; cached, since computing them waits for the device."""
        key = (box, stored.device, stored.dtype)
        if key not in self.placed:
            with torch.inference_mode(False):
                position, lams = self.position, self.lams
                if box is not None:
                    held = torch.stack([box.inside(at, axis) for axis, at in enumerate(position)]).all(0)
                    position = tuple(at[held] - first for at, first in zip(position, box.offsets, strict=True))
                    lams = lams[held]
                on_device = tuple(at.to(stored.device) for at in position)
                self.placed[key] = on_device, lams.to(stored.dtype).to(stored.device)
        return self.placed[key]


Group = tuple[tuple[int, ...], ...]
"""Matrices of equal height inside a weight: the rows of each."""


def _flat(group: Group) -> tuple[int, ...]:
    return tuple(row for rows in group for row in rows)


class FollowingCorrection(StoredCorrection):
    """The effective weight as a function of the weight, for each head or for all heads of a projection as one."""

    def __init__(self, method: Any, name: str, slots: Sequence[Slot]) -> None:
        """Correct the rows of `slots`, which are stored as `name`, as a `Correction` of methods.py says."""
        self.method, self.name = method, name
        self.view, self.shape = view_of(slots[0]), tuple(slots[0].parameter.shape)
        tables = [rows_of(slot) if method.layout == "per_head" else rows_of(slot).view(1, -1) for slot in slots]
        by_height: dict[int, list[tuple[int, ...]]] = {}
        for table in tables:
            by_height.setdefault(table.shape[1], []).extend(map(tuple, table.tolist()))
        self.groups = tuple(tuple(group) for group in by_height.values())
        self.placed: dict[object, Tensor] = {}
        for group in self.groups:
            self._index(group, slots[0].parameter.device)  # filled before torch.compile traces, else it recompiles

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """Whether gradients pass through the correction; else the gradient of W is that of W + C."""
        return self.method.gradient == "through"

    @property
    def state_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the learned parameters."""
        return tuple(self._learned_name(key) for key in self.method.learned)

    def _learned_name(self, key: str) -> str:
        return f"{self.name}_wellcond_{key}"

    def first_state(self, raw: Tensor) -> dict[str, Tensor]:
        """The learned parameters, one row for each matrix in the order of `groups`."""
        if not self.method.learned:
            return {}
        matrices = self.view.matrices(full_tensor(raw).detach()[None])
        chosen = [self._select(matrices, group) for group in self.groups]
        return {
            self._learned_name(key): nn.Parameter(torch.cat([initial(heads) for heads in chosen]))
            for key, initial in self.method.learned.items()
        }

    def kind(self, raw: Tensor) -> tuple[object, ...]:
        """Weights of one kind are corrected as one batch."""
        return raw.shape, raw.dtype, raw.device, self.method.key, self.view, self.groups

    @property
    def is_batched(self) -> bool:  # type: ignore[override]
        """Not with a gradient or parameters of its own."""
        return not self.differentiable and not self.method.learned

    def values(self, raws: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """W + C of several full weights of one `kind`, without gradient."""
        with torch.no_grad():
            return self._correct(torch.stack(tuple(raws)).detach(), self.groups, {}).unbind()

    def value(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The corrected rows, and W on the others."""
        if self.is_batched:
            return self.values([raw])[0]
        learned = {key: state[self._learned_name(key)] for key in self.method.learned}
        return self._correct(raw[None], self.groups, learned)[0]

    def shard(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """A matrix that one rank stores whole is corrected there; if some matrix is cut, the weight is gathered."""
        if not self.is_batched:
            raise ConditioningError(
                f"{self.name} is sharded by tensor parallelism, and {self.method.name!r} brings its own gradient or "
                f"learned parameters: expected a weight that is whole on each rank. {FOLD_FIRST.capitalize()}"
            )
        box = local_shard(raw, self.shape)
        if not self._is_cut_between_matrices(raw):
            return box.of(self.values([full_tensor(raw)])[0]).contiguous()
        axis = 1 if self.view.transposed else 0
        first, last = box.offsets[axis], box.offsets[axis] + box.sizes[axis]
        held = [
            tuple(tuple(row - first for row in rows) for rows in group if first <= rows[0] < last)
            for group in self.groups
        ]
        with torch.no_grad():
            groups = tuple(group for group in held if group)
            return self._correct(to_local(raw).detach()[None], groups, {})[0]

    def _is_cut_between_matrices(self, raw: Any) -> bool:
        """Whether a weight is sharded along its heads and no head is cut in two; the same on every rank."""
        if self.view.stack is not None:
            return False
        axis = 1 if self.view.transposed else 0
        placements = zip(raw.placements, raw.device_mesh.shape, strict=True)
        cuts = [(place, size) for place, size in placements if not place.is_replicate()]
        if len(cuts) != 1 or not cuts[0][0].is_shard(axis):
            return False
        rows_per_rank = -(-self.shape[axis] // cuts[0][1])  # rounded up, as torch does
        return all(len({row // rows_per_rank for row in rows}) == 1 for group in self.groups for rows in group)

    def _correct(self, stored: Tensor, groups: tuple[Group, ...], learned: Mapping[str, Tensor]) -> Tensor:
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            raise ConditioningError(FOLLOWS)
        correct, matrices = self.method.correct, self.view.matrices(stored)
        num_rows, in_features = matrices.shape[1:]
        if len(groups) == 1 and _flat(groups[0]) == tuple(range(num_rows)):
            heads = matrices.reshape(-1, len(groups[0][0]), in_features)
            return self.view.stored(correct(heads, **learned).reshape(matrices.shape), stored.shape)
        result, start = matrices.clone(), 0
        for group in groups:
            own = {key: tensor[start : start + len(group)] for key, tensor in learned.items()}
            start += len(group)
            corrected = correct(self._select(matrices, group), **own).reshape(len(stored), -1, in_features)
            result.index_copy_(1, self._index(group, stored.device), corrected)
        return self.view.stored(result, stored.shape)

    def _select(self, matrices: Tensor, group: Group) -> Tensor:
        rows = self._index(group, matrices.device)
        return matrices.index_select(1, rows).reshape(-1, len(group[0]), matrices.shape[2])

    def _index(self, group: Group, device: torch.device) -> Tensor:
        """The rows on a device; cached, since copying them there waits."""
        if (group, device) not in self.placed:
            with torch.inference_mode(False):
                self.placed[group, device] = torch.tensor(_flat(group), device=device)
        return self.placed[group, device]


class FrozenCorrection(StoredCorrection):
    """The first C of a following correction, kept for good: a buffer of the module, saved with it."""

    def __init__(self, following: FollowingCorrection) -> None:
        self.following = following
        self.state_names = (f"{following.name}_wellcond_correction",)

    def first_state(self, raw: Tensor) -> dict[str, Tensor]:
        """The C of a weight that training starts from."""
        with torch.inference_mode(False), torch.no_grad():
            first = full_tensor(raw).detach().clone()
            return {self.state_names[0]: self.following.values([first])[0] - first}

    def value(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The weight plus the buffer."""
        return raw + full_tensor(state[self.state_names[0]])

    def shard(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of both."""
        return to_local(raw) + local_shard(raw, self.following.shape).of(full_tensor(state[self.state_names[0]]))

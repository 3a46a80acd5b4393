"""One correction of one stored weight: what is added to it in every forward pass.

A stored weight may hold several projections (fused q, k, v), so a correction consists of parts, one per projection,
each acting on its own rows. The effective weight is W + C; C carries no gradient, so the gradient of W is that of the
effective weight, unchanged. Every C is a function of the present weight alone: nothing is remembered, so nothing can be
out of date, and a compiled graph or a CUDA graph contains all of it.

Under tensor parallelism each rank corrects the part of the weight that it stores. What FSDP2 shards is whole while a
forward pass reads it, and needs nothing here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from wellcond.attention.sharding import Box, box_of, is_distributed, like, local_part, whole
from wellcond.attention.site import Slot
from wellcond.errors import ConditioningError
from wellcond.linalg.polar_express import mix_with_polar

FOLD_FIRST = "call wellcond.fold_(model) first, or do it inside `with wellcond.folded(model):`"
FOLLOWS = (
    "a model whose correction follows its weights would compute it in every call of the exported program; " + FOLD_FIRST
)
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7


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
    if get_proxy_mode() is not None and not torch._C._functorch.is_functorch_wrapped_tensor(raw):
        return _recorded_straight_through(raw, value)  # whoever differentiates does so after it was recorded
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return value
    return _StraightThroughForward.apply(raw, value)


class AbstractCorrection(ABC):
    """A correction says what the effective weight is; how gradients and ranks see it is the same for all."""

    is_fixed = False
    """Whether C does not depend on the weight: then W + C is differentiated as it is written."""

    @abstractmethod
    def value(self, module: nn.Module, raw: Tensor) -> Tensor:
        """W + C for a whole weight; without gradient unless C is fixed."""

    @abstractmethod
    def part(self, module: nn.Module, raw: Tensor) -> Tensor:
        """The part of W + C that this rank stores of a distributed weight; without gradient unless C is fixed."""

    def effective(self, module: nn.Module, raw: Tensor) -> Tensor:
        """W + C; the gradient of W is that of W + C."""
        if not is_distributed(raw):
            value = self.value(module, raw)
            return value if self.is_fixed else straight_through(raw, value)
        stored, part = local_part(raw), self.part(module, raw)
        return like(raw, part if self.is_fixed else straight_through(stored, part))


@dataclass(frozen=True)
class IdentityPart:
    """lam times the rectangular identity on one projection."""

    slot: Slot
    lam: float
    layout: str

    def entries(self) -> tuple[Tensor, Tensor]:
        """Rows and columns, in the matrix (out, in), of the ones of the identity.

        ``joint`` places one identity on all heads stacked, so that head k reads coordinates kd..(k+1)d; ``per_head``
        the same identity in each head.
        """
        num_heads, head_dim = self.slot.rows.shape
        columns = torch.arange(num_heads * head_dim).reshape(num_heads, head_dim)
        if self.layout == "per_head":
            columns = torch.arange(head_dim).expand(num_heads, -1)
        inside = columns < self.slot.in_features
        return self.slot.rows[inside], columns[inside]


class IdentityCorrection(AbstractCorrection):
    """C = lam I: a few entries added to a copy of the weight; nothing of the weight's size is stored."""

    is_fixed = True

    def __init__(self, parts: list[IdentityPart]) -> None:
        """Collect the entries of all parts."""
        self.shape = tuple(parts[0].slot.parameter.shape)
        entries = [part.entries() for part in parts]
        rows, columns = (torch.cat(positions) for positions in zip(*entries, strict=True))
        self.entries = (columns, rows) if parts[0].slot.transposed else (rows, columns)
        lams = [torch.full(r.shape, p.lam, dtype=torch.float64) for p, (r, _) in zip(parts, entries, strict=True)]
        self.lams = torch.cat(lams)
        self.placed: dict[object, tuple[Tensor, Tensor, Tensor]] = {}
        self._entries(parts[0].slot.parameter, None)  # a graph that is traced now would be traced again after it

    def value(self, module: nn.Module, raw: Tensor) -> Tensor:
        """The weight with lam added on its diagonals."""
        return self._add(raw, None)

    def part(self, module: nn.Module, raw: Tensor) -> Tensor:
        """The entries that lie in this rank's part."""
        return self._add(local_part(raw), box_of(raw, self.shape))

    def _add(self, stored: Tensor, box: Box | None) -> Tensor:
        first, second, lams = self._entries(stored, box)
        matrix = stored if stored.dim() == 2 else stored.view(stored.shape[0], -1)
        return torch.index_put(matrix, (first, second), lams, accumulate=True).view_as(stored)

    def _entries(self, stored: Tensor, box: Box | None) -> tuple[Tensor, Tensor, Tensor]:
        """Positions and values in the part `box` of the weight, on its device; kept, since finding them waits."""
        key = (box, stored.device, stored.dtype)
        if key not in self.placed:
            with torch.inference_mode(False):
                (first, second), lams = self.entries, self.lams
                if box is not None:
                    held = box.inside(first, 0) & box.inside(second, 1)
                    first, second, lams = first[held] - box.offsets[0], second[held] - box.offsets[1], lams[held]
                device = stored.device
                self.placed[key] = (first.to(device), second.to(device), lams.to(stored.dtype).to(device))
        return self.placed[key]


@dataclass(frozen=True)
class Mixture:
    """W + C = keep W + share sigma_1(W) U V^T for W = U S V^T: what polar and balanced corrections amount to."""

    keep: float
    share: float


@dataclass(frozen=True)
class Heads:
    """Matrices of one shape inside a stored weight: the rows of each, on its output axis."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def flat(self) -> tuple[int, ...]:
        """The rows of one matrix after the other."""
        return tuple(row for rows in self.rows for row in rows)

    @property
    def width(self) -> int:
        """Rows of one matrix."""
        return len(self.rows[0])


class SpectralCorrection(AbstractCorrection):
    """W + C as a mixture of W and its polar factor, for each head or for all heads as one matrix."""

    def __init__(self, slots: list[Slot], mixture: Mixture, layout: str) -> None:
        """Correct the rows of `slots`; ``layout`` is ``per_head`` or ``joint``."""
        self.mixture, self.layout = mixture, layout
        self.transposed, self.shape = slots[0].transposed, tuple(slots[0].parameter.shape)
        rows = [slot.rows if layout == "per_head" else slot.rows.reshape(1, -1) for slot in slots]
        by_width: dict[int, list[tuple[int, ...]]] = {}
        for table in rows:
            by_width.setdefault(table.shape[1], []).extend(map(tuple, table.tolist()))
        self.heads = tuple(Heads(tuple(table)) for table in by_width.values())
        self.placed: dict[object, Tensor] = {}
        for heads in self.heads:
            self._index(heads, slots[0].parameter.device)  # a graph that is traced now would be traced again after it

    def kind(self, raw: Tensor) -> tuple[object, ...]:
        """Weights of one kind are corrected as one batch."""
        return raw.shape, raw.dtype, raw.device, self.mixture, self.transposed, self.heads

    def values(self, raws: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """W + C of several whole weights of one `kind`."""
        with torch.no_grad():
            return self._mix(torch.stack(tuple(raws)).detach(), self.heads).unbind()

    def value(self, module: nn.Module, raw: Tensor) -> Tensor:
        """The mixture on the rows that are conditioned, W on the others."""
        return self.values([raw])[0]

    def part(self, module: nn.Module, raw: Tensor) -> Tensor:
        """A head that one rank stores whole is corrected there; if some head is cut, the weight is gathered."""
        box = box_of(raw, self.shape)
        if not self._is_cut_between_heads(raw):
            return box.of(self.value(module, whole(raw))).contiguous()
        axis = 1 if self.transposed else 0
        first, last = box.offsets[axis], box.offsets[axis] + box.sizes[axis]
        held = [
            tuple(tuple(row - first for row in rows) for rows in heads.rows if first <= rows[0] < last)
            for heads in self.heads
        ]
        with torch.no_grad():
            return self._mix(local_part(raw).detach()[None], tuple(Heads(rows) for rows in held if rows))[0]

    def _is_cut_between_heads(self, raw: Any) -> bool:
        """Whether a distributed weight is cut along its heads and no head is cut in two; the same on every rank."""
        axis = 1 if self.transposed else 0
        placements = zip(raw.placements, raw.device_mesh.shape, strict=True)
        cuts = [(place, size) for place, size in placements if not place.is_replicate()]
        if len(cuts) != 1 or not cuts[0][0].is_shard(axis):
            return False
        rows_per_rank = -(-self.shape[axis] // cuts[0][1])  # rounded up, as torch does
        return all(len({row // rows_per_rank for row in rows}) == 1 for heads in self.heads for rows in heads.rows)

    def _mix(self, stored: Tensor, groups: tuple[Heads, ...]) -> Tensor:
        """`stored` (count, *shape of the weight)."""
        if is_exporting() or torch.jit.is_tracing():
            raise ConditioningError(FOLLOWS)
        matrices = stored.mT if self.transposed else stored.flatten(2)
        count, num_rows, in_features = matrices.shape
        if len(groups) == 1 and groups[0].flat == tuple(range(num_rows)):
            mixed = self._mix_heads(matrices.reshape(-1, groups[0].width, in_features)).reshape(matrices.shape)
        else:
            mixed = matrices.clone()
            for heads in groups:
                rows = self._index(heads, stored.device)
                chosen = matrices.index_select(1, rows).reshape(-1, heads.width, in_features)
                mixed.index_copy_(1, rows, self._mix_heads(chosen).reshape(count, -1, in_features))
        return mixed.mT if self.transposed else mixed.view_as(stored)

    def _mix_heads(self, heads: Tensor) -> Tensor:
        return mix_with_polar(heads, keep=self.mixture.keep, share=self.mixture.share)

    def _index(self, heads: Heads, device: torch.device) -> Tensor:
        """The rows on a device; kept, since copying them there waits."""
        if (heads, device) not in self.placed:
            with torch.inference_mode(False):
                self.placed[heads, device] = torch.tensor(heads.flat, device=device)
        return self.placed[heads, device]


class FrozenCorrection(AbstractCorrection):
    """The first C of a spectral correction, kept for good: a buffer of the module, saved with it."""

    is_fixed = True

    def __init__(self, buffer_name: str, spectral: SpectralCorrection) -> None:
        """Read C from the buffer `buffer_name`; `spectral` says how it was made."""
        self.buffer_name = buffer_name
        self.spectral = spectral

    def first(self, raw: Tensor) -> Tensor:
        """The C to keep for a weight that training starts from."""
        with torch.inference_mode(False), torch.no_grad():
            start = whole(raw).detach().clone()
            return self.spectral.values([start])[0] - start

    def value(self, module: nn.Module, raw: Tensor) -> Tensor:
        """The weight plus the buffer."""
        return raw + whole(module.get_buffer(self.buffer_name))

    def part(self, module: nn.Module, raw: Tensor) -> Tensor:
        """This rank's part of both."""
        buffer = whole(module.get_buffer(self.buffer_name))
        return local_part(raw) + box_of(raw, self.spectral.shape).of(buffer)

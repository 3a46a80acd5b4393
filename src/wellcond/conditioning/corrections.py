"""One correction of one stored weight: what is added to it in every forward pass.

A stored weight may hold several projections (fused q, k, v), so a correction consists of parts, one per projection,
each acting on its own rows. The effective weight is W + C; C carries no gradient, so the gradient of W is that of the
effective weight, unchanged.

Under tensor parallelism each process corrects the part of the weight that it stores. What FSDP2 shards is whole while a
forward pass reads it, and needs nothing here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wellcond.attention.shards import Box, any_process, box_of, is_distributed, like, local_part, whole
from wellcond.attention.site import Slot
from wellcond.errors import ConditioningError

HeadCorrection = Callable[[Tensor], Tensor]
# An exported program cannot follow the weights: it would hold the number of a Python object of this process.
FOLD_FIRST = (
    "a model whose correction follows its weights cannot be exported; call wellcond.fold_(model) first, or export "
    "inside `with wellcond.folded(model):`"
)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7


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


class IdentityCorrection:
    """C = lam I: a few entries added to a copy of the weight; nothing of the weight's size is stored."""

    def __init__(self, parts: list[IdentityPart]) -> None:
        """Collect the entries of all parts."""
        entries = [part.entries() for part in parts]
        self.transposed = parts[0].slot.transposed
        self.rows = torch.cat([rows for rows, _ in entries])
        self.columns = torch.cat([columns for _, columns in entries])
        lams = [
            torch.full(rows.shape, part.lam, dtype=torch.float64)
            for part, (rows, _) in zip(parts, entries, strict=True)
        ]
        self.lams = torch.cat(lams)

    def effective(self, module: nn.Module, raw: Tensor) -> Tensor:
        """W + C; the gradient passes through unchanged."""
        if self.rows.device != raw.device:
            self.rows, self.columns = self.rows.to(raw.device), self.columns.to(raw.device)
            self.lams = self.lams.to(raw.device)
        entries = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        if not is_distributed(raw):
            return _add_entries(raw, entries, self.lams)
        box = box_of(raw)
        held = box.inside(entries[0], 0) & box.inside(entries[1], 1)
        first, second = (positions[held] - box.offsets[axis] for axis, positions in enumerate(entries))
        return like(raw, _add_entries(local_part(raw), (first, second), self.lams[held]))


def _add_entries(stored: Tensor, entries: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
    matrix = stored if stored.dim() == 2 else stored.view(stored.shape[0], -1)
    return torch.index_put(matrix, entries, values.to(stored.dtype), accumulate=True).view_as(stored)


class SpectralCorrection:
    """C computed from the weight itself (polar, balanced), kept until the weight changes."""

    def __init__(self, slots: list[Slot], correct: HeadCorrection, layout: str) -> None:
        """`correct` maps heads (count, d, D) to their corrections."""
        self.slots = slots
        self.correct = correct
        self.layout = layout
        self.cached: Tensor | None = None
        self.fingerprint: tuple[object, ...] | None = None
        self.num_computed = 0
        self.key = _register(self)

    def compute(self, raw: Tensor) -> Tensor:
        """C for a whole weight stored like this one; zero on rows that are not conditioned."""
        return self._compute(raw, self.slots)

    def compute_part(self, raw: Tensor) -> Tensor:
        """C for the part of a distributed weight that this process stores.

        A head that one process stores whole is corrected there; if some head is cut, the weight is gathered.
        """
        box = box_of(raw)
        if self._cuts_heads(raw):
            return box.of(self.compute(whole(raw))).contiguous()
        return self._compute(local_part(raw), [part for slot in self.slots for part in _heads_inside(slot, box)])

    def _cuts_heads(self, raw: Tensor) -> bool:
        return self.layout != "per_head" or not all(is_cut_between_heads(raw, slot) for slot in self.slots)

    @torch.no_grad()
    def _compute(self, raw: Tensor, slots: Sequence[Slot]) -> Tensor:
        with torch.autocast(raw.device.type, enabled=False):
            correction = torch.zeros_like(raw)
            for slot in slots:
                heads = slot.view_heads(raw.detach())
                matrices = heads if self.layout == "per_head" else heads.reshape(1, -1, heads.shape[2])
                slot.put_heads_(correction, self.correct(matrices).reshape(heads.shape))
        self.num_computed += 1
        return correction

    def current(self, raw: Tensor) -> Tensor:
        """C for the weight as it is now, computed only if it changed."""
        if torch._C._functorch.is_functorch_wrapped_tensor(raw):
            return self.compute(raw)  # inside a transform the weight has no identity to remember
        part = local_part(raw)
        version = None if part.is_inference() else part._version
        # An optimiser that writes through `.data` leaves the version counter alone: compare the bits as well.
        fingerprint = (part.data_ptr(), part.shape, part.device, part.dtype, version, bit_sum(part))
        changed = self.cached is None or self.fingerprint != fingerprint
        if part is not raw and self._cuts_heads(raw):
            changed = any_process(changed, raw)  # they gather together, or none does
        if changed:
            self.cached = self.compute(raw) if part is raw else self.compute_part(raw)
            self.fingerprint = fingerprint
        assert self.cached is not None
        return self.cached

    def effective(self, module: nn.Module, raw: Tensor) -> Tensor:
        """W + C; the gradient passes through unchanged."""
        if _is_exporting() or torch.jit.is_tracing():
            raise ConditioningError(FOLD_FIRST)
        if is_distributed(raw):
            return like(raw, local_part(raw) + self.current(raw))
        if torch.compiler.is_compiling():
            return raw + torch.ops.wellcond.current_correction(raw.detach(), self.key)
        return raw + self.current(raw)

    def __setstate__(self, state: dict[str, object]) -> None:
        """A copy is a correction of its own."""
        self.__dict__.update(state)
        self.key = _register(self)


class FrozenCorrection:
    """The first C of a spectral correction, kept for good: a buffer of the module, saved with it."""

    def __init__(self, buffer_name: str, spectral: SpectralCorrection) -> None:
        """Read C from the buffer `buffer_name`; `spectral` says how it was made."""
        self.buffer_name = buffer_name
        self.spectral = spectral

    def effective(self, module: nn.Module, raw: Tensor) -> Tensor:
        """W + C; the gradient passes through unchanged."""
        correction = whole(module.get_buffer(self.buffer_name))
        if is_distributed(raw):
            return like(raw, local_part(raw) + box_of(raw).of(correction))
        return raw + correction


def is_cut_between_heads(raw: Tensor, slot: Slot) -> bool:
    """Whether a distributed weight is cut along its heads and no head is cut in two; the same on every process."""
    head_axis = 1 if slot.transposed else 0
    cuts = [(place, size) for place, size in zip(raw.placements, raw.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
            if not place.is_replicate()]  # fmt: skip
    if len(cuts) != 1 or not cuts[0][0].is_shard(head_axis):
        return False
    rows_per_process = -(-raw.shape[head_axis] // cuts[0][1])  # rounded up, as torch does
    process = slot.rows // rows_per_process
    return bool((process == process[:, :1]).all())


def _heads_inside(slot: Slot, box: Box) -> list[Slot]:
    """The slot of the heads that a box contains, in positions of the box; nothing if there are none."""
    axis = 1 if slot.transposed else 0
    rows = slot.rows[box.inside(slot.rows[:, 0], axis)] - box.offsets[axis]
    return [replace(slot, rows=rows)] if len(rows) else []


@torch.no_grad()
def bit_sum(weight: Tensor) -> int:
    """Sums of the bit patterns over rows and columns, weighted by position: a cheap sign of change, also of order."""
    flat = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach()[None]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    if flat.is_contiguous() and flat.shape[1] * flat.element_size() % 8 == 0:
        integers = torch.int64  # eight bytes at a time
    bits = flat.view(integers)
    total = 0
    for axis, factor in ((0, 1), (1, 1_000_003)):  # unequal, so that a transposed weight is another one
        sums = bits.sum(axis, dtype=torch.int64)
        total += factor * int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum())
    return total


# A compiled graph cannot hold a Python cache, but it can call an opaque operator, which finds the correction by number.
_CORRECTIONS: weakref.WeakValueDictionary[int, SpectralCorrection] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def _register(correction: SpectralCorrection) -> int:
    key = next(_NUMBERS)
    _CORRECTIONS[key] = correction
    return key


@torch.library.custom_op("wellcond::current_correction", mutates_args=())
def current_correction(raw: Tensor, key: int) -> Tensor:
    """C of correction number `key` for the weight `raw`, inside a compiled graph."""
    # A copy: compiled code may write over what an operator returns.
    return _CORRECTIONS[key].current(raw).clone()


@current_correction.register_fake
def _(raw: Tensor, key: int) -> Tensor:
    return torch.empty_like(raw)


Correction = IdentityCorrection | SpectralCorrection | FrozenCorrection

"""One correction of one stored weight: what is added to it in every forward pass.

A stored weight may hold several projections (fused q, k, v), so a correction consists of parts, one per projection,
each acting on its own rows. The effective weight is W + C; C carries no gradient, so the gradient of W is that of the
effective weight, unchanged.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellcond.attention.site import Slot

HeadCorrection = Callable[[Tensor], Tensor]


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
        first, second = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        matrix = raw if raw.dim() == 2 else raw.view(raw.shape[0], -1)
        added = torch.index_put(matrix, (first, second), self.lams.to(raw.dtype), accumulate=True)
        return added.view_as(raw)


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

    @torch.no_grad()
    def compute(self, raw: Tensor) -> Tensor:
        """C for a weight stored like this one; zero on rows that are not conditioned."""
        with torch.autocast(raw.device.type, enabled=False):
            correction = torch.zeros_like(raw)
            for slot in self.slots:
                heads = slot.view_heads(raw.detach())
                matrices = heads if self.layout == "per_head" else heads.reshape(1, -1, heads.shape[2])
                slot.put_heads_(correction, self.correct(matrices).reshape(heads.shape))
        self.num_computed += 1
        return correction

    def current(self, raw: Tensor) -> Tensor:
        """C for the weight as it is now, computed only if it changed."""
        if torch._C._functorch.is_functorch_wrapped_tensor(raw):
            return self.compute(raw)  # inside a transform the weight has no identity to remember
        version = None if raw.is_inference() else raw._version
        identity = (raw.data_ptr(), raw.device, raw.dtype, version)
        if self.cached is None or self.fingerprint is None or self.fingerprint[:4] != identity:
            self.cached = self.compute(raw)
            self.fingerprint = (*identity, bit_sum(raw))
        # An optimiser that writes through `.data` leaves the version counter alone: compare the bits as well.
        elif self.fingerprint[4] != (bits := bit_sum(raw)):
            self.cached = self.compute(raw)
            self.fingerprint = (*identity, bits)
        return self.cached

    def effective(self, module: nn.Module, raw: Tensor) -> Tensor:
        """W + C; the gradient passes through unchanged."""
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
        return raw + module.get_buffer(self.buffer_name)


@torch.no_grad()
def bit_sum(weight: Tensor) -> int:
    """Sums of the bit patterns over rows and columns, weighted by position: a cheap sign of change, also of order."""
    flat = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach()[None]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    if flat.is_contiguous() and flat.shape[1] * flat.element_size() % 8 == 0:
        integers = torch.int64  # eight bytes at a time
    bits = flat.view(integers)
    total = 0
    for axis in (0, 1):
        sums = bits.sum(axis, dtype=torch.int64)
        total += int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum())
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

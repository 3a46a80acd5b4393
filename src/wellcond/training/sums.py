"""What a monitor holds of one attention layer within a step: sums of its columns, on the device where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from wellcond.attention.live import LiveCall
from wellcond.attention.sharding import is_distributed, local_shard
from wellcond.attention.site import AttentionSite
from wellcond.training.columns import Column

STREAM = ("_stream", "_added")
"""Mean squares of what enters a block, and of what its attention adds; the root of their ratio is `attention_share`."""


class LayerSums:
    """Sums, their weights, and maxima of the heads of a layer, over its calls in a step; (heads, columns) each.

    They are where the layer's passes run: that may be another device than that of its weights, and the model may move.
    """

    def __init__(self, site: AttentionSite, columns: Sequence[Column], *, stream: bool) -> None:
        self.site, self.columns = site, columns
        self.means = [column.name for column in columns if column.reduce == "mean"] + list(STREAM if stream else ())
        self.largest = [column.name for column in columns if column.reduce == "max"]
        self.why: dict[str, str] = {}
        """By column, why it was not seen."""
        self.known: set[str] = set()
        """Columns that were seen."""
        self.exact: bool | None = None
        """Whether `max_logit` is exact, once it was seen."""
        self._local: dict[int, slice | None] = {}
        self.home: torch.device | None = None
        self.follow_weights()

    def follow_weights(self) -> None:
        """Begin anew where the weights are, if they have moved."""
        home = self.site.q.parameter.device
        if home != self.home:
            self.home = home
            self._begin_on(home)

    def _begin_on(self, device: torch.device) -> None:
        heads, means = self.site.num_heads, len(self.means)
        self.sums = torch.zeros(heads, means, device=device)
        self.weights = torch.zeros(heads, means, device=device)
        self.maxima = torch.full((heads, len(self.largest)), -torch.inf, device=device)

    def clear(self) -> None:
        """Begin a new step."""
        self.sums.zero_()
        self.weights.zero_()
        self.maxima.fill_(-torch.inf)

    def see(self, call: LiveCall) -> None:
        """Add what a call of the layer's kernel shows."""
        values: dict[str, Tensor] = {}
        for column in self.columns:
            value = column.read(call)
            if isinstance(value, str):
                self.why.setdefault(column.name, value)
            else:
                values[column.name] = value.detach()
        if not values:
            return
        tensor = call.logits if call.q is None else call.q
        rows = None if tensor is None else self._rows_of(tensor.shape[1])
        if rows is None or tensor is None:
            self.why |= dict.fromkeys(values, "the heads of its kernel could not be separated")
            return
        self._use(next(iter(values.values())).device)
        self.known.update(values)
        self._add(rows, {name: _by_head(value, tensor.shape[1]) for name, value in values.items()})
        if "max_logit" in self.known:
            self.exact = call.logits is not None

    def see_stream(self, what: Literal["stream", "added"], tensor: Tensor) -> None:
        """Add what enters the layer's block, or what its attention adds to that."""
        self._use(tensor.device)
        at = self.means.index(f"_{what}")
        exact = torch.promote_types(tensor.dtype, torch.float32)
        self.sums[:, at] += torch.linalg.vector_norm(tensor.detach(), dtype=exact).square()
        self.weights[:, at] += tensor.numel()
        if what == "added":
            self.known.add("attention_share")

    def _use(self, device: torch.device) -> None:
        if device != self.sums.device:
            self._begin_on(device)

    def _add(self, rows: slice, values: dict[str, Tensor]) -> None:
        """Add columns (samples, heads, numbers); those of one shape go together."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for names, columns in _alike(values, self.means):
            finite = columns.isfinite()
            sums |= zip(names, torch.where(finite, columns, 0.0).sum((1, 3)), strict=True)
            counts |= zip(names, finite.sum((1, 3), dtype=torch.float32), strict=True)
        if sums:
            nothing = torch.zeros_like(next(iter(sums.values())))
            self.sums[rows].add_(torch.stack([sums.get(name, nothing) for name in self.means], 1))
            self.weights[rows].add_(torch.stack([counts.get(name, nothing) for name in self.means], 1))
        for names, columns in _alike(values, self.largest):
            largest = columns.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amax((1, 3))
            for name, of_heads in zip(names, largest, strict=True):
                kept = self.maxima[rows, self.largest.index(name)]
                torch.maximum(kept, of_heads, out=kept)

    def _rows_of(self, heads: int) -> slice | None:
        """Where the heads of a call are; of tensor parallelism, those that this process has."""
        if heads == self.site.num_heads:
            return slice(0, heads)
        if heads not in self._local:
            self._local[heads] = _local_heads(self.site, heads)
        return self._local[heads]


def _by_head(value: Tensor, heads: int) -> Tensor:
    """(samples, heads, numbers), from columns that may have fewer heads, and one number for each or several."""
    value = (value.flatten(2) if value.dim() > 2 else value[..., None]).float()
    return value if value.shape[1] == heads else value.repeat_interleave(heads // value.shape[1], 1)


def _alike(values: dict[str, Tensor], names: Sequence[str]) -> Iterator[tuple[list[str], Tensor]]:
    """Columns of one shape with their names, (columns, samples, heads, numbers): few large operations, not many."""
    groups: dict[torch.Size, list[str]] = {}
    for name in names:
        if name in values:
            groups.setdefault(values[name].shape, []).append(name)
    for group in groups.values():
        yield group, torch.stack([values[name] for name in group])


def _local_heads(site: AttentionSite, heads: int) -> slice | None:
    """The heads that this process computes, by the shard of W_Q that it holds; None if they do not fit."""
    parameter = site.q.parameter
    if not is_distributed(parameter) or site.q.is_stacked or site.q.view is not None:
        return None
    inside = local_shard(parameter).inside(site.q.rows, 1 if site.q.transposed else 0).all(1)
    numbers = inside.nonzero().flatten().tolist()
    if len(numbers) != heads or numbers != list(range(numbers[0], numbers[0] + heads)):
        return None
    return slice(numbers[0], numbers[0] + heads)

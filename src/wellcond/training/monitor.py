"""`AttentionMonitor`: every head while a model trains, read from the passes that the training makes anyway."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellcond.arguments import check_int, check_number
from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.find import find_attention
from wellcond.attention.live import LiveCall, LiveHooks
from wellcond.attention.sharding import is_distributed, local_shard, process_number, unwrap
from wellcond.attention.site import AttentionSite
from wellcond.errors import UnknownChoiceError
from wellcond.linalg.circuits import NUMBERS, circuit_numbers, gram_matrices
from wellcond.training.alarms import Alarms
from wellcond.training.columns import CHECK, COLUMNS, TOLERANCE, Column
from wellcond.training.series import Series
from wellcond.training.turns import JACOBIAN_COLUMNS, OneHeadAtATime

WEIGHT_COLUMNS = (*NUMBERS, "weight_change")
SHARE = "attention_share"
WEIGHTS_EVERY = 50
"""Steps between two readings of the weights, unless the monitor reads more rarely."""


@dataclass(eq=False)
class _Buffers:
    """Sums, their weights, and maxima of the heads whose weights are on one device; (heads, columns) each."""

    sums: Tensor
    weights: Tensor
    maxima: Tensor

    @classmethod
    def on(cls, device: torch.device, heads: int, means: int, maxima: int) -> _Buffers:
        empty = functools.partial(torch.zeros, device=device, dtype=torch.float32)
        return cls(empty(heads, means), empty(heads, means), torch.full((heads, maxima), -torch.inf, device=device))

    def with_more(self, heads: int) -> _Buffers:
        """The same with empty rows for further heads."""
        more = _Buffers.on(self.sums.device, heads, self.sums.shape[1], self.maxima.shape[1])
        pairs = zip(self.tensors(), more.tensors(), strict=True)
        return _Buffers(*(torch.cat(pair) for pair in pairs))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sums, self.weights, self.maxima

    def clear(self) -> None:
        self.sums.zero_()
        self.weights.zero_()
        self.maxima.fill_(-torch.inf)

    def reduce(self, group: Any) -> Tensor:
        """One matrix of everything, over all processes."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            both = torch.cat([self.sums, self.weights], 1)
            torch.distributed.all_reduce(both, group=group)
            torch.distributed.all_reduce(self.maxima, torch.distributed.ReduceOp.MAX, group=group)
            return torch.cat([both, self.maxima], 1)
        return torch.cat([self.sums, self.weights, self.maxima], 1)


@dataclass(eq=False)
class _Flush:
    """What one step left on its way to the host."""

    step: int
    tables: dict[torch.device, Tensor]
    rows: list[tuple[torch.device, slice]]
    """Of every layer, which rows of which table."""
    grams: list[dict[str, Tensor]]
    measured: dict[str, Tensor]
    """Columns of the host's own."""
    ready: list[Any] = field(default_factory=list)
    """Events of the devices that copy."""

    def wait(self) -> None:
        for event in self.ready:
            event.synchronize()


class AttentionMonitor:
    """Watches every head while a model trains; the training is the same bit for bit.

    The monitor reads the forward passes that the training makes: no pass of its own, no batch that is kept. Hooks are
    there on due steps only. They compute on the device, into buffers of fixed columns; what several microbatches see is
    accumulated, and what activation checkpointing computes again is not counted. `step` reduces the buffers over the
    processes (sums and maxima, one column at a time) and begins to copy them to the host, which reads them one step
    later. So nothing waits for the device within a step, and no process for another outside `step`. Of what was read,
    the last 64 MB are in memory and the rest in a temporary file.

    What was not seen is NaN, and `not_seen` says why. torch.compile is such a case: compiled code calls no hooks, its
    graph stays as it is, and only what the weights alone say is known. Make the monitor after `torch.compile`: the
    other way round the same graph is compiled a second time, when the hooks of the first step are gone.

    Under DistributedDataParallel, FSDP2 and tensor parallelism every process makes a monitor and calls `step`; all then
    have the numbers of one process that sees all samples and heads.

    Args:
        model: the model that trains: plain, or wrapped by torch.compile or DistributedDataParallel, or sharded.
        every: read at the first step and at multiples of this many.
        columns: which to read of the kernel calls (`wellcond.training.columns`); all by default. ``attention_share`` is
            what an attention layer adds to the stream, relative to it.
        weights: read singular values of W_Q, W_K, W_V, W_O and of the QK and OV circuits, after the step of the
            optimiser, at due steps that are multiples of `weights_every`.
        weights_every: by default 50, or `every` where that is more.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``.
        file: of JSON lines to write, one per step and layer; ``wellcond watch`` and ``wellcond doctor`` read it. Only
            the first process writes.
        alarms: `Alarms`, to be asked after every reading.
        jacobian: share of the training time for kappa(X) and kappa(J) of one head at a time, in turn, by `measure`;
            this needs a batch in `step`, runs the model on it again, and is for one process. 0 by default: never.
        first_step: how many steps were trained before.
        group: processes over which to reduce; all by default. Pipeline stages, which have other layers, need their own.

    Raises:
        AttentionNotFoundError, UnsupportedLayoutError: no attention of the model is understood.
        UnknownChoiceError, TypeError, ValueError: a column that does not exist, or numbers that make no sense.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> monitor = AttentionMonitor(layer, every=2)
        >>> for _ in range(4):
        ...     layer(torch.randn(2, 5, 16)).sum().backward()
        ...     monitor.step()
        >>> frame = monitor.to_frame()
        >>> sorted(set(frame["step"].tolist())), len(frame)
        ([1, 2, 4], 12)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        columns: Sequence[str] | None = None,
        weights: bool = True,
        weights_every: int | None = None,
        sites: Chosen | None = None,
        file: str | os.PathLike[str] | None = None,
        alarms: Alarms | None = None,
        jacobian: float = 0.0,
        first_step: int = 0,
        group: Any = None,
    ) -> None:
        """Find the attention layers and make the buffers; the hooks wait for the first due step."""
        self.every = check_int("every", every, at_least=1)
        self.num_steps = check_int("first_step", first_step, at_least=0)
        self._first_step = self.num_steps
        at_least = max(self.every, WEIGHTS_EVERY) if weights_every is None else weights_every
        self.weights_every = check_int("weights_every", at_least, at_least=1)
        self.model = unwrap(model)
        self.group, self.alarms = group, alarms
        chosen = find_attention(self.model, strict=False) if sites is None else choose_sites(self.model, sites)
        self.sites: list[AttentionSite] = list(chosen)
        self._columns = [*_chosen_columns(columns), CHECK]
        self._share = columns is None or SHARE in columns
        shown = [column.name for column in self._columns if column is not CHECK]
        shown += [SHARE] if self._share else []
        shown += WEIGHT_COLUMNS if weights else []
        self._turns = None
        if check_number("jacobian", jacobian, at_least=0.0):
            self._turns = OneHeadAtATime(self.model, self.sites, jacobian)
            shown += JACOBIAN_COLUMNS
        self.series = Series([(site.name, site.num_heads) for site in self.sites], shown)
        self._weights = weights
        means = [column.name for column in self._columns if column.reduce == "mean"]
        self._means = [*means, *(("_stream", "_added") if self._share else ())]
        self._maxima = [column.name for column in self._columns if column.reduce == "max"]
        self._why: list[dict[str, str]] = [{} for _ in self.sites]
        self._known: list[set[str]] = [set() for _ in self.sites]
        self._exact: dict[int, bool] = {}
        self._places: dict[tuple[int, int], slice | None] = {}
        self._buffers: dict[torch.device, _Buffers] = {}
        self._rows: list[tuple[torch.device, slice]] = []
        self._homes: list[torch.device] = []
        """Of every layer, where its weights were when the buffers were made."""
        self._grams: list[dict[str, Tensor]] | None = None
        self._pending: list[_Flush] = []
        self._make_buffers()
        self._hooks = LiveHooks(model, self.sites, self._see, self._stream if self._share else None)
        self._armed = False
        if file is not None and process_number() == 0:
            self.series.write_to(file, keep_until=first_step)
        self._arm()

    # What the training calls

    def step(self, batch: Any = None) -> None:
        """Call once after every step of the optimiser, on every process.

        Args:
            batch: what the model is called with, where a share of time for `jacobian` was given; it is not kept.
        """
        self.num_steps += 1
        self._collect()
        if self._armed:
            measured = {} if self._turns is None or batch is None else self._turns.measure(batch)
            self._flush(measured)
        self._arm()

    def discard(self) -> None:
        """Call in the place of `step` where nobody reads the numbers: for whom `max_logits` is enough."""
        self.num_steps += 1
        for buffers in self._buffers.values():
            buffers.clear()
        self._arm()

    def close(self) -> None:
        """Read what is still on its way, and remove the hooks."""
        self._collect()
        self._hooks.detach()
        self._armed = False

    def __enter__(self) -> AttentionMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_due(self, step: int) -> bool:
        """Whether a step is read: the first one, and multiples of `every`."""
        return step == self._first_step + 1 or step % self.every == 0

    # What users ask

    def max_logits(self, *, reduce: bool = True) -> dict[str, Tensor]:
        """The largest logit of every head in the passes since the last `step`, on the device: {layer: (heads)}.

        It is exact where the kernel computes logits, else the upper bound by log-sum-exp (`exact` says which), and NaN
        where nothing was seen. Numbers that are not finite give infinity. Ask between the forward pass and `step`, on
        a step that is due; on others all are NaN. Nothing waits for the device.

        Args:
            reduce: take the maximum over all processes; every process must then ask.
        """
        if "max_logit" not in self._maxima:
            raise ValueError("max_logits: this monitor was made without the column 'max_logit'; add it to columns")
        at = self._maxima.index("max_logit")
        found: dict[str, Tensor] = {}
        for device, buffers in self._buffers.items():
            largest = buffers.maxima[:, at].clone()
            if reduce and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.group)
            largest = largest.masked_fill(largest == -torch.inf, torch.nan)
            found |= {
                site.name: largest[rows]
                for site, (on, rows) in zip(self.sites, self._rows, strict=True)
                if on == device
            }
        return found

    def exact(self) -> dict[str, bool | None]:
        """Whether `max_logit` of a layer is exact (True) or an upper bound (False); None while nothing was seen."""
        return {site.name: self._exact.get(number) for number, site in enumerate(self.sites)}

    @property
    def not_seen(self) -> dict[str, dict[str, str]]:
        """By layer, columns that were not seen so far, with the reasons."""
        found = {}
        for site, why, reasons, known in zip(self.sites, self._hooks.why, self._why, self._known, strict=True):
            names = [column.name for column in self._columns if column is not CHECK and column.name not in known]
            missing = {name: reasons.get(name) or why for name in names}
            if self._share and SHARE not in known:
                missing[SHARE] = "what its block receives or what it adds was not seen"
            if missing:
                found[site.name] = missing
        return found

    def to_frame(self) -> Any:
        """A row per step, layer and head as a `pandas.DataFrame`; NaN where a number was not seen.

        Raises: MissingExtraError if pandas is not installed.
        """
        self._collect()
        return self.series.to_frame()

    def plot(self, column: str = "max_logit", *, kind: str = "map", ax: Any = None) -> Any:
        """Draw one column: a ``map`` of every head over the steps, or ``curves``, the largest head of each layer.

        Returns: the `Axes`.

        Raises: MissingExtraError if matplotlib is not installed; UnknownChoiceError for a column that does not exist.
        """
        from wellcond.training.plot import plot_series

        self._collect()
        return plot_series(self.series, column, kind, ax)

    def write_layout(self, file: str | os.PathLike[str], *, prefix: str = "") -> None:
        """Write layouts of panels for TensorBoard and W&B, by layer and column, as JSON.

        Args:
            file: to write.
            prefix: what a trainer puts before the names that a callback logs: ``train/`` with `transformers.Trainer`.
        """
        from wellcond.training.plot import write_layout

        write_layout(self.series, file, prefix)

    # Hooks

    def _arm(self) -> None:
        due = self.is_due(self.num_steps + 1)
        if due and self._homes != [site.q.parameter.device for site in self.sites]:
            self._make_buffers()
        if due and not self._armed:
            self._hooks.attach()
        if not due and self._armed:
            self._hooks.detach()
        self._armed = due

    def _make_buffers(self) -> None:
        """On the devices where the weights are now."""
        self._homes = [site.q.parameter.device for site in self.sites]
        self._buffers, self._rows, self._places = {}, [], {}
        for site, device in zip(self.sites, self._homes, strict=True):
            self._rows.append((device, self._new_rows(site, device)))

    def _new_rows(self, site: AttentionSite, device: torch.device) -> slice:
        known, heads = self._buffers.get(device), site.num_heads
        first = 0 if known is None else len(known.sums)
        if known is None:
            self._buffers[device] = _Buffers.on(device, heads, len(self._means), len(self._maxima))
        else:
            self._buffers[device] = known.with_more(heads)
        return slice(first, first + heads)

    def _buffers_on(self, number: int, device: torch.device) -> _Buffers:
        """The buffers of a layer, where its pass runs: weights may be kept elsewhere, or the model was moved."""
        before = self._rows[number][0]
        if before != device:
            self._rows[number] = device, self._new_rows(self.sites[number], device)
            self._places = {}
            if all(on != before for on, _ in self._rows):
                del self._buffers[before]
        return self._buffers[device]

    def _see(self, number: int, call: LiveCall) -> None:
        values: dict[str, Tensor] = {}
        for column in self._columns:
            value = column.read(call)
            if isinstance(value, str):
                self._why[number].setdefault(column.name, value)
            else:
                values[column.name] = value.detach()
        if not values:
            return
        buffers = self._buffers_on(number, next(iter(values.values())).device)
        tensor = call.logits if call.q is None else call.q
        place = None if tensor is None else self._place(number, tensor.shape[1])
        if place is None:
            self._why[number] |= dict.fromkeys(values, "the heads of its kernel could not be separated")
            return
        heads, rows = place
        self._known[number].update(values)
        values = {name: _by_head(value, heads) for name, value in values.items()}
        self._add(buffers, rows, values)
        if "max_logit" in self._known[number]:
            self._exact[number] = call.logits is not None

    def _add(self, buffers: _Buffers, rows: slice, values: dict[str, Tensor]) -> None:
        """Add columns (samples, heads, numbers) to what the buffers hold; those of one shape go together."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for names, columns in _alike(values, self._means):
            finite = columns.isfinite()
            sums |= zip(names, torch.where(finite, columns, 0.0).sum((1, 3)), strict=True)
            counts |= zip(names, finite.sum((1, 3), dtype=torch.float32), strict=True)
        if sums:
            nothing = torch.zeros_like(next(iter(sums.values())))
            buffers.sums[rows].add_(torch.stack([sums.get(name, nothing) for name in self._means], 1))
            buffers.weights[rows].add_(torch.stack([counts.get(name, nothing) for name in self._means], 1))
        for names, columns in _alike(values, self._maxima):
            largest = columns.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amax((1, 3))
            for name, of_heads in zip(names, largest, strict=True):
                kept = buffers.maxima[rows, self._maxima.index(name)]
                torch.maximum(kept, of_heads, out=kept)

    def _stream(self, number: int, what: str, tensor: Tensor) -> None:
        buffers = self._buffers_on(number, tensor.device)
        rows, at = self._rows[number][1], self._means.index(f"_{what}")
        buffers.sums[rows, at] += torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).square()
        buffers.weights[rows, at] += tensor.numel()
        if what == "added":
            self._known[number].add(SHARE)

    def _place(self, number: int, heads: int) -> tuple[int, slice] | None:
        """Where the heads of a call are in the buffers; of tensor parallelism, those that this process has."""
        rows, site = self._rows[number][1], self.sites[number]
        if heads == site.num_heads:
            return heads, rows
        if (number, heads) not in self._places:
            self._places[number, heads] = _local_heads(site, heads, rows)
        local = self._places[number, heads]
        return None if local is None else (heads, local)

    # From the device to the host

    def _flush(self, measured: dict[str, Tensor]) -> None:
        tables = {device: buffers.reduce(self.group) for device, buffers in self._buffers.items()}
        grams = []
        if self._weights and (self.num_steps % self.weights_every == 0 or self.num_steps == self._first_step + 1):
            grams = [gram_matrices({role: slot.read() for role, slot in site.slots.items()}) for site in self.sites]
        copies = {device: _to_host(table) for device, table in tables.items()}
        flush = _Flush(self.num_steps, copies, list(self._rows), [], measured)
        flush.grams = [{role: _to_host(part) for role, part in of_site.items()} for of_site in grams]
        for device in self._buffers:
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                flush.ready.append(event)
        self._pending.append(flush)
        for buffers in self._buffers.values():
            buffers.clear()

    def _collect(self) -> None:
        pending, self._pending = self._pending, []
        for flush in pending:
            flush.wait()
            self.series.add(flush.step, self._finish(flush))
            if self.alarms is not None:
                self.alarms.look(self.series)

    def _finish(self, flush: _Flush) -> np.ndarray:
        """The numbers of a step as (heads, columns), from sums, weights, maxima and Gram matrices."""
        parts = [flush.tables[device][rows] for device, rows in flush.rows]
        table = torch.cat(parts).double()
        count = len(self._means)
        sums, weights, maxima = table[:, :count], table[:, count : 2 * count], table[:, 2 * count :]
        means = torch.where(weights > 0, sums / weights, torch.nan)
        raw = {name: means[:, at] for at, name in enumerate(self._means)}
        maxima = maxima.masked_fill(maxima == -torch.inf, torch.nan)
        raw |= {name: maxima[:, at] for at, name in enumerate(self._maxima)}
        shown = {column.name: raw[column.name].sqrt() if column.root else raw[column.name] for column in self._columns}
        if self._share:
            shown[SHARE] = (raw["_added"] / raw["_stream"]).sqrt()
        wrong = shown.pop(CHECK.name) > TOLERANCE
        if bool(wrong.any()):
            self._refuse(wrong, shown)
        shown |= self._of_weights(flush.grams) | flush.measured
        missing = torch.full((len(table),), torch.nan, dtype=torch.float64)
        return torch.stack([shown.get(name, missing) for name in self.series.columns], 1).numpy()

    def _refuse(self, wrong: Tensor, shown: dict[str, Tensor]) -> None:
        """Leave out what rests on the log-sum-exp of a foreign operator that is not one of its logits."""
        why = "what its kernel returns is not the log-sum-exp of its logits as the arguments say"
        first = 0
        for number, site in enumerate(self.sites):
            if bool(wrong[first : first + site.num_heads].any()):
                for name in ("max_logit", "max_logit_low", "first_share", "self_share", "logit_std", "entropy"):
                    if name in shown:
                        shown[name][first : first + site.num_heads] = torch.nan
                        self._known[number].discard(name)
                        self._why[number][name] = why
            first += site.num_heads

    def _of_weights(self, grams: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if not grams:
            return {}
        numbers = [circuit_numbers(g, site.num_heads) for g, site in zip(grams, self.sites, strict=True)]
        found = {name: torch.cat([one[name] for one in numbers]) for name in NUMBERS}
        before, self._grams = self._grams, grams
        pairs = zip(grams, before or [{}] * len(grams), self.sites, strict=True)
        found["weight_change"] = torch.cat([_change(now, then, site.num_heads) for now, then, site in pairs])
        return found


def _chosen_columns(names: Sequence[str] | None) -> list[Column]:
    if names is None:
        return list(COLUMNS.values())
    for name in names:
        if name not in COLUMNS and name != SHARE:
            raise UnknownChoiceError("column of AttentionMonitor", name, [*COLUMNS, SHARE])
    return [COLUMNS[name] for name in names if name != SHARE]


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


def _change(now: dict[str, Tensor], then: dict[str, Tensor], num_heads: int) -> Tensor:
    """The largest relative change of a Gram matrix since the last reading, per query head."""
    changes = [torch.full((num_heads,), torch.nan, dtype=torch.float64)]
    for role in ("q", "k", "v", "o"):
        if role in now and role in then:
            norm = now[role].flatten(1).norm(dim=1)
            change = (now[role] - then[role]).flatten(1).norm(dim=1) / norm
            changes.append(change.double().repeat_interleave(num_heads // len(change)))
    return torch.stack(changes).nan_to_num(nan=-1.0).amax(0).where(torch.tensor(len(changes) > 1), torch.nan)


def _local_heads(site: AttentionSite, heads: int, rows: slice) -> slice | None:
    """Rows of the heads that this process computes, by the shard of W_Q that it holds; None if they do not fit."""
    parameter = site.q.parameter
    if not is_distributed(parameter) or site.q.is_stacked or site.q.view is not None:
        return None
    inside = local_shard(parameter).inside(site.q.rows, 1 if site.q.transposed else 0).all(1)
    numbers = inside.nonzero().flatten().tolist()
    if len(numbers) != heads or numbers != list(range(numbers[0], numbers[0] + heads)):
        return None
    return slice(rows.start + numbers[0], rows.start + numbers[0] + heads)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU; of a GPU, one that is not waited for."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)

"""`AttentionMonitor`: every head while a model trains, read from the passes that the training makes anyway."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellcond.arguments import check_int, check_number
from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.find import find_attention
from wellcond.attention.live import LiveCall, LiveHooks
from wellcond.attention.sharding import process_number, reduce_, unwrap
from wellcond.attention.site import AttentionSite
from wellcond.errors import UnknownChoiceError
from wellcond.linalg.circuits import NUMBERS, circuit_numbers, gram_matrices
from wellcond.training.alarms import Alarms
from wellcond.training.columns import CHECK, COLUMNS, TOLERANCE, Column
from wellcond.training.series import Series
from wellcond.training.sums import STREAM, LayerSums
from wellcond.training.turns import JACOBIAN_COLUMNS, OneHeadAtATime

WEIGHT_COLUMNS = (*NUMBERS, "weight_change")
SHARE = "attention_share"
RESTS_ON_LSE = ("max_logit", "max_logit_low", "first_share", "self_share", "logit_std", "entropy")
WEIGHTS_EVERY = 50
"""Steps between two readings of the weights, unless the monitor reads more rarely."""


@dataclass(eq=False)
class _Flush:
    """What one step left on its way to the host."""

    step: int
    tables: list[tuple[list[int], Tensor]]
    """Of the layers of each device: their numbers, and their sums, weights and maxima."""
    grams: list[dict[str, Tensor]]
    measured: dict[str, Tensor]
    """Columns of the host's own."""
    copied: list[Any]
    """Events of the devices that copy."""


class AttentionMonitor:
    """Watches every head while a model trains; the training is the same bit for bit.

    The monitor reads the forward passes that the training makes: no pass of its own, no batch that is kept. Hooks are
    there on due steps only. They compute on the device, into buffers of fixed columns; what several microbatches see is
    accumulated, and what activation checkpointing computes again is not counted. `step` reduces the buffers over the
    processes (sums and maxima, one column at a time) and begins to copy them to the host, which reads them one step
    later. So nothing waits for the device within a step, and no process for another outside `step`. Of what was read,
    64 MB are in memory, and more in a temporary file.

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
        self._layers = [LayerSums(site, self._columns, stream=self._share) for site in self.sites]
        self._grams: list[dict[str, Tensor]] | None = None
        self._pending: list[_Flush] = []
        self._hooks = LiveHooks(model, self.sites, self._see, self._see_stream if self._share else None)
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
        """Call instead of `step` where only `max_logits` is used and nobody reads the other numbers."""
        self.num_steps += 1
        for layer in self._layers:
            layer.clear()
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
        if "max_logit" not in self.series.columns:
            raise ValueError("max_logits: this monitor was made without the column 'max_logit'; add it to columns")
        found: dict[str, Tensor] = {}
        for layers in self._by_device():
            at = layers[0].largest.index("max_logit")
            largest = torch.cat([layer.maxima[:, at] for layer in layers])
            if reduce:
                reduce_(largest, "MAX", self.group)
            parts = largest.masked_fill(largest == -torch.inf, torch.nan).split([one.site.num_heads for one in layers])
            found |= {layer.site.name: part for layer, part in zip(layers, parts, strict=True)}
        return {site.name: found[site.name] for site in self.sites}

    def exact(self) -> dict[str, bool | None]:
        """Whether `max_logit` of a layer is exact (True) or an upper bound (False); None while nothing was seen."""
        return {layer.site.name: layer.exact for layer in self._layers}

    @property
    def not_seen(self) -> dict[str, dict[str, str]]:
        """By layer, columns that were not seen so far, with the reasons."""
        found = {}
        for layer, why in zip(self._layers, self._hooks.why, strict=True):
            names = [column.name for column in self._columns if column is not CHECK and column.name not in layer.known]
            missing = {name: layer.why.get(name) or why for name in names}
            if self._share and SHARE not in layer.known:
                missing[SHARE] = "what its block receives or what it adds was not seen"
            if missing:
                found[layer.site.name] = missing
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
        if due:
            for layer in self._layers:
                layer.follow_weights()
        if due and not self._armed:
            self._hooks.attach()
        if not due and self._armed:
            self._hooks.detach()
        self._armed = due

    def _see(self, number: int, call: LiveCall) -> None:
        self._layers[number].see(call)

    def _see_stream(self, number: int, what: Any, tensor: Tensor) -> None:
        self._layers[number].see_stream(what, tensor)

    # From the device to the host

    def _by_device(self) -> list[list[LayerSums]]:
        groups: dict[torch.device, list[LayerSums]] = {}
        for layer in self._layers:
            groups.setdefault(layer.sums.device, []).append(layer)
        return list(groups.values())

    def _flush(self, measured: dict[str, Tensor]) -> None:
        tables, copied = [], []
        for layers in self._by_device():
            both = torch.cat([torch.cat([layer.sums, layer.weights], 1) for layer in layers])
            maxima = torch.cat([layer.maxima for layer in layers])
            reduce_(both, "SUM", self.group)
            reduce_(maxima, "MAX", self.group)
            tables.append(([self._layers.index(layer) for layer in layers], torch.cat([both, maxima], 1)))
        grams = []
        if self._weights and (self.num_steps % self.weights_every == 0 or self.num_steps == self._first_step + 1):
            grams = [gram_matrices({role: slot.read() for role, slot in site.slots.items()}) for site in self.sites]
        on_host = [(numbers, _to_host(table)) for numbers, table in tables]
        grams = [{role: _to_host(part) for role, part in of_site.items()} for of_site in grams]
        for _, table in tables:
            if table.device.type == "cuda":
                copied.append(torch.cuda.Event())
                copied[-1].record(torch.cuda.current_stream(table.device))
        self._pending.append(_Flush(self.num_steps, on_host, grams, measured, copied))
        for layer in self._layers:
            layer.clear()

    def _collect(self) -> None:
        pending, self._pending = self._pending, []
        for flush in pending:
            for event in flush.copied:
                event.synchronize()
            self.series.add(flush.step, self._finish(flush))
            if self.alarms is not None:
                self.alarms.look(self.series)

    def _finish(self, flush: _Flush) -> np.ndarray:
        """The numbers of a step as (heads, columns), from sums, weights, maxima and Gram matrices."""
        parts: dict[int, Tensor] = {}
        for numbers, of_device in flush.tables:
            sizes = [self.sites[number].num_heads for number in numbers]
            parts |= zip(numbers, of_device.split(sizes), strict=True)
        table = torch.cat([parts[number] for number in range(len(self.sites))]).double()
        means, largest = self._layers[0].means, self._layers[0].largest
        sums, weights, maxima = table.split([len(means), len(means), len(largest)], 1)
        raw = dict(zip(means, torch.where(weights > 0, sums / weights, torch.nan).unbind(1), strict=True))
        raw |= zip(largest, maxima.masked_fill(maxima == -torch.inf, torch.nan).unbind(1), strict=True)
        shown = {column.name: raw[column.name].sqrt() if column.root else raw[column.name] for column in self._columns}
        if self._share:
            stream, added = (raw[name] for name in STREAM)
            shown[SHARE] = (added / stream).sqrt()
        wrong = shown.pop(CHECK.name) > TOLERANCE
        if bool(wrong.any()):
            self._refuse(wrong, shown)
        shown |= self._of_weights(flush.grams) | flush.measured
        missing = torch.full((len(table),), torch.nan, dtype=torch.float64)
        return torch.stack([shown.get(name, missing) for name in self.series.columns], 1).numpy()

    def _refuse(self, wrong: Tensor, shown: dict[str, Tensor]) -> None:
        """Leave out what rests on the log-sum-exp of a foreign operator that is not one of its logits."""
        why = "what its kernel returns is not the log-sum-exp of its logits as the arguments say"
        for layer, (_, part) in zip(self._layers, self.series.parts, strict=True):
            for name in RESTS_ON_LSE if bool(wrong[part].any()) else ():
                if name in shown:
                    shown[name][part] = torch.nan
                    layer.known.discard(name)
                    layer.why[name] = why

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


def _change(now: dict[str, Tensor], then: dict[str, Tensor], num_heads: int) -> Tensor:
    """The largest relative change of a Gram matrix since the last reading, per query head."""
    changes = [torch.full((num_heads,), torch.nan, dtype=torch.float64)]
    for role in ("q", "k", "v", "o"):
        if role in now and role in then:
            norm = now[role].flatten(1).norm(dim=1)
            change = (now[role] - then[role]).flatten(1).norm(dim=1) / norm
            changes.append(change.double().repeat_interleave(num_heads // len(change)))
    return torch.stack(changes).nan_to_num(nan=-1.0).amax(0).where(torch.tensor(len(changes) > 1), torch.nan)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU; of a GPU, one that is not waited for."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)

"""Measured heads of one run as columns, and their means over heads and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wellcond.lab.report.run_record import Run
from wellcond.lab.report.values import number

ROLES = ("q", "k", "v")


# What the report reads of every row; the rows themselves are not kept, since there can be hundreds of thousands.
KEYS = (
    "step", "epoch", "condition_number", "pseudo_condition_number", "papers_bound_log10", "bound_log10",
    "normalised_entropy", "diagonal_mass", "dead", "norm_q", "norm_k", "norm_v",
    *(f"{prefix}{what}_{role}" for prefix in ("", "raw_") for what in ("kappa", "sigma_max", "sigma_min")
      for role in ROLES),
)  # fmt: skip


@dataclass(frozen=True)
class HeadTable:
    """Conditioning rows of one run, column by column."""

    run: Run
    layers: tuple[str, ...]
    """Names of layers, in the order of the model."""
    layer_index: np.ndarray
    columns: dict[str, np.ndarray]
    """Keys of `KEYS`, NaN where a value is null or absent; and `inexact`: the Jacobian is an estimate or a bound."""

    @cached_property
    def steps(self) -> np.ndarray:
        """Measured steps, rising."""
        return np.unique(self.columns["step"])

    @cached_property
    def step_index(self) -> np.ndarray:
        """Place of every row in `steps`."""
        return np.searchsorted(self.steps, self.columns["step"])

    def epochs(self) -> np.ndarray:
        """Epoch of every measured step."""
        found = np.full(len(self.steps), np.nan)
        found[self.step_index] = self.columns["epoch"]
        return found

    def over_steps(self, key: str, *, log: bool) -> np.ndarray:
        """Mean over heads and layers at every step: geometric with `log`, over finite values; NaN where none is."""
        return _grouped(self.columns[key], self.step_index, len(self.steps), log)

    def log10_over_steps(self, key: str) -> np.ndarray:
        """Like `over_steps` for a column that holds logarithms: their mean, back as a number, infinite above 1e300."""
        means = _grouped(self.columns[key], self.step_index, len(self.steps), log=False)
        return np.where(means > 300, np.inf, 10.0 ** np.minimum(means, 300))

    def by_layer(self, key: str) -> np.ndarray:
        """Geometric mean over heads, of shape (steps, layers)."""
        count = len(self.steps) * len(self.layers)
        index = self.step_index * len(self.layers) + self.layer_index
        return _grouped(self.columns[key], index, count, log=True).reshape(len(self.steps), len(self.layers))

    def at(self, key: str, step: float) -> np.ndarray:
        """Values of all heads at one step, where they are not NaN."""
        values = self.columns[key][self.columns["step"] == step]
        return values[~np.isnan(values)]

    def last_step(self, key: str) -> float | None:
        """Last step at which a quantity was measured, infinite included; None if it never was."""
        known = self.columns["step"][~np.isnan(self.columns[key])]
        return float(known.max()) if len(known) else None


def read_heads(run: Run) -> HeadTable | None:
    """Measured heads of a run; None if nothing was measured."""
    rows = run.conditioning
    if not rows:
        return None
    names = [str(row["layer"]) for row in rows]
    layers = tuple(dict.fromkeys(names))
    place = {name: at for at, name in enumerate(layers)}
    columns = {key: _floats([row.get(key) for row in rows]) for key in KEYS}
    columns["inexact"] = np.array([row.get("status") not in (None, "", "exact") for row in rows], dtype=float)
    return HeadTable(run, layers, np.array([place[name] for name in names]), columns)


def _floats(stored: list[Any]) -> np.ndarray:
    try:
        return np.array(stored, dtype=float)  # reads None, "inf" and "nan" as well
    except (TypeError, ValueError):
        return np.array([number(value) for value in stored], dtype=float)


def _grouped(values: np.ndarray, index: np.ndarray, count: int, log: bool) -> np.ndarray:
    usable = np.isfinite(values) & (values > 0) if log else np.isfinite(values)
    numbers = np.log10(values[usable]) if log else values[usable]
    sums = np.bincount(index[usable], weights=numbers, minlength=count)
    sizes = np.bincount(index[usable], minlength=count)
    means = np.full(count, np.nan)
    np.divide(sums, sizes, out=means, where=sizes > 0)
    return 10.0**means if log else means


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names of layers without the parts that all of them share.

    Example:
        >>> short_names(["blocks.0.attn", "blocks.1.attn"])
        {'blocks.0.attn': '0', 'blocks.1.attn': '1'}
        >>> short_names(["attn"])
        {'attn': 'attn'}
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return {name: name for name in names}
    shortest = min(map(len, parts))
    front = 0
    while front < shortest - 1 and len({part[front] for part in parts}) == 1:
        front += 1
    back = 0
    while back < shortest - 1 - front and len({part[len(part) - 1 - back] for part in parts}) == 1:
        back += 1
    return {name: ".".join(part[front : len(part) - back]) for name, part in zip(names, parts, strict=True)}

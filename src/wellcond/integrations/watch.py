"""`Watch`: a `ConditionTracker` whose points become a few numbers for a logger and lines of a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.files import to_json, write_atomically
from wellcond.integrations.common import geometric_mean
from wellcond.measurement.tracker import ConditionTracker, TrackPoint


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


Summaries = Sequence[tuple[str, str, Callable[[Sequence[float]], float]]]
"""Name in the log, field of a point, and how the heads are summed up."""
SUMMARIES: Summaries = [
    ("kappa_jacobian_worst", "condition_number", max),
    ("kappa_jacobian_mean", "condition_number", geometric_mean),
    ("pseudo_kappa_jacobian_worst", "pseudo_condition_number", max),
    ("pseudo_kappa_jacobian_mean", "pseudo_condition_number", geometric_mean),
    ("sigma_max_jacobian", "sigma_max", geometric_mean),
    ("sigma_min_jacobian", "sigma_rank", geometric_mean),
    *((f"kappa_{role}_worst", f"kappa_{role}", max) for role in "qkv"),
    *((f"kappa_{role}_mean", f"kappa_{role}", geometric_mean) for role in "qkv"),
    *((f"sigma_max_{role}", f"sigma_max_{role}", geometric_mean) for role in "qkv"),
    *((f"sigma_min_{role}", f"sigma_min_{role}", geometric_mean) for role in "qkv"),
    ("entropy", "normalised_entropy", mean),
    ("logit_std", "logit_std", mean),
    ("dead_heads", "dead", sum),
]
OF_JACOBIAN = ("condition_number", "pseudo_condition_number", "sigma_max", "sigma_rank")
FIELDS = list(dict.fromkeys(field for _, field, _ in SUMMARIES))


class Watch:
    """Measures while a model trains.

    Args:
        model: what is measured.
        batch: what it is called with.
        file: where every point is added as a line of JSON; None for no file.
        per_layer: summaries of each layer as well as of the model.
        first_step: steps trained before. Lines of later steps, from a run that was cut off, are removed.
        begun: when the caller began to prepare for measuring, by `time.perf_counter`: that counts as measuring.
        **options: of `ConditionTracker`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        file: Path | None,
        per_layer: bool = False,
        first_step: int = 0,
        begun: float | None = None,
        **options: Any,
    ) -> None:
        """Measure step 0, if it is due and training starts there."""
        begun = time.perf_counter() if begun is None else begun
        self.file, self.per_layer = file, per_layer
        self.latest: dict[tuple[str, int], dict[str, float]] = {}
        self.unlogged = self.unlogged_jacobian = False
        if file is not None:
            _keep_lines_until(file, first_step)
        self.tracker = ConditionTracker(model, batch, first_step=first_step, **options)
        self._take(self.tracker.points)
        self.tracker.charge(time.perf_counter() - begun - self.tracker.allowance.spent)  # what it has not counted

    def step(self) -> list[TrackPoint]:
        """Call after every step of the optimiser; what was measured now."""
        points = self.tracker.step()
        self._take(points)
        return points

    def close(self) -> list[TrackPoint]:
        """Call after the last step: measures it, and says how much the budget allowed."""
        points = self.tracker.close()
        self._take(points)
        return points

    def _take(self, points: list[TrackPoint]) -> None:
        if not points:
            return
        self.unlogged = True
        self.unlogged_jacobian |= any(point.condition_number is not None for point in points)
        for point in points:
            values = {field: getattr(point, field) for field in FIELDS}
            # A head measured without its Jacobian keeps the Jacobian of last time.
            known = {field: value for field, value in values.items() if value is not None}
            self.latest.setdefault((point.layer, point.head), {}).update(known)
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as out:
                out.writelines(point.to_line(self.tracker.run) + "\n" for point in points)

    def new_summary(self) -> dict[str, float]:
        """The latest numbers of all heads, if some are new; those of Jacobians only where one of these is."""
        if not self.unlogged:
            return {}
        left_out = () if self.unlogged_jacobian else OF_JACOBIAN
        latest = {head: {field: value for field, value in numbers.items() if field not in left_out}
                  for head, numbers in self.latest.items()}  # fmt: skip
        self.unlogged = self.unlogged_jacobian = False
        summary = _summarise_all("wellcond/", list(latest.values()))
        if self.per_layer:
            for layer in dict.fromkeys(layer for layer, _ in latest):
                heads = [numbers for (name, _), numbers in latest.items() if name == layer]
                summary |= _summarise_all(f"wellcond/{layer}/", heads)
        summary["wellcond/seconds"] = self.tracker.allowance.spent
        if math.isfinite(self.tracker.overhead):  # something was trained
            summary["wellcond/overhead"] = self.tracker.overhead
        return summary


def summarise(prefix: str, heads: list[dict[str, Any]], summaries: Summaries) -> dict[str, float]:
    """Numbers of heads summed up, each under its name; loggers want finite ones, so others are left out."""
    found = {}
    for name, field, sum_up in summaries:
        known = [numbers[field] for numbers in heads if numbers.get(field) is not None]
        if values := [value for value in known if math.isfinite(value)]:
            found[prefix + name] = float(sum_up(values))
    return found


def _summarise_all(prefix: str, heads: list[dict[str, float]]) -> dict[str, float]:
    found = summarise(prefix, heads, SUMMARIES)
    measured = [numbers["condition_number"] for numbers in heads if "condition_number" in numbers]
    if measured:
        found[prefix + "heads_without_finite_kappa"] = float(sum(not math.isfinite(value) for value in measured))
    return found


def _keep_lines_until(file: Path, step: int) -> None:
    """Remove what an interrupted run wrote after its checkpoint; a run from the start starts a new file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if step and file.exists():
        for line in file.read_text("utf-8").splitlines():
            try:
                point = json.loads(line)
            except ValueError:
                continue  # cut off while it was written
            if point["step"] <= step:
                kept.append(to_json(point) + "\n")
    write_atomically(file, "".join(kept))

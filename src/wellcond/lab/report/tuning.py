"""The search before a comparison: scores over the tuned values, the best, and how wide the range of good values is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from wellcond.errors import RunRecordError
from wellcond.lab.records import TUNING, Comparison, Metric
from wellcond.lab.report.figures import HIGH, LOW, MEAN, Figure, Panel, Row
from wellcond.lab.report.table import MISSING, Cell, Table, number

NAME, KIND = "tuning.json", TUNING
SHARE = 0.02
"""Loss that still counts as good: of 1 for percentages, of the best score for others."""


@dataclass(frozen=True)
class TunedPoint:
    """Scores of a method at one set of values."""

    values: Mapping[str, float]
    scores: Mapping[str, float]
    """By seed; NaN for a run that diverged."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TunedPoint:
        """A point of the record."""
        if not row["scores"]:
            raise ValueError("a point without scores")
        scores = {str(seed): number(score) for seed, score in row["scores"].items()}
        return cls({str(field): float(value) for field, value in row["values"].items()}, scores)

    def describe(self) -> dict[str, Any]:
        """The point as the record has it; mean and standard deviation are of the seeds that did not diverge."""
        return {
            "values": dict(self.values),
            "scores": {seed: None if math.isnan(score) else score for seed, score in self.scores.items()},
            "diverged": [int(seed) for seed, score in self.scores.items() if math.isnan(score)],
            "mean": statistics.fmean(self.known) if self.known else None,
            "std": statistics.stdev(self.known) if len(self.known) > 1 else None,
        }

    @property
    def known(self) -> list[float]:
        """Scores of the runs that did not diverge."""
        return [score for score in self.scores.values() if not math.isnan(score)]

    @property
    def lost(self) -> int:
        """Number of runs that diverged."""
        return len(self.scores) - len(self.known)

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN if one of them diverged."""
        return statistics.fmean(self.scores.values())

    @property
    def std(self) -> float:
        """Standard deviation over seeds; NaN if one of them diverged, or there is only one."""
        return statistics.stdev(self.known) if len(self.scores) > 1 and not self.lost else math.nan

    def rank(self, higher_is_better: bool) -> tuple[int, float, list[float]]:
        """Sorts points from the best mean, the smaller values of equals; one with a diverged seed after all others."""
        mean = statistics.fmean(self.known or [0.0])
        return self.lost, -mean if higher_is_better else mean, list(self.values.values())


@dataclass(frozen=True)
class TunedMethod:
    """What was found for one method."""

    label: str
    points: tuple[TunedPoint, ...]
    """The best first."""
    at_edge: Mapping[str, str]

    @property
    def best(self) -> TunedPoint:
        """The point at which the method is compared."""
        return self.points[0]

    def profile(self, field: str) -> list[TunedPoint]:
        """The best point at each value of a field, by value; with one field that is every point."""
        found = {point.values[field]: point for point in reversed(self.points)}
        return [found[value] for value in sorted(found)]

    def loss(self, point: TunedPoint) -> float:
        """How much worse than the best a point is; infinite where a run diverged."""
        return math.inf if point.lost or self.best.lost else abs(self.best.mean - point.mean)


class GoodRange(NamedTuple):
    """Values of a field around the best at which a method loses no more than the tolerance."""

    low: float
    open_below: bool
    """Whether it reaches the end of what was tried."""
    high: float
    open_above: bool

    def show(self) -> str:
        """Both ends, and how wide that is."""
        ends = f"{self.low:.3g}{' or less' * self.open_below} to {self.high:.3g}{' or more' * self.open_above}"
        least = "at least " if self.open_below or self.open_above else ""
        return f"{ends} ({least}{self.high / self.low:.1f}x wide)" if self.low > 0 else ends


@dataclass(frozen=True)
class Tuning:
    """A search, as its record has it."""

    metric: Metric
    fields: tuple[str, ...]
    methods: tuple[TunedMethod, ...]
    seeds: tuple[str, ...]
    scored: str
    test_data: str

    @property
    def tolerance(self) -> float:
        """Loss that counts as good, as stored: 2 points of a percentage, else 2 % of the best score; NaN without one.

        Not a spread: two seeds tell too little of it, and one method that learns nothing would widen all ranges.
        """
        if self.metric.percent:
            return SHARE
        best = [abs(method.best.mean) for method in self.methods if not method.best.lost]
        return SHARE * (max(best) if self.metric.higher_is_better else min(best)) if best else math.nan

    def good_range(self, method: TunedMethod, field: str) -> GoodRange | None:
        """Where the mean stays within the tolerance of the best; None where a run diverged even there.

        From the best value outwards, up to the first value that is worse. Between it and its neighbour the mean is
        interpolated over the logarithm of the value; where a run diverged the range ends at the neighbour.
        """
        if method.best.lost:
            return None
        points = method.profile(field)
        at = points.index(method.best)
        return GoodRange(*self._end(method, field, points[at::-1]), *self._end(method, field, points[at:]))

    def _end(self, method: TunedMethod, field: str, points: Sequence[TunedPoint]) -> tuple[float, bool]:
        """Where the range ends among points from the best outwards, and whether it is the last that was tried."""
        for inside, outside in pairwise(points):
            near, far = inside.values[field], outside.values[field]
            first, last = method.loss(inside), method.loss(outside)
            if last > self.tolerance:
                share = (self.tolerance - first) / (last - first)  # zero where a run diverged
                return near * (far / near) ** share if min(near, far) > 0 else near, False
        return points[-1].values[field], True


def find_tuning(comparison: Comparison) -> Tuning | None:
    """The search of a comparison; None if there was none, or it found nothing."""
    if comparison.search is None:
        return None
    record, found = comparison.search, {}
    try:
        metric = Metric.of(record["metric"])
        for row in record["methods"]:
            points = sorted(map(TunedPoint.of, row["points"]), key=lambda point: point.rank(metric.higher_is_better))
            if points:
                found[str(row["label"])] = TunedMethod(str(row["label"]), tuple(points), dict(row["at_edge"]))
        fields, seeds = (tuple(map(str, record[key])) for key in ("fields", "seeds"))
        said = str(record["scored"]), str(record["test_data"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"has no record of a search ({error!r})"
        raise RunRecordError(comparison.folder, problem, "Run the comparison again.") from error
    methods = tuple(found[label] for label in comparison.methods if label in found)
    return Tuning(metric, fields, methods, seeds, *said) if methods else None


def tuning_figure(comparison: Comparison, tuning: Tuning) -> Figure:
    """Score over every tuned field, a panel each."""
    label, panels = f"{tuning.metric.label}, evaluation split", []
    for field in tuning.fields:
        rows, tuned = [], [method for method in tuning.methods if field in method.best.values]
        for method, point in [(one, point) for one in tuned for point in one.profile(field)]:
            spread = 0.0 if len(point.scores) == 1 else point.std
            ends = {MEAN: point.mean, LOW: point.mean - spread, HIGH: point.mean + spread}
            rows += [
                Row(method.label, seed, point.values[field], math.nan, value * tuning.metric.scale)
                for seed, value in (dict(point.scores) | ends).items()
            ]
        panels.append(Panel(field, "", label, rows, x_label=field.replace("optimizer.lr", "learning rate")))
    profile = " Each point is the best over the other fields." if len(tuning.fields) > 1 else ""
    caption = (
        f"Lines are means over the tuning seeds ({', '.join(tuning.seeds)}), bands are one standard deviation. A line "
        f"ends or breaks where a run diverged.{profile}"
    )
    over = " and ".join(tuning.fields).replace("optimizer.lr", "learning rate")
    title = f"{tuning.metric.name.capitalize()} over {over}"
    return Figure("tuning", "Tuning", title, caption, tuple(panels), comparison.methods, comparison.scale)


def tuning_table(tuning: Tuning) -> Table:
    """Best values and the width of the good range, one row for each method and field."""
    metric = tuning.metric
    rows: list[dict[str, Cell]] = []
    for method, field in [(tuned, field) for tuned in tuning.methods for field in tuned.best.values]:
        good, best = tuning.good_range(method, field), method.best
        tried = [point.values[field] for point in method.profile(field)]
        lost, edge = sum(point.lost for point in method.points), " (at the edge)" if field in method.at_edge else ""
        rows.append(
            {
                "method": (method.label, {"method": method.label}),
                "field": (field.replace("optimizer.lr", "learning rate"), {"field": field}),
                "best value": (
                    f"{best.values[field]:.3g}{edge}",
                    {"best": best.values[field], "at_edge": method.at_edge.get(field, ""), "metric": metric.label},
                ),
                f"{metric.label}, mean": (metric.show(best.mean), {"mean": best.mean * metric.scale}),
                "std": (metric.show(best.std), {"sd": best.std * metric.scale}),
                "values tried": (
                    f"{len(tried)}, {tried[0]:.3g} to {tried[-1]:.3g}",
                    {"values_tried": len(tried), "lowest_tried": tried[0], "highest_tried": tried[-1]},
                ),
                "diverged runs": (str(lost), {"diverged": lost}),
                "within the tolerance": (
                    good.show() if good else MISSING,
                    {"good_low": good.low if good else None, "good_high": good.high if good else None},
                ),
            }
        )
    notes = [
        f"Scored by the {tuning.scored}, seeds {', '.join(tuning.seeds)}; the best mean was chosen, the smaller value "
        "of equals, and a value at which a run diverged only after all others.",
        f"The comparison is of other seeds, on {tuning.test_data}.",
    ]
    if not math.isnan(tuning.tolerance):
        share = "" if metric.percent else f", {100 * SHARE:g} % of the best score"
        notes.append(
            f"Tolerance: {metric.show(tuning.tolerance)}{metric.unit}{share}. Between two values the mean is "
            "interpolated over the logarithm; `or more` and `or less` are ends of what was tried."
        )
    if edges := [method.label for method in tuning.methods if method.at_edge]:
        notes.append(f"Best at the edge of what was tried, so perhaps not the best there is: {', '.join(edges)}.")
    return Table.of("tuning", "Best values and how much they matter", rows, notes, (0, 1, 5, 7))

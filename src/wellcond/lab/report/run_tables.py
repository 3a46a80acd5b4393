"""Tables of single runs and of what they cost."""

from __future__ import annotations

import math

from wellcond.lab.report.analysis import Analysis, seconds_per_step
from wellcond.lab.report.table import Table
from wellcond.lab.report.table_values import Values
from wellcond.lab.report.training_figures import PARTS
from wellcond.lab.report.values import MISSING, number, show


def time_notes(analysis: Analysis) -> list[str]:
    """Why times of steps are missing."""
    runs = analysis.not_alone
    finished = [run for run in analysis.comparison.runs if run.finished]
    if not runs:
        return []
    named = "" if len(runs) == len(finished) else f": {', '.join(f'{run.method}, seed {run.seed}' for run in runs)}"
    return [f"Times that were not measured alone on their cores are those of the company, and left out{named}."]


def seed_table(analysis: Analysis) -> Table:
    """One row per run."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    tested = comparison.tested
    header = (
        "method", "seed", "status", *((comparison.result.label, "tested step") if tested else (metric.label,)),
        "difference", *((f"last {metric.label}",) if tested else ()), "loss", f"best {metric.label}", "step", "of",
        "seconds", "reason",
    )  # fmt: skip
    rows = []
    values: list[Values] = []
    for method in comparison.methods:
        for run in comparison.of(method):
            final, best, progress = (run.record.get(key) or {} for key in ("final", "best", "progress"))
            difference = analysis.differences.get(method)
            paired = math.nan if difference is None else difference.values.get(run.seed, math.nan)
            seconds = sum(x for x in map(number, (run.record.get("seconds") or {}).values()) if math.isfinite(x))
            last, on_test = metric.show(run.value), (metric.show(run.test_value), show(run.test.get("step"), 9))
            rows.append(
                (
                    method, str(run.seed), run.outcome if run.outcome != "partial" else f"partial ({run.status})",
                    *(on_test if tested else (last,)), metric.show(paired, sign=True), *((last,) if tested else ()),
                    show(final.get("loss"), 4), metric.show(number(best.get(metric.name))),
                    show(progress.get("step"), 9), show(progress.get("num_steps"), 9), show(seconds),
                    str(run.record.get("reason") or ""),
                )
            )  # fmt: skip
            values.append(
                {
                    "method": method, "seed": run.seed, "status": run.outcome, "metric": comparison.result.label,
                    "test": run.test_value * metric.scale if tested else None,
                    "tested_step": number(run.test.get("step")) if tested else None,
                    "last": run.value * metric.scale, "difference": paired * metric.scale,
                    "loss": number(final.get("loss")), "best": number(best.get(metric.name)) * metric.scale,
                    "step": number(progress.get("step")), "num_steps": number(progress.get("num_steps")),
                    "seconds": seconds, "reason": str(run.record.get("reason") or ""),
                }
            )  # fmt: skip
    note = "A run that diverged shows its last value before it did."
    words = frozenset({0, 2, len(header) - 1})
    return Table("seeds", "Every run", header, tuple(rows), (note,), words, tuple(values))


def cost_table(analysis: Analysis) -> Table:
    """Time and memory, means over finished runs."""
    comparison = analysis.comparison
    header = ("method", "seconds per step", "relative", "samples per second", *(f"{part}, s" for part in PARTS),
              "peak memory, MB")  # fmt: skip
    rows = []
    values: list[Values] = []
    for method in comparison.methods:
        runs = list(comparison.finished(method).values())
        alone = [run for run in runs if run.alone]

        def mean(values: list[float]) -> float:
            known = [value for value in values if math.isfinite(value)]
            return math.fsum(known) / len(known) if known else math.nan

        parts = [mean([number((run.record.get("seconds") or {}).get(part)) for run in alone]) for part in PARTS]
        ratio, step = analysis.step_ratio(method), mean([seconds_per_step(run) for run in runs])
        rate = mean([number(run.record.get("samples_per_second")) for run in alone])
        memory = mean([number(run.record.get("peak_memory_bytes")) / 1e6 for run in runs])
        named: Values = {f"{part}_seconds": seconds for part, seconds in zip(PARTS, parts, strict=True)}
        first: Values = {"method": method, "seconds_per_step": step, "relative": ratio, "samples_per_second": rate}
        values.append(first | named | {"peak_memory_mb": memory})
        rows.append(
            (
                method,
                show(step),
                MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
                show(rate, 4),
                *(show(part) for part in parts),
                show(memory, 4),
            )
        )
    note = f"Means over finished runs; relative is to {comparison.baseline} of the same seed."
    return Table("cost", "Cost", header, tuple(rows), (note, *time_notes(analysis)), values=tuple(values))

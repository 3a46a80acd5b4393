"""Tables of runs: conditioning at the end, every seed, cost, other metrics, provenance."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

from wellcond.lab.report.analysis import ROLES, Analysis, seconds_per_step
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.records import Metric
from wellcond.lab.report.statistics import LogSummary, Summary, summarise_logs
from wellcond.lab.report.table import (
    PLUS_MINUS,
    Table,
    Values,
    interval_values,
    kappa_values,
    show_kappa,
    show_mean,
    show_share,
)
from wellcond.lab.report.values import INFINITE, MISSING, finite_mean, number, show

PARTS = ("training", "evaluation", "measuring", "checkpointing", "setup")
"""Of the wall time of a run."""
NO_METRICS = ("step", "epoch", "loss", "train_loss", "seconds", "constant")
"""Numbers of an evaluation that are no scores."""
MOST_SHOWN = 4


def conditioning_table(analysis: Analysis) -> Table | None:
    """Conditioning at the end, means and intervals on log10 over seeds: a row per method, None if none was measured."""
    baseline = analysis.comparison.baseline
    header = (
        "method", "κ(J) [95 % interval]", f"factor to {baseline} [95 % interval]", "κ(J) finite", "strict κ(J) finite",
        "log₁₀ true bound", "log₁₀ papers' bound (not a bound)", *(f"κ of W_{role.upper()}" for role in ROLES),
        "entropy / ln N, start to end", "dead heads at end",
    )  # fmt: skip
    pseudo_key, bounds = "pseudo_condition_number", ("bound_log10", "papers_bound_log10")
    base = _last(analysis, baseline, pseudo_key)
    rows = []
    for method in [method for method in analysis.comparison.methods if analysis.tables(method)]:
        kappas = _last(analysis, method, pseudo_key)
        pseudo, strict = (analysis.last_jacobian(method, key) for key in (pseudo_key, "condition_number"))
        first, last = (analysis.attention(method, last=at_end) for at_end in (False, True))
        known = not pseudo.infinite and not analysis.last_jacobian(baseline).infinite and method != baseline
        factor = summarise_logs([kappas[seed] / base[seed] for seed in sorted(set(kappas) & set(base)) if known])
        over_seeds, weights = _over_seeds(analysis, method, pseudo_key), [
            _over_seeds(analysis, method, f"kappa_{role}") for role in ROLES
        ]  # fmt: skip
        logs = [finite_mean(finite_mean(table.at_end(key)) for table in analysis.tables(method)) for key in bounds]
        cells = (
            method, show_kappa(over_seeds, interval=True), show_kappa(factor, interval=True) if known else MISSING,
            f"{pseudo.finite}/{pseudo.total}", f"{strict.finite}/{strict.total}",
            *(_show_log(mean, analysis.last_jacobian(method, key)) for mean, key in zip(logs, bounds, strict=True)),
            *map(show_kappa, weights),
            MISSING if first is None or last is None else f"{first.entropy:.2f} → {last.entropy:.2f}",
            MISSING if last is None else f"{last.dead}/{last.heads}",
        )  # fmt: skip
        values: Values = {
            "method": method, **kappa_values(over_seeds, "kappa_j"), "factor": factor.geometric_mean,
            **interval_values(factor.interval, prefix="factor_"), "finite": pseudo.finite,
            "strict_finite": strict.finite, "heads_measured": pseudo.total,
            **{f"{key}_mean": mean for key, mean in zip(bounds, logs, strict=True)},
            **{f"kappa_{role}": kappa.geometric_mean for role, kappa in zip(ROLES, weights, strict=True)},
            "normalised_entropy_start": None if first is None else first.entropy,
            "normalised_entropy_end": None if last is None else last.entropy,
            "dead_heads": None if last is None else last.dead,
        }  # fmt: skip
        rows.append((cells, values))
    note = (
        "Geometric means over heads and layers at the last measurement of each run, then over seeds; intervals by the "
        "t distribution on log₁₀ of the seeds, from three seeds on. κ(J) is over the non-zero spectrum; the strict "
        "one is infinite where the rank is not full. Infinite values are in no mean: their share is shown, and "
        "there is no factor. A saturated or dead head can have a small κ(J) and learn nothing."
    )
    return Table.of("conditioning", "Conditioning at the end", header, rows, (note,)) if rows else None


def _over_seeds(analysis: Analysis, method: str, key: str) -> LogSummary:
    """Mean and interval over seeds, with the counts of finite and infinite heads."""
    heads = analysis.last_jacobian(method, key)
    summary = summarise_logs(_last(analysis, method, key).values())
    return replace(summary, finite=heads.finite, infinite=heads.infinite)


def _last(analysis: Analysis, method: str, key: str) -> dict[int, float]:
    """Geometric mean over heads and layers at the last measurement, by seed."""
    found = {table.run.seed: summarise_logs(table.at_end(key)).geometric_mean for table in analysis.tables(method)}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _show_log(mean: float, heads: LogSummary) -> str:
    if math.isnan(mean):
        return INFINITE if heads.infinite else MISSING
    return f"{mean:.2f}" + (f" ({INFINITE} in {show_share(heads.infinite_share)})" if heads.infinite else "")


def other_metrics_table(analysis: Analysis) -> Table | None:
    """Metrics besides the one that runs are judged by, such as perplexity per word; None if there is none."""
    comparison = analysis.comparison
    part = "test" if comparison.tested else "final"
    known = {*NO_METRICS, "weights", comparison.metric.name}
    names = list(dict.fromkeys(n for run in comparison.runs if run.finished for n in run.part(part) if n not in known))
    rows = []
    for method in comparison.methods:
        cells = [method]
        values: Values = {"method": method}
        for name in names:
            scores = {seed: number(run.part(part).get(name)) for seed, run in comparison.finished(method).items()}
            summary = Summary({seed: value for seed, value in scores.items() if math.isfinite(value)})
            cells.append(show_mean(summary.mean, summary.std, Metric(name, higher_is_better=True, percent=False)))
            values |= {f"{name}_mean": summary.mean, f"{name}_sd": summary.std, f"{name}_n": summary.count}
        rows.append((tuple(cells), values))
    on = f"On the test split, {comparison.tested_weights}" if comparison.tested else "At the last evaluation"
    note = f"{on}; mean {PLUS_MINUS} std of finished runs, each number as it was recorded."
    header = ("method", *(name.replace("_", " ") for name in names))
    return Table.of("other_metrics", "Other metrics", header, rows, (note,)) if names else None


def time_notes(analysis: Analysis) -> list[str]:
    """Why times of steps are missing."""
    finished = [run for run in analysis.comparison.runs if run.finished]
    runs = [run for run in finished if not run.alone]
    if not runs:
        return []
    named = "" if len(runs) == len(finished) else f": {', '.join(f'{run.method}, seed {run.seed}' for run in runs)}"
    return [f"Times that were not measured alone on their cores are those of the company, and left out{named}."]


def seed_table(analysis: Analysis) -> Table:
    """One row per run."""
    comparison, metric, tested = analysis.comparison, analysis.comparison.metric, analysis.comparison.tested
    header = (
        "method", "seed", "status", *((comparison.result.label, "tested step") if tested else (metric.label,)),
        "difference", *((f"last {metric.label}",) if tested else ()), "loss", f"best {metric.label}", "step", "of",
        "seconds", "reason",
    )  # fmt: skip
    rows = []
    for run in [run for method in comparison.methods for run in comparison.of(method)]:
        test, progress, difference = run.part("test"), run.part("progress"), analysis.differences.get(run.method)
        paired = math.nan if difference is None else difference.values.get(run.seed, math.nan)
        seconds = sum(x for x in map(number, run.part("seconds").values()) if math.isfinite(x))
        loss, best = number(run.part("final").get("loss")), number(run.part("best").get(metric.name))
        step, num_steps = number(progress.get("step")), number(progress.get("num_steps"))
        reason, last = str(run.record.get("reason") or ""), metric.show(run.value)
        cells = (
            run.method, str(run.seed), run.outcome if run.outcome != "partial" else f"partial ({run.status})",
            *((metric.show(run.test_value), show(test.get("step"), 9)) if tested else (last,)),
            metric.show(paired, sign=True), *((last,) if tested else ()), show(loss, 4), metric.show(best),
            show(step, 9), show(num_steps, 9), show(seconds), reason,
        )  # fmt: skip
        values: Values = {
            "method": run.method, "seed": run.seed, "status": run.outcome, "metric": comparison.result.label,
            "test": run.test_value * metric.scale if tested else None,
            "tested_step": number(test.get("step")) if tested else None, "last": run.value * metric.scale,
            "difference": paired * metric.scale, "loss": loss, "best": best * metric.scale, "step": step,
            "num_steps": num_steps, "seconds": seconds, "reason": reason,
        }  # fmt: skip
        rows.append((cells, values))
    note = "A run that diverged shows its last value before it did."
    return Table.of("seeds", "Every run", header, rows, (note,), (0, 2, len(header) - 1))


def cost_table(analysis: Analysis) -> Table:
    """Time and memory, means over finished runs."""
    comparison = analysis.comparison
    header = ("method", "seconds per step", "relative", "samples per second", *(f"{part}, s" for part in PARTS),
              "peak memory, MB")  # fmt: skip
    rows = []
    for method in comparison.methods:
        runs = list(comparison.finished(method).values())
        alone = [run for run in runs if run.alone]
        parts = [finite_mean(number(run.part("seconds").get(part)) for run in alone) for part in PARTS]
        ratio, step = analysis.step_ratio(method), finite_mean(map(seconds_per_step, runs))
        rate = finite_mean(number(run.record.get("samples_per_second")) for run in alone)
        memory = finite_mean(number(run.record.get("peak_memory_bytes")) / 1e6 for run in runs)
        cells = (
            method, show(step), MISSING if math.isnan(ratio) else f"{ratio:.2f} ×", show(rate, 4), *map(show, parts),
            show(memory, 4),
        )  # fmt: skip
        values: Values = {
            "method": method, "seconds_per_step": step, "relative": ratio, "samples_per_second": rate,
            **{f"{part}_seconds": seconds for part, seconds in zip(PARTS, parts, strict=True)},
            "peak_memory_mb": memory,
        }  # fmt: skip
        rows.append((cells, values))
    note = f"Means over finished runs; relative is to {comparison.baseline} of the same seed."
    return Table.of("cost", "Cost", header, rows, (note, *time_notes(analysis)))


def data_of(comparison: Comparison) -> str:
    """The data that ran, in words."""
    data = next((run.part("data") for run in comparison.runs if run.part("data")), {})
    return str(data.get("description") or data.get("name") or "not recorded")


def provenance_table(comparison: Comparison) -> Table:
    """With which versions, on what, and with which settings the runs were made: what they share, where they differ."""
    runs = comparison.runs
    rows = [
        (f"{part}: {key}", plain_setting(value))
        for part in ("data", "model")
        for key, value in sorted(runs[0].part(part).items())
    ]
    sessions = [session for run in runs for session in run.sessions]
    skipped = ("started", "resumed_at_step")
    rows += [(f"session: {key}", text) for key, text in _shared(sessions) if key not in skipped]
    if resumed := sum(len(run.sessions) > 1 for run in runs):
        rows.append(("resumed runs", str(resumed)))
    rows += [(f"recipe: {key}", text) for key, text in _shared([run.part("config") for run in runs])]
    return Table("provenance", "Versions, machine and settings", ("item", "value"), tuple(rows), (), frozenset({0, 1}))


def _shared(mappings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Settings of several runs with dotted names, and which of their values differ."""
    found, flat = [], [_flat(mapping) for mapping in mappings]
    for key in sorted({key for settings in flat for key in settings}):
        values = list(dict.fromkeys(settings.get(key, "not set") for settings in flat))
        more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
        differing = f"differs between runs: {'; '.join(values[:MOST_SHOWN])}{more}"
        found.append((key, values[0] if len(values) == 1 else differing))
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict) or not (value or not prefix):
        return {prefix: plain_setting(value)}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def plain_setting(value: Any) -> str:
    """Text of a value; of a path only its last part, since where things lay is nobody's business."""
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True)
    if re.match(r"(/|~|[A-Za-z]:[\\/]).*[^/\\]$", value):
        return "…/" + re.split(r"[/\\]", value)[-1]
    return value

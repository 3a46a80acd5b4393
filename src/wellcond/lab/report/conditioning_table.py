"""Table of conditioning at the end: means and intervals on log10, over seeds."""

from __future__ import annotations

import math
from dataclasses import replace

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.formats import show_kappa, show_share
from wellcond.lab.report.head_table import ROLES, HeadTable
from wellcond.lab.report.statistics import LogSummary, summarise_logs
from wellcond.lab.report.table import Table
from wellcond.lab.report.table_values import Values, interval_values, kappa_values
from wellcond.lab.report.values import INFINITE, MISSING


def conditioning_table(analysis: Analysis) -> Table:
    """One row per method that was measured."""
    baseline = analysis.comparison.baseline
    header = (
        "method", "κ(J) [95 % interval]", f"factor to {baseline} [95 % interval]", "κ(J) finite", "strict κ(J) finite",
        "log₁₀ true bound", "log₁₀ papers' bound (not a bound)", *(f"κ of W_{role.upper()}" for role in ROLES),
        "entropy / ln N, start to end", "dead heads at end",
    )  # fmt: skip
    base = _last(analysis, baseline, "pseudo_condition_number")
    rows = []
    values: list[Values] = []
    for method in analysis.comparison.methods:
        if not analysis.tables(method):
            continue
        kappas = _last(analysis, method, "pseudo_condition_number")
        factors = [kappas[seed] / base[seed] for seed in sorted(set(kappas) & set(base))]
        pseudo, strict = (analysis.last_jacobian(method, k) for k in ("pseudo_condition_number", "condition_number"))
        first, last = (analysis.attention(method, last=at_end) for at_end in (False, True))
        known = not pseudo.infinite and not analysis.last_jacobian(baseline).infinite and method != baseline
        over_seeds = _over_seeds(analysis, method, "pseudo_condition_number")
        factor = summarise_logs(factors if known else [])
        values.append(
            {"method": method}
            | kappa_values(over_seeds, "kappa_j")
            | {"factor": factor.geometric_mean if known else math.nan}
            | interval_values(factor.interval, prefix="factor_")
            | {"finite": pseudo.finite, "strict_finite": strict.finite, "heads_measured": pseudo.total}
            | {f"{key}_mean": _log_mean(analysis, method, key) for key in ("bound_log10", "papers_bound_log10")}
            | {f"kappa_{role}": _over_seeds(analysis, method, f"kappa_{role}").geometric_mean for role in ROLES}
            | {
                "normalised_entropy_start": None if first is None else first.entropy,
                "normalised_entropy_end": None if last is None else last.entropy,
                "dead_heads": None if last is None else last.dead,
            }
        )
        rows.append(
            (
                method,
                show_kappa(over_seeds, interval=True),
                show_kappa(factor, interval=True) if known else MISSING,
                f"{pseudo.finite}/{pseudo.total}",
                f"{strict.finite}/{strict.total}",
                _mean_log(analysis, method, "bound_log10"),
                _mean_log(analysis, method, "papers_bound_log10"),
                *(show_kappa(_over_seeds(analysis, method, f"kappa_{role}")) for role in ROLES),
                MISSING if first is None or last is None else f"{first.entropy:.2f} → {last.entropy:.2f}",
                MISSING if last is None else f"{last.dead}/{last.heads}",
            )
        )
    notes = (
        "Geometric means over heads and layers at the last measurement of each run, then over seeds; intervals by the "
        "t distribution on log₁₀ of the seeds, from three seeds on. κ(J) is over the non-zero spectrum; the strict "
        "one is infinite where the rank is not full. Infinite values are in no mean: their share is shown, and "
        "there is no factor. A saturated or dead head can have a small κ(J) and learn nothing.",
    )
    return Table("conditioning", "Conditioning at the end", header, tuple(rows), notes, values=tuple(values))


def _over_seeds(analysis: Analysis, method: str, key: str) -> LogSummary:
    """Mean and interval over seeds, with the counts of finite and infinite heads."""
    heads = analysis.last_jacobian(method, key)
    summary = summarise_logs(_last(analysis, method, key).values())
    return replace(summary, finite=heads.finite, infinite=heads.infinite)


def _last(analysis: Analysis, method: str, key: str) -> dict[int, float]:
    """Geometric mean over heads and layers at the last measurement, by seed."""
    found = {table.run.seed: _at_end(table, key, log=True) for table in analysis.tables(method)}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _log_mean(analysis: Analysis, method: str, key: str) -> float:
    """Mean over the runs of a column that holds logarithms; NaN where none is finite."""
    values = [_at_end(table, key, log=False) for table in analysis.tables(method)]
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _mean_log(analysis: Analysis, method: str, key: str) -> str:
    mean, heads = _log_mean(analysis, method, key), analysis.last_jacobian(method, key)
    if math.isnan(mean):
        return INFINITE if heads.infinite else MISSING
    shown = f"{mean:.2f}"
    return shown + (f" ({INFINITE} in {show_share(heads.infinite_share)})" if heads.infinite else "")


def _at_end(table: HeadTable, key: str, *, log: bool) -> float:
    step = table.last_step(key)
    if step is None:
        return math.nan
    return float(table.over_steps(key, log=log)[table.steps.tolist().index(step)])

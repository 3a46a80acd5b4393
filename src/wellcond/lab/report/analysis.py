"""`analyse`: what tables and figures share, computed once per comparison; `bottom_line`: what it says, and no more."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wellcond.lab.records import ARITHMETIC, MEASURED, Comparison, Metric, Run
from wellcond.lab.report import statistics
from wellcond.lab.report.epochs_to_match import Matching, match_methods, match_unit
from wellcond.lab.report.table import MISSING, Cell, finite_mean, number, show_seeds

SATURATED = 0.05
"""Entropy over ln N below which nearly all attention goes to one token."""
WORDS = {"better": "better", "worse": "worse", "equal": "equal within the margin", "undecided": "undecided"}
REQUIRED = (
    (("conditioned", ""), ("mimetic", "")),
    (("conditioned", ""), ("gaussian", "")),
    (("default", "identity"), ("default", "")),
    (("default", "polar"), ("default", "identity")),
)
"""First minus second, each as (init, condition): what the papers' claims rest on."""


@dataclass(frozen=True)
class HeadTable:
    """Conditioning rows of one run, column by column."""

    run: Run
    columns: dict[str, np.ndarray]
    """Keys of `MEASURED` that are numbers, NaN where null or absent; `inexact`: the Jacobian is an estimate or a bound.
    The rows themselves are not kept, since there can be hundreds of thousands."""

    @cached_property
    def steps(self) -> np.ndarray:
        """Measured steps, rising."""
        return np.unique(self.columns["step"])

    def epochs(self) -> np.ndarray:
        """Epoch of every measured step."""
        return np.array([self.columns["epoch"][self.columns["step"] == step][-1] for step in self.steps])

    def over_steps(self, key: str, *, geometric: bool = True) -> np.ndarray:
        """Mean over the finite values of all heads and layers at every step; NaN where there is none.

        Geometric, but for attention maps, unless the arithmetic mean is asked for; of stored logarithms back as a
        number, infinite above 1e300.
        """
        values, stored_log = self.columns[key], key.endswith("_log10")
        if key in ARITHMETIC or not (geometric or stored_log):
            return self._means(values, np.isfinite(values))
        logs = values if stored_log else np.log10(values, where=values > 0, out=np.full_like(values, np.nan))
        if geometric:
            return _back(self._means(logs, np.isfinite(logs)))
        shift = logs.max(initial=0.0, where=np.isfinite(logs))
        with np.errstate(divide="ignore"):
            return _back(np.log10(self._means(10.0 ** (logs - shift), np.isfinite(logs))) + shift)

    def _means(self, values: np.ndarray, usable: np.ndarray) -> np.ndarray:
        place, count = np.searchsorted(self.steps, self.columns["step"])[usable], len(self.steps)
        sums = np.bincount(place, weights=values[usable], minlength=count)
        sizes, means = np.bincount(place, minlength=count), np.full(count, np.nan)
        np.divide(sums, sizes, out=means, where=sizes > 0)
        return means

    def at(self, key: str, step: float) -> list[float]:
        """Values of all heads at one step, where they are not NaN."""
        values = self.columns[key][self.columns["step"] == step]
        return values[~np.isnan(values)].tolist()

    def at_end(self, key: str) -> list[float]:
        """Values of all heads at the last step at which a quantity was measured; empty if it never was."""
        return self.at(key, float(self.columns["step"][~np.isnan(self.columns[key])].max(initial=-1.0)))


def _back(logs: np.ndarray) -> np.ndarray:
    """10 to these powers; infinite above 1e300."""
    return np.where(logs > 300, np.inf, 10.0 ** np.minimum(logs, 300))


def read_heads(run: Run) -> HeadTable | None:
    """Measured heads of a run; None if nothing was measured."""
    rows = run.conditioning
    keys = [key for key in MEASURED if key not in ("layer", "head", "status")]
    columns = {key: np.array([number(row.get(key)) for row in rows]) for key in keys}
    columns["inexact"] = np.array([row.get("status") not in (None, "", "exact") for row in rows], dtype=float)
    return HeadTable(run, columns) if rows else None


@dataclass(frozen=True)
class Analysis:
    """A comparison with its statistics, by method."""

    comparison: Comparison
    unit: str
    """`epoch` or `step`: what matching is counted in."""
    summaries: dict[str, statistics.Summary]
    """Results: on the test split where there is one, else of the last evaluation."""
    differences: dict[str, statistics.PairedDifference]
    required: list[statistics.PairedDifference]
    margin: float
    """A difference of results below it counts as none: one standard deviation of the baseline over seeds. Ten seeds
    cannot show equality within less than about 0.8 of it where pairing does not help. NaN below two results."""
    matchings: dict[str, Matching]
    heads: dict[str, list[HeadTable]]
    """Tables of all runs that have conditioning rows."""

    def difference(self, method: str) -> statistics.PairedDifference:
        """The difference of a method to the baseline; one without pairs for the baseline itself."""
        return self.differences.get(method, statistics.NO_PAIRS)

    def judge(self, difference: statistics.PairedDifference) -> statistics.Verdict:
        """What a difference of results decides."""
        lost, lost_baseline = (self.outcomes(m)["diverged"] for m in (difference.method, difference.baseline))
        return statistics.judge(difference, self.margin, diverged=lost, baseline_diverged=lost_baseline)

    def verdict(self, difference: statistics.PairedDifference) -> Cell:
        """The same in a few words, for a table; empty without pairs."""
        if not difference.count:
            return MISSING, {"verdict": ""}
        verdict, margin = self.judge(difference), self.comparison.result.show(self.margin)
        said: str = verdict.kind
        if verdict.kind == "equal":
            said = f"equal: {verdict.reason}" if verdict.reason else f"equal within {margin}"
        elif verdict.kind != "undecided" and difference.p_equal(self.margin) < statistics.ALPHA:
            said = f"{verdict.kind}, by less than {margin}"
        return said, {"verdict": verdict.kind}

    @property
    def best_first(self) -> list[str]:
        """Methods by their mean difference to the baseline, which has none; those without pairs last."""
        means = {method: found.mean for method, found in self.differences.items() if found.count}
        means[self.comparison.baseline] = 0.0
        return sorted(self.comparison.methods, key=lambda method: -means.get(method, -math.inf))

    def outcomes(self, method: str) -> Counter[str]:
        """How many runs finished, diverged, failed, or are partial."""
        return Counter(run.outcome for run in self.comparison.of(method))

    def tables(self, method: str) -> list[HeadTable]:
        """Measured heads of the finished runs."""
        return [table for table in self.heads[method] if table.run.finished]

    def last_heads(self, method: str, key: str = "pseudo_condition_number") -> statistics.LogSummary:
        """Condition numbers of all heads at the last measurement of every finished run."""
        return statistics.summarise_logs(value for table in self.tables(method) for value in table.at_end(key))

    def attention(self, method: str, *, last: bool) -> tuple[float, list[float]]:
        """Mean entropy over ln N at the first or the last measurement, and which heads are dead, as far as known."""
        tables, at = self.tables(method) or self.heads[method], -1 if last else 0
        entropy, diagonal, dead = ([x for t in tables for x in t.at(key, float(t.steps[at]))] for key in ARITHMETIC)
        return finite_mean(entropy), dead if entropy or diagonal else []  # nothing is dead or alive without maps


def step_ratios(comparison: Comparison, method: str) -> dict[int, float]:
    """Seconds per step over the baseline's of the same seed, by seed."""
    runs, base = (comparison.finished(name) for name in (method, comparison.baseline))
    return {seed: seconds_per_step(run) / seconds_per_step(base[seed]) for seed, run in runs.items() if seed in base}


def seconds_per_step(run: Run) -> float:
    """Time of one training step without evaluation and measuring; NaN if the run was not alone on its cores."""
    seconds = number(run.record.get("seconds_per_step"))
    return seconds if seconds > 0 and run.alone else math.nan


def analyse(comparison: Comparison) -> Analysis:
    """Statistics of a comparison."""
    methods, unit = comparison.methods, match_unit(comparison)
    summaries = {method: statistics.Summary(comparison.results(method)) for method in methods}
    baseline, required = comparison.baseline, required_pairs(comparison)
    pairs = dict.fromkeys([*((method, baseline) for method in methods if method != baseline), *required])
    found: dict[tuple[str, str], statistics.PairedDifference] = {}
    for second in {second for _, second in pairs}:  # one question each
        same, better = [pair for pair in pairs if pair[1] == second], comparison.metric.higher_is_better
        known = [(a, summaries[a].values, b, summaries[b].values) for a, b in same]
        made = statistics.correct(statistics.compare_paired(*one, higher_is_better=better) for one in known)
        found |= dict(zip(same, made, strict=True))
    return Analysis(
        comparison,
        unit,
        summaries,
        differences={pair[0]: found[pair] for pair in pairs if pair[1] == baseline},
        required=[found[pair] for pair in required],
        margin=summaries[baseline].std,
        matchings=match_methods(comparison, unit),
        heads={method: [table for run in comparison.of(method) if (table := read_heads(run))] for method in methods},
    )


def required_pairs(comparison: Comparison) -> list[tuple[str, str]]:
    """The comparisons that must be printed whenever both methods are there; keys made for a mask against plain ones.

    Around the attention both must be the same: tokens, the start of the rest, and set fields but for the rate.
    """
    kinds, around, tied = {}, {}, set()
    for run in comparison.runs:
        spec = run.spec
        options, fields = spec.get("init_options") or {}, spec.get("set") or {}
        kinds[run.method] = str(spec.get("init") or "default"), str(spec.get("condition") or "")
        rest = {field: value for field, value in fields.items() if field != "optimizer.lr"}
        around[run.method] = spec.get("tokens") or {}, "library" in options, rest
        tied |= {run.method} if "keys" in options else set()
    present = [method for method in comparison.methods if method in kinds]
    alike = [(a, b) for a in present for b in present if around[a] == around[b]]
    claims = [pair for wanted in REQUIRED for pair in alike if (kinds[pair[0]], kinds[pair[1]]) == wanted]
    return claims + [(a, b) for a, b in alike if a in tied and b not in tied and kinds[a] == kinds[b]]


def bottom_line(analysis: Analysis) -> str:
    """How many methods are better, worse, equal or undecided against the baseline, and the largest difference."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    finished = [method for method, summary in analysis.summaries.items() if summary.count]
    compared = [difference for difference in analysis.differences.values() if difference.count]
    if not finished:
        runs = "; ".join(f"{run.method}, seed {run.seed}: {run.outcome}" for run in comparison.runs)
        return f"No run is finished, so there is nothing to compare yet ({runs})."
    if not compared:
        return f"Only {', '.join(finished)} has finished runs, so there is nothing to compare."
    top = max(compared, key=lambda difference: difference.mean)
    size = "largest gain" if top.mean > 0 else "smallest loss"
    change = top.as_change(metric)
    led = f"the {size} is {metric.show(change.mean, sign=True)}{metric.unit}, of {top.method}"
    seeds = max(difference.count for difference in compared)
    if seeds < statistics.FEWEST_SEEDS:
        few = "only one seed" if seeds == 1 else f"only {seeds} seeds"
        return f"Against {comparison.baseline}, {led}; with {few} no difference can be told from the luck of a seed."
    counts = Counter(WORDS[analysis.judge(difference).kind] for difference in compared)
    told = [f"{n} {'is' if n == 1 else 'are'} {word}" for word in WORDS.values() if (n := counts[word])]
    facts = (
        [f"95 % interval {statistics.interval_cell(change.interval, metric)[0]}"] if change.interval is not None else []
    )
    facts += [show_seeds(top.count), WORDS[analysis.judge(top).kind]]
    return (
        f"Of {len(compared)} {'method' if len(compared) == 1 else 'methods'} against {comparison.baseline}, "
        f"{', '.join(told)}; {led} ({', '.join(facts)})."
    )


def find_findings(analysis: Analysis) -> list[str]:
    """Sentences on what the table of methods does not say."""
    power = statistics.describe_power(analysis.comparison.result, analysis.differences.values())
    found = [*power, *_scale_control(analysis)]
    if full := [m for m in analysis.comparison.methods if analysis.attention(m, last=False)[0] < SATURATED]:
        found.append(
            f"Attention is saturated at the first measurement (entropy below {SATURATED} of ln N) of "
            f"{', '.join(full)}: there a small κ(J) is not meaningful; gradient norms show whether W_Q and W_K learn."
        )
    return found


def _scale_control(analysis: Analysis) -> list[str]:
    """Whether the Gaussian initialisation of the same scale explains the gain of the conditioned one."""
    found, metric = [], analysis.comparison.result
    for difference in analysis.required:
        gain, control = (analysis.difference(method) for method in (difference.method, difference.baseline))
        spec = analysis.comparison.of(difference.baseline)[0].spec
        is_control = spec.get("init") == "gaussian" and not spec.get("condition")
        if not is_control or not difference.count or not control.count or not gain.mean > 0:
            continue
        why = ": these runs do not show that the gain is due to conditioning rather than to the scale of the weights."
        if analysis.judge(difference).kind == "better":
            why = ": scale alone does not explain the gain."
        elif difference.interval is None:
            why = "; too few seeds to say whether scale explains the gain."
        found.append(
            f"Scale control: {difference.baseline}, which has the scale of {difference.method} but not its "
            f"conditioning, differs from {gain.baseline} by {_show_change(control, metric)}, "
            f"{difference.method} by {_show_change(gain, metric)}{why}"
        )
    return found


def _show_change(difference: statistics.PairedDifference, metric: Metric) -> str:
    return f"{metric.show(difference.as_change(metric).mean, sign=True)}{metric.unit}"

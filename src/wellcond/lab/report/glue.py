"""`rebuild_glue`: the tables of GLUE from the records in RUN/glue/TASK/seed-S/run.json; same records, same bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.records import Metric, Run, RunRecordError, read_json, setting_differences
from wellcond.lab.report.run_tables import NO_METRICS
from wellcond.lab.report.statistics import PairedDifference, Summary, compare_paired, correct, required_pairs
from wellcond.lab.report.table import (
    Table,
    Values,
    difference_values,
    plain_markdown,
    show_interval,
    show_mean,
    show_p,
    summary_values,
    table_csv,
    table_markdown,
)
from wellcond.lab.report.values import MISSING, finite_mean, number

TITLES = {
    "mnli": "MNLI", "sst2": "SST-2", "stsb": "STS-B", "rte": "RTE",
    "qnli": "QNLI", "qqp": "QQP", "mrpc": "MRPC", "cola": "CoLA",
}  # fmt: skip
"""Tasks in the order of the papers' tables."""
AVERAGE = "average"
NAMES = {"f1": "F1", "accuracy_mismatched": "accuracy, mismatched", AVERAGE: "mean of the tasks"}
SHOWN = Metric("score", higher_is_better=True, percent=True)
OF_THE_RUN = ("model.encoder", "task.tokenizer.file")
"""Settings that name a pre-trained run, and so differ between runs that may be compared."""


@dataclass(frozen=True)
class ScoredRun:
    """One pre-trained run, with the records of fine-tuning by task and seed."""

    method: str
    seed: int
    records: dict[str, dict[int, dict[str, Any]]]

    def values(self, task: str, metric: str) -> dict[int, float]:
        """A metric after the last epoch, by seed of fine-tuning; of finished runs."""
        of_task = self.records.get(task, {})
        found = {s: number(r["final"].get(metric)) for s, r in of_task.items() if r["status"] == "finished"}
        return {seed: value for seed, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True)
class GlueScores:
    """All scores of a run or of a comparison."""

    folder: Path
    title: str
    scale: str
    runs: tuple[ScoredRun, ...]
    comparison: Comparison | None
    """None for a single run."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that were run, in the order of the table."""
        return tuple(task for task in TITLES if any(task in run.records for run in self.runs))

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order in which they are shown."""
        listed = self.comparison.methods if self.comparison else ()
        return tuple(dict.fromkeys([*listed, *(run.method for run in self.runs)]))

    def all_records(self, task: str) -> list[dict[str, Any]]:
        """Records of fine-tuning on a task."""
        return [record for run in self.runs for record in run.records.get(task, {}).values()]

    def metric(self, task: str) -> str:
        """Name of the metric that a task is judged by."""
        return next((str(r["metric"]["name"]) for r in self.all_records(task) if r.get("metric")), "")

    def others(self, task: str) -> tuple[str, ...]:
        """Names of its other metrics."""
        names = [name for record in self.all_records(task) for name in record.get("final") or ()]
        return tuple(dict.fromkeys(name for name in names if name not in (*NO_METRICS, self.metric(task))))

    def values(self, method: str, task: str, metric: str | None = None) -> dict[int, float]:
        """A score of a method: by seed of pre-training or, of a single run, by seed of fine-tuning."""
        if task == AVERAGE:
            return self.averages(method)
        metric = metric or self.metric(task)
        runs = [run for run in self.runs if run.method == method]
        if self.comparison is None:
            return runs[0].values(task, metric)
        means = {run.seed: finite_mean(run.values(task, metric).values()) for run in runs}
        return {seed: value for seed, value in means.items() if math.isfinite(value)}

    def averages(self, method: str) -> dict[int, float]:
        """Plain mean of the tasks that were run, of the seeds that have all of them."""
        columns = [self.values(method, task) for task in self.tasks]
        shared = sorted(set.intersection(*map(set, columns))) if columns else []
        return {seed: math.fsum(column[seed] for column in columns) / len(columns) for seed in shared}


def load_glue(folder: Path) -> GlueScores:
    """Scores of a pre-trained run, or of all runs of a comparison.

    Raises: RunRecordError if there are none, a file is broken, or runs of one task were made under different settings.
    """
    folder = Path(folder)
    comparison = None
    if (folder / "comparison.json").is_file():
        comparison = next(found for found in load_comparisons(folder) if found.folder == folder)
        runs, title, scale = comparison.runs, comparison.title, comparison.scale
    else:
        record = read_json(folder / "run.json", "wellcond-run")
        runs, scale = (Run(folder, record),), str(record["scale"])
        title = f"{record['recipe']}, {record['method']}, seed {record['seed']}"
    scored = tuple(scored for run in runs if (scored := ScoredRun(run.method, run.seed, _read(run))).records)
    if not scored:
        raise RunRecordError(folder, "there is no run of fine-tuning in it", "Make some with wellcond glue first.")
    scores = GlueScores(folder, title, scale, scored, comparison)
    for task in scores.tasks:
        first, *others = scores.all_records(task)
        for other in others:
            if differing := _different_settings(first["config"], other["config"]):
                raise RunRecordError(
                    folder,
                    f"runs on {task} were made under different settings: {'; '.join(differing[:4])}",
                    "They cannot be compared: score all runs with the same options, in folders without older scores.",
                )
    return scores


def _read(run: Run) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path, record in run.fine_tuned():
        task = record["config"]["task"].get("task")
        if task not in TITLES or not isinstance(record.get("final") or {}, dict):
            raise RunRecordError(path, f"expected a run on one of {', '.join(TITLES)}", "It was not written by glue.")
        found.setdefault(task, {})[int(record["seed"])] = record
    return {task: dict(sorted(records.items())) for task, records in found.items()}


def _different_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Fields in which two recipes differ, but for those that name the pre-trained run."""
    return [line for line in setting_differences(a, b) if not line.startswith(OF_THE_RUN)]


def rebuild_glue(folder: Path) -> Path:
    """Write glue.md and glue.csv from the records of `wellcond glue`.

    Args:
        folder: of a pre-trained run, whose files go into its folder glue, or of a comparison, whose files go into it.

    Returns: path of glue.md.

    Raises: RunRecordError if there are no records, or they cannot be put into one table; nothing is then written.
    """
    scores = load_glue(folder)
    statistics, others = statistics_table(scores), others_table(scores)
    parts = [f"# GLUE: {plain_markdown(scores.title)}", table_markdown(scores_table(scores))]
    parts += ["## Each task", table_markdown(statistics)]
    parts += ["## Other metrics", table_markdown(others)] if others.rows else []
    home = scores.folder if scores.comparison else scores.folder / "glue"
    write_atomically(home / "glue.csv", table_csv(statistics))
    write_atomically(home / "glue.md", "\n\n".join(parts) + "\n")
    return home / "glue.md"


def scores_table(scores: GlueScores) -> Table:
    """A row for each method, a column for each task: mean and standard deviation."""
    columns = [(column, None) for column in (*scores.tasks, AVERAGE)]
    header = ("method", *(TITLES.get(column, "Avg.") for column, _ in columns))
    rows, notes = _score_rows(scores, columns), tuple(find_notes(scores))
    return Table("glue", f"GLUE: {scores.title}", header, rows, notes)


def others_table(scores: GlueScores) -> Table:
    """The metrics of a task that its column does not show."""
    columns = [(task, metric) for task in scores.tasks for metric in scores.others(task)]
    header = ("method", *(f"{TITLES[task]} {_name(metric)}" for task, metric in columns))
    return Table("glue_others", "Other metrics", header, _score_rows(scores, columns) if columns else ())


def _score_rows(scores: GlueScores, columns: Sequence[tuple[str, str | None]]) -> tuple[tuple[str, ...], ...]:
    def shown(method: str, task: str, metric: str | None) -> str:
        summary = Summary(scores.values(method, task, metric))
        return show_mean(summary.mean, summary.std, SHOWN)

    return tuple((method, *(shown(method, *column) for column in columns)) for method in scores.methods)


def statistics_table(scores: GlueScores) -> Table:
    """A row for each method and task, with differences to the baseline and what else must be compared."""
    rows = []
    differences = find_differences(scores)
    for column in (*scores.tasks, AVERAGE):
        title, metric = TITLES.get(column, "Avg."), _name(AVERAGE if column == AVERAGE else scores.metric(column))
        for method in scores.methods:
            summary = Summary(scores.values(method, column))
            found = [d for (name, _), d in differences.items() if name == column and d.method == method]
            for difference in found or (None,):
                own = (str(summary.count), SHOWN.show(summary.mean), SHOWN.show(summary.std))
                values: Values = {"task": title, "metric": metric, "method": method}
                values |= summary_values(summary, SHOWN) | {"metric": metric}
                values |= {"minus": "" if difference is None else difference.baseline}
                values |= difference_values(difference, SHOWN)
                rows.append(((title, metric, method, *own, *_difference_cells(difference)), values))
    header = (
        "task", "metric", "method", "n", "mean", "std",
        "minus", "pairs", "difference", "95 % interval", "p", "p (Holm)",
    )  # fmt: skip
    note = (
        "Differences are paired by seed of pre-training; positive is better. Holm's correction is over all rows of the "
        "tasks, and for the mean over its own rows. Below three pairs there is no interval and no p."
    )
    return Table.of("glue_statistics", "Each task", header, rows, (note,) if differences else (), (0, 1, 2, 6))


def _difference_cells(difference: PairedDifference | None) -> tuple[str, ...]:
    if difference is None:
        return (MISSING,) * 6
    return (
        difference.baseline, str(difference.count), SHOWN.show(difference.mean, sign=True),
        show_interval(difference.interval, SHOWN), show_p(difference.p), show_p(difference.p_holm),
    )  # fmt: skip


def find_differences(scores: GlueScores) -> dict[tuple[str, tuple[str, str]], PairedDifference]:
    """By column and pair of methods: every method minus the baseline, and the pairs that must be compared."""
    comparison = scores.comparison
    if comparison is None:
        return {}
    pairs = [(method, comparison.baseline) for method in scores.methods if method != comparison.baseline]
    pairs = list(dict.fromkeys([*pairs, *required_pairs(comparison)]))

    def of(columns: Sequence[str]) -> dict[tuple[str, tuple[str, str]], PairedDifference]:
        keys = [(column, pair) for column in columns for pair in pairs]
        found = [
            compare_paired(a, scores.values(a, column), b, scores.values(b, column), higher_is_better=True)
            for column, (a, b) in keys
        ]
        return dict(zip(keys, correct(found), strict=True))

    return of(scores.tasks) | of([AVERAGE])


def find_notes(scores: GlueScores) -> list[str]:
    """What a reader must know to read the table."""
    records = {task: scores.all_records(task) for task in scores.tasks}
    seeds = sorted({int(record["seed"]) for listed in records.values() for record in listed})
    tuned = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))} of fine-tuning"
    each = f"seeds of pre-training, each with {tuned}" if scores.comparison else tuned
    sizes = {
        task: sorted({(r["data"]["train"], r["data"]["evaluation"]) for r in listed if r.get("data")})
        for task, listed in records.items()
    }
    rows = [f"{TITLES[task]} {' and '.join(f'{a:,}/{b:,}' for a, b in s) or MISSING}" for task, s in sizes.items()]
    notes = [
        f"Scores times 100 on the validation split after the last epoch, scale {scores.scale}; mean and standard "
        f"deviation over {each}.",
        "Metrics: " + ", ".join(f"{TITLES[task]} {_name(scores.metric(task))}" for task in scores.tasks) + ".",
        f"Rows to train and to evaluate on: {', '.join(rows)}.",
        "Corrections of a conditioned model were folded into its weights before fine-tuning.",
    ]
    if missing := [title for task, title in TITLES.items() if task not in scores.tasks]:
        notes.append(f"Avg. is the mean of {len(scores.tasks)} tasks of eight; not run: {', '.join(missing)}.")
    for task, listed in records.items():
        if states := Counter(str(r["status"]) for r in listed if r["status"] != "finished"):
            told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            notes.append(f"{TITLES[task]}: of {len(listed)} runs {told}; they are in no mean.")
    equal = {
        task: sum(number((r.get("final") or {}).get("constant")) == 1 for r in listed)
        for task, listed in records.items()
    }
    if told := ", ".join(f"{TITLES[t]} {count} of {len(records[t])}" for t, count in equal.items() if count):
        notes.append(f"Runs whose predictions are all equal (Matthews and correlations are then 0): {told}.")
    lost = [run for run in scores.comparison.runs if not run.finished] if scores.comparison else []
    notes += [f"{run.method}, seed {run.seed}: pre-training is {run.status}, so there is no score." for run in lost]
    first, *others = [listed[0]["config"] for listed in records.values()]
    parts = ("optimizer", "schedule", "training")
    differing = {line for other in others for part in parts for line in _different_settings(first[part], other[part])}
    if differing:
        notes.append("Tasks were fine-tuned with different settings: " + "; ".join(sorted(differing)) + ".")
    return notes


def glue_json(scores: GlueScores) -> dict[str, Any]:
    """The rows of glue.csv with what they are about, for programs."""
    return {
        "kind": "wellcond-glue",
        "title": scores.title,
        "scale": scores.scale,
        "tasks": {task: scores.metric(task) for task in scores.tasks},
        "rows": list(statistics_table(scores).values),
        "notes": find_notes(scores),
    }


def _name(metric: str) -> str:
    return NAMES.get(metric, metric.capitalize() if metric in ("matthews", "pearson", "spearman") else metric)

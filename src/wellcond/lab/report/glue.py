"""`rebuild_glue`: the tables of GLUE from the records in RUN/glue/TASK/seed-0/run.json; same records, same bytes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.lab.report.analysis import required_pairs
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.records import Metric, Run, RunRecordError, read_json
from wellcond.lab.report.statistics import (
    NO_PAIRS,
    PairedDifference,
    Summary,
    compare_paired,
    correct,
    show_interval,
    show_p,
)
from wellcond.lab.report.table import MISSING, Table, number, plain_markdown, table_csv, table_markdown
from wellcond.lab.report.tables import NO_METRICS

TITLES = {
    "mnli": "MNLI", "sst2": "SST-2", "stsb": "STS-B", "rte": "RTE",
    "qnli": "QNLI", "qqp": "QQP", "mrpc": "MRPC", "cola": "CoLA",
}  # fmt: skip
"""Tasks in the order of the papers' tables."""
AVERAGE = "average"
METRICS = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
"""Names that are shown otherwise than records have them."""
SHOWN = Metric("score", higher_is_better=True, percent=True)
Record = dict[str, Any]


@dataclass(frozen=True)
class GlueScores:
    """All records of fine-tuning of a run or of a comparison."""

    title: str
    scale: str
    records: dict[tuple[str, int], dict[str, Record]]
    """By method and seed of pre-training; there by task."""
    comparison: Comparison | None
    """None for a single run."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that were run, in the order of the table."""
        return tuple(task for task in TITLES if any(task in of_run for of_run in self.records.values()))

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order in which they are shown."""
        listed = self.comparison.methods if self.comparison else ()
        return tuple(dict.fromkeys([*listed, *(method for method, _ in self.records)]))

    def of_task(self, task: str) -> list[Record]:
        """Records of fine-tuning on a task."""
        return [of_run[task] for of_run in self.records.values() if task in of_run]

    def metric(self, task: str) -> str:
        """Name of the metric that a task is judged by."""
        return next((str(r["metric"]["name"]) for r in self.of_task(task) if r.get("metric")), "")

    def values(self, method: str, task: str, metric: str | None = None) -> dict[int, float]:
        """A score of a method, by seed of pre-training."""
        if task == AVERAGE:
            columns = [self.values(method, each) for each in self.tasks]
            shared = sorted(set.intersection(*map(set, columns))) if columns else []
            return {seed: math.fsum(column[seed] for column in columns) / len(columns) for seed in shared}
        scores = {
            seed: number(of_run[task]["final"].get(metric or self.metric(task)))
            for (name, seed), of_run in self.records.items()
            if name == method and task in of_run and of_run[task]["status"] == "finished"
        }
        return {seed: value for seed, value in scores.items() if math.isfinite(value)}


def load_glue(folder: Path) -> GlueScores:
    """Scores of a pre-trained run, or of all runs of a comparison.

    Raises: RunRecordError if there are none, or a file is broken.
    """
    comparison = None
    if (folder / "comparison.json").is_file():
        comparison = next(found for found in load_comparisons(folder) if found.folder == folder)
        runs, title, scale = comparison.runs, comparison.title, comparison.scale
    else:
        record = read_json(folder / "run.json", "wellcond-run")
        runs, scale = (Run(folder, record),), str(record["scale"])
        title = f"{record['recipe']}, {record['method']}, seed {record['seed']}"
    records: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    for run, path, record in [(one, *found) for one in runs for found in one.fine_tuned()]:
        task = record["config"]["task"].get("task")
        if task not in TITLES or not isinstance(record.get("final") or {}, dict):
            raise RunRecordError(path, f"expected a run on one of {', '.join(TITLES)}", "It was not written by glue.")
        records[run.method, run.seed].setdefault(task, record)
    if not records:
        raise RunRecordError(folder, "there is no run of fine-tuning in it", "Make some with wellcond glue first.")
    return GlueScores(title, scale, dict(records), comparison)


def rebuild_glue(folder: Path) -> Path:
    """Write glue.md and glue.csv from the records of `wellcond glue`.

    Args:
        folder: of a pre-trained run, whose files go into its folder glue, or of a comparison, whose files go into it.

    Returns: path of glue.md.

    Raises: RunRecordError if there are no records, or a file is broken; nothing is then written.
    """
    scores = load_glue(folder)
    statistics, others = statistics_table(scores), _others_table(scores)
    parts = [f"# GLUE: {plain_markdown(scores.title)}", table_markdown(scores_table(scores))]
    parts += ["## Each task", table_markdown(statistics)]
    parts += ["## Other metrics", table_markdown(others)] if others.rows else []
    home = folder if scores.comparison else folder / "glue"
    write_atomically(home / "glue.csv", table_csv(statistics))
    write_atomically(home / "glue.md", "\n\n".join(parts) + "\n")
    return home / "glue.md"


def scores_table(scores: GlueScores) -> Table:
    """A row for each method, a column for each task: mean and standard deviation."""
    columns = {TITLES.get(column, "Avg."): (column, None) for column in (*scores.tasks, AVERAGE)}
    return Table.of("glue", f"GLUE: {scores.title}", _score_rows(scores, columns), find_notes(scores))


def _others_table(scores: GlueScores) -> Table:
    """The metrics of a task that its column does not show."""
    columns = {
        f"{TITLES[task]} {METRICS.get(metric, metric)}": (task, metric)
        for task in scores.tasks
        for record in scores.of_task(task)
        for metric in record.get("final") or ()
        if metric not in (*NO_METRICS, scores.metric(task))
    }
    return Table.of("glue_others", "Other metrics", _score_rows(scores, columns) if columns else ())


def _score_rows(scores: GlueScores, columns: Mapping[str, tuple[str, str | None]]) -> list[dict[str, str]]:
    return [
        {
            "method": method,
            **{title: Summary(scores.values(method, *column)).show(SHOWN) for title, column in columns.items()},
        }
        for method in scores.methods
    ]


def statistics_table(scores: GlueScores) -> Table:
    """A row for each method and task, with differences to the baseline and what else must be compared."""
    rows: list[dict[str, str]] = []
    differences = find_differences(scores)
    for column in (*scores.tasks, AVERAGE):
        name = scores.metric(column)
        for method in scores.methods:
            summary = Summary(scores.values(method, column))
            for d in differences.get((column, method), [NO_PAIRS]):
                rows.append({
                    "task": TITLES.get(column, "Avg."), "metric": METRICS.get(name, name) or "mean of the tasks",
                    "method": method, "n": str(summary.count), "mean": SHOWN.show(summary.mean),
                    "std": SHOWN.show(summary.std), "minus": d.baseline or MISSING,
                    "pairs": str(d.count) if d.baseline else MISSING, "difference": SHOWN.show(d.mean, sign=True),
                    "95 % interval": show_interval(d.interval, SHOWN), "p": show_p(d.p), "p (Holm)": show_p(d.p_holm),
                })  # fmt: skip
    note = (
        "Differences are paired by seed of pre-training; positive is better. Holm's correction is over all rows of the "
        "tasks, and for the mean over its own rows. Below three pairs there is no interval and no p."
    )
    return Table.of("glue_statistics", "Each task", rows, (note,) if differences else (), (0, 1, 2, 6))


def find_differences(scores: GlueScores) -> dict[tuple[str, str], list[PairedDifference]]:
    """By column and method: the method minus the baseline, and minus others that it must be compared with."""
    comparison, differences = scores.comparison, defaultdict(list)
    if comparison is None:
        return {}
    pairs = [(method, comparison.baseline) for method in scores.methods if method != comparison.baseline]
    pairs = list(dict.fromkeys([*pairs, *required_pairs(comparison)]))
    for columns in (scores.tasks, (AVERAGE,)):
        keys = [(column, a, b) for column in columns for a, b in pairs]
        found = [
            compare_paired(a, scores.values(a, column), b, scores.values(b, column), higher_is_better=True)
            for column, a, b in keys
        ]
        for (column, method, _), difference in zip(keys, correct(found), strict=True):
            differences[column, method].append(difference)
    return dict(differences)


def find_notes(scores: GlueScores) -> list[str]:
    """What a reader must know to read the table."""
    records = {task: scores.of_task(task) for task in scores.tasks}
    sizes = {
        task: sorted({(r["data"]["train"], r["data"]["evaluation"]) for r in listed if r.get("data")})
        for task, listed in records.items()
    }
    rows = [f"{TITLES[task]} {' and '.join(f'{a:,}/{b:,}' for a, b in s) or MISSING}" for task, s in sizes.items()]
    metrics = [f"{TITLES[task]} {METRICS.get(name := scores.metric(task), name)}" for task in scores.tasks]
    notes = [
        f"Scores times 100 on the validation split after the last epoch, scale {scores.scale}; mean and standard "
        "deviation over seeds of pre-training, each with seed 0 of fine-tuning.",
        f"Metrics: {', '.join(metrics)}.",
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
    return notes

"""`rebuild_glue`: the tables of GLUE from the records in RUN/glue/TASK/seed-0/run.json; same records, same bytes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.report.analysis import required_pairs
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.records import Metric, Run, RunRecordError
from wellcond.lab.report.statistics import (
    NO_PAIRS,
    PairedDifference,
    Summary,
    compare_paired,
    correct,
    interval_cell,
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


@dataclass(frozen=True)
class GlueScores:
    """Fine-tuning of the runs of a comparison."""

    pretrained: Comparison
    tasks: dict[str, Comparison]
    """The runs on each task, by method and seed of pre-training, in the order of the table."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The tasks, and their mean."""
        return (*self.tasks, AVERAGE)

    def values(self, method: str, column: str, metric: str = "") -> dict[int, float]:
        """A score of a method, by seed of pre-training: by default what the task is judged by."""
        if column != AVERAGE:
            return self.tasks[column].results(method, metric) if column in self.tasks else {}
        columns = [self.values(method, task) for task in self.tasks]
        shared = sorted(set.intersection(*map(set, columns)))
        return {seed: math.fsum(column[seed] for column in columns) / len(columns) for seed in shared}


def load_glue(folder: Path) -> GlueScores:
    """Scores of a pre-trained run, or of all runs of a comparison.

    Raises: RunRecordError if there are none, or a file is broken.
    """
    runs: dict[str, list[Run]] = {task: [] for task in TITLES}
    pretrained = next((found for found in load_comparisons(folder) if found.folder == folder), None)
    for tuned in [tuned for run in (pretrained.runs if pretrained else ()) for tuned in run.fine_tuned()]:
        task = tuned.record["config"]["task"].get("task")
        if task not in TITLES:
            said = f"expected a run on one of {', '.join(TITLES)}"
            raise RunRecordError(tuned.file, said, "It was not written by glue.")
        runs[task].append(tuned)
    if pretrained is None or not any(runs.values()):
        raise RunRecordError(folder, "there is no run of fine-tuning in it", "Make some with wellcond glue first.")
    tasks = {task: replace(pretrained, runs=tuple(of_task)) for task, of_task in runs.items() if of_task}
    return GlueScores(pretrained, tasks)


def rebuild_glue(folder: Path) -> Path:
    """Write glue.md and glue.csv from the records of `wellcond glue`.

    Args:
        folder: of a pre-trained run, whose files go into its folder glue, or of a comparison, whose files go into it.

    Returns: path of glue.md.

    Raises: RunRecordError if there are no records, or a file is broken; nothing is then written.
    """
    scores = load_glue(folder)
    statistics, others = statistics_table(scores), _others_table(scores)
    parts = [f"# GLUE: {plain_markdown(scores.pretrained.title)}", table_markdown(scores_table(scores))]
    parts += ["## Each task", table_markdown(statistics)]
    parts += ["## Other metrics", table_markdown(others)] if others.rows else []
    home = folder / "glue" if (folder / "run.json").is_file() else folder
    write_atomically(home / "glue.csv", table_csv(statistics))
    write_atomically(home / "glue.md", "\n\n".join(parts) + "\n")
    return home / "glue.md"


def scores_table(scores: GlueScores) -> Table:
    """A row for each method, a column for each task: mean and standard deviation."""
    columns = {TITLES.get(column, "Avg."): (column, "") for column in scores.columns}
    title = f"GLUE: {scores.pretrained.title}"
    return Table.of("glue", title, _score_rows(scores, columns), find_notes(scores))


def _others_table(scores: GlueScores) -> Table:
    """The metrics of a task that its column does not show."""
    columns = {
        f"{TITLES[task]} {METRICS.get(metric, metric)}": (task, metric)
        for task, comparison in scores.tasks.items()
        for run in comparison.runs
        for metric in run.part("final")
        if metric not in (*NO_METRICS, comparison.metric.name)
    }
    return Table.of("glue_others", "Other metrics", _score_rows(scores, columns) if columns else ())


def _score_rows(scores: GlueScores, columns: Mapping[str, tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {
            "method": method,
            **{title: Summary(scores.values(method, *column)).cell(SHOWN)[0] for title, column in columns.items()},
        }
        for method in scores.pretrained.methods
    ]


def statistics_table(scores: GlueScores) -> Table:
    """A row for each method and task, with differences to the baseline and what else must be compared."""
    rows: list[dict[str, str]] = []
    differences = find_differences(scores)
    for column in scores.columns:
        name = "mean of the tasks" if column == AVERAGE else scores.tasks[column].metric.name
        for method in scores.pretrained.methods:
            summary = Summary(scores.values(method, column))
            for d in differences.get((column, method), [NO_PAIRS]):
                rows.append({
                    "task": TITLES.get(column, "Avg."), "metric": METRICS.get(name, name),
                    "method": method, "n": str(summary.count), "mean": SHOWN.show(summary.mean),
                    "std": SHOWN.show(summary.std), "minus": d.baseline or MISSING,
                    "pairs": str(d.count) if d.baseline else MISSING, "difference": SHOWN.show(d.mean, sign=True),
                    "95 % interval": interval_cell(d.interval, SHOWN)[0],
                    "p": show_p(d.p), "p (Holm)": show_p(d.p_holm),
                })  # fmt: skip
    note = (
        "Differences are paired by seed of pre-training; positive is better. Holm's correction is over all rows of the "
        "tasks, and for the mean over its own rows. Below three pairs there is no interval and no p."
    )
    return Table.of("glue_statistics", "Each task", rows, (note,) if differences else (), (0, 1, 2, 6))


def find_differences(scores: GlueScores) -> dict[tuple[str, str], list[PairedDifference]]:
    """By column and method: the method minus the baseline, and minus others that it must be compared with."""
    comparison, differences = scores.pretrained, defaultdict(list)
    pairs = [(method, comparison.baseline) for method in comparison.methods if method != comparison.baseline]
    pairs = list(dict.fromkeys([*pairs, *required_pairs(comparison)]))
    for columns in (tuple(scores.tasks), (AVERAGE,)):
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
    metrics, sizes, lost, equal = [], [], [], []
    for task, comparison in scores.tasks.items():
        title, name, runs = TITLES[task], comparison.metric.name, comparison.runs
        rows = sorted({(run.part("data")["train"], run.part("data")["evaluation"]) for run in runs if run.part("data")})
        states = Counter(run.status for run in runs if run.status != "finished")
        constant = sum(number(run.part("final").get("constant")) == 1 for run in runs)
        metrics.append(f"{title} {METRICS.get(name, name)}")
        sizes.append(f"{title} {' and '.join(f'{a:,}/{b:,}' for a, b in rows) or MISSING}")
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        lost += [f"{title}: of {len(runs)} runs {told}; they are in no mean."] if states else []
        equal += [f"{title} {constant} of {len(runs)}"] if constant else []
    notes = [
        f"Scores times 100 on the validation split after the last epoch, scale {scores.pretrained.scale}; mean and "
        "standard deviation over seeds of pre-training, each with seed 0 of fine-tuning.",
        f"Metrics: {', '.join(metrics)}.",
        f"Rows to train and to evaluate on: {', '.join(sizes)}.",
        "Corrections of a conditioned model were folded into its weights before fine-tuning.",
    ]
    if missing := [title for task, title in TITLES.items() if task not in scores.tasks]:
        notes.append(f"Avg. is the mean of {len(scores.tasks)} tasks of eight; not run: {', '.join(missing)}.")
    notes += lost
    if equal:
        notes.append(
            f"Runs whose predictions are all equal (Matthews and correlations are then 0): {', '.join(equal)}."
        )
    return notes

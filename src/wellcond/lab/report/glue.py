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
from wellcond.lab.report.statistics import (
    NO_PAIRS,
    PairedDifference,
    Summary,
    compare_paired,
    correct,
    required_pairs,
    show_interval,
    show_p,
)
from wellcond.lab.report.table import (
    MISSING,
    Cell,
    Table,
    finite_mean,
    number,
    plain_markdown,
    table_csv,
    table_markdown,
)
from wellcond.lab.report.tables import NO_METRICS

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
Record = dict[str, Any]


@dataclass(frozen=True)
class GlueScores:
    """All records of fine-tuning of a run or of a comparison."""

    folder: Path
    title: str
    scale: str
    records: dict[tuple[str, int], dict[str, dict[int, Record]]]
    """By method and seed of pre-training; there by task and seed of fine-tuning."""
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
        return [record for of_run in self.records.values() for record in of_run.get(task, {}).values()]

    def metric(self, task: str) -> str:
        """Name of the metric that a task is judged by."""
        return next((str(r["metric"]["name"]) for r in self.of_task(task) if r.get("metric")), "")

    def values(self, method: str, task: str, metric: str | None = None) -> dict[int, float]:
        """A score of a method: by seed of pre-training or, of a single run, by seed of fine-tuning."""
        if task == AVERAGE:
            columns = [self.values(method, each) for each in self.tasks]
            shared = sorted(set.intersection(*map(set, columns))) if columns else []
            return {seed: math.fsum(column[seed] for column in columns) / len(columns) for seed in shared}
        scores = {
            seed: {
                tuned: number(record["final"].get(metric or self.metric(task)))
                for tuned, record in of_run.get(task, {}).items()
                if record["status"] == "finished"
            }
            for (name, seed), of_run in self.records.items()
            if name == method
        }
        means = {seed: finite_mean(by_seed.values()) for seed, by_seed in scores.items()}
        found = next(iter(scores.values())) if self.comparison is None else means
        return {seed: value for seed, value in found.items() if math.isfinite(value)}


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
    records: dict[tuple[str, int], dict[str, dict[int, Record]]] = {}
    for run, path, record in [(one, *found) for one in runs for found in one.fine_tuned()]:
        task = record["config"]["task"].get("task")
        if task not in TITLES or not isinstance(record.get("final") or {}, dict):
            raise RunRecordError(path, f"expected a run on one of {', '.join(TITLES)}", "It was not written by glue.")
        of_task = records.setdefault((run.method, run.seed), {}).setdefault(task, {})
        of_task[int(record["seed"])] = record
    if not records:
        raise RunRecordError(folder, "there is no run of fine-tuning in it", "Make some with wellcond glue first.")
    scores = GlueScores(folder, title, scale, records, comparison)
    for task in scores.tasks:
        first, *others = scores.of_task(task)
        for other in others:
            if differing := _different_settings(first["config"], other["config"]):
                said = f"runs on {task} were made under different settings: {'; '.join(differing[:4])}"
                advice = (
                    "They cannot be compared: score all runs with the same options, in folders without older scores."
                )
                raise RunRecordError(folder, said, advice)
    return scores


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
    statistics, others = statistics_table(scores), _others_table(scores)
    parts = [f"# GLUE: {plain_markdown(scores.title)}", table_markdown(scores_table(scores))]
    parts += ["## Each task", table_markdown(statistics)]
    parts += ["## Other metrics", table_markdown(others)] if others.rows else []
    home = scores.folder if scores.comparison else scores.folder / "glue"
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
        f"{TITLES[task]} {_name(metric)}": (task, metric)
        for task in scores.tasks
        for record in scores.of_task(task)
        for metric in record.get("final") or ()
        if metric not in (*NO_METRICS, scores.metric(task))
    }
    return Table.of("glue_others", "Other metrics", _score_rows(scores, columns) if columns else ())


def _score_rows(scores: GlueScores, columns: Mapping[str, tuple[str, str | None]]) -> list[dict[str, Cell]]:
    return [
        {
            "method": method,
            **{title: Summary(scores.values(method, *column)).show(SHOWN) for title, column in columns.items()},
        }
        for method in scores.methods
    ]


def statistics_table(scores: GlueScores) -> Table:
    """A row for each method and task, with differences to the baseline and what else must be compared."""
    rows: list[dict[str, Cell]] = []
    differences = find_differences(scores)
    for column in (*scores.tasks, AVERAGE):
        title, metric = TITLES.get(column, "Avg."), _name(AVERAGE if column == AVERAGE else scores.metric(column))
        for method in scores.methods:
            summary = Summary(scores.values(method, column))
            found = [d for (name, _), d in differences.items() if name == column and d.method == method]
            for d in found or (NO_PAIRS,):
                rows.append({
                    "task": (title, {"task": title}), "metric": (metric, {"metric": metric}),
                    "method": (method, {"method": method}),
                    "n": (str(summary.count), summary.columns(SHOWN) | {"metric": metric}),
                    "mean": SHOWN.show(summary.mean), "std": SHOWN.show(summary.std),
                    "minus": (d.baseline or MISSING, {"minus": d.baseline}),
                    "pairs": (str(d.count) if d.baseline else MISSING, d.columns(SHOWN)),
                    "difference": SHOWN.show(d.mean, sign=True), "95 % interval": show_interval(d.interval, SHOWN),
                    "p": show_p(d.p), "p (Holm)": show_p(d.p_holm),
                })  # fmt: skip
    note = (
        "Differences are paired by seed of pre-training; positive is better. Holm's correction is over all rows of the "
        "tasks, and for the mean over its own rows. Below three pairs there is no interval and no p."
    )
    return Table.of("glue_statistics", "Each task", rows, (note,) if differences else (), (0, 1, 2, 6))


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
    records = {task: scores.of_task(task) for task in scores.tasks}
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
        "kind": "wellcond-glue", "title": scores.title, "scale": scores.scale,
        "tasks": {task: scores.metric(task) for task in scores.tasks},
        "rows": list(statistics_table(scores).values), "notes": find_notes(scores),
    }  # fmt: skip


def _name(metric: str) -> str:
    return NAMES.get(metric, metric.capitalize() if metric in ("matthews", "pearson", "spearman") else metric)

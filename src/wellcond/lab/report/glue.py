"""`rebuild_glue`: the tables of GLUE from the records in RUN/glue/TASK/seed-0/run.json; same records, same bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from wellcond.errors import RunRecordError
from wellcond.files import write_atomically
from wellcond.lab.records import Comparison, Metric, Run, check_stays_inside, load_comparisons
from wellcond.lab.report import statistics
from wellcond.lab.report.analysis import required_pairs
from wellcond.lab.report.table import MISSING, Table, finite_mean, number, plain_markdown, table_csv, table_markdown
from wellcond.lab.report.tables import NO_METRICS

TITLES = {
    "mnli": "MNLI",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "rte": "RTE",
    "qnli": "QNLI",
    "qqp": "QQP",
    "mrpc": "MRPC",
    "cola": "CoLA",
}
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
    def columns(self) -> dict[str, str]:
        """The tasks and their mean, with their titles."""
        return {task: TITLES[task] for task in self.tasks} | {AVERAGE: "Avg."}

    def values(self, method: str, column: str) -> dict[int, float]:
        """What a method scores, by seed of pre-training; empty for a task that was not run."""
        if column != AVERAGE:
            return self.tasks[column].results(method) if column in self.tasks else {}
        columns = [self.values(method, task) for task in self.tasks]
        return {seed: finite_mean(c[seed] for c in columns) for seed in sorted(set.intersection(*map(set, columns)))}


def load_glue(folder: Path) -> GlueScores:
    """Scores of a pre-trained run, or of all runs of a comparison."""
    pretrained = next((found for found in load_comparisons(folder) if found.folder == folder), None)
    runs: dict[str, list[Run]] = defaultdict(list)
    for tuned in [tuned for run in (pretrained.runs if pretrained else ()) for tuned in run.fine_tuned()]:
        runs[str(tuned.record["config"]["task"].get("task"))].append(tuned)
    if pretrained is None or not runs:
        raise RunRecordError(folder, "there is no run of fine-tuning in it", "Make some with wellcond glue first.")
    if unknown := [run for task, of_task in runs.items() if task not in TITLES for run in of_task]:
        raise RunRecordError(unknown[0].file, f"expected a run on {', '.join(TITLES)}", "It was not written by glue.")
    tasks = {task: replace(pretrained, runs=tuple(runs[task])) for task in TITLES if task in runs}
    return GlueScores(pretrained, tasks)


def rebuild_glue(folder: Path) -> Path:
    """Write glue.md and glue.csv of a comparison into its folder, of a pre-trained run into its folder glue."""
    scores = load_glue(folder)
    tables = [statistics_table(scores), *_other_metrics(scores)]
    parts = [f"# GLUE: {plain_markdown(scores.pretrained.title)}", table_markdown(scores_table(scores))]
    parts += [f"## {table.title}\n\n{table_markdown(table)}" for table in tables]
    home = folder / "glue" if (folder / "run.json").is_file() else folder
    check_stays_inside(folder, [home])
    write_atomically(home / "glue.csv", table_csv(tables[0]))
    write_atomically(home / "glue.md", "\n\n".join(parts) + "\n")
    return home / "glue.md"


def scores_table(scores: GlueScores) -> Table:
    """A row for each method, a column for each task: mean and standard deviation."""
    rows = [{"method": method} for method in scores.pretrained.methods]
    for row, (column, title) in product(rows, scores.columns.items()):
        row[title] = statistics.Summary(scores.values(row["method"], column)).cell(SHOWN)[0]
    return Table.of("glue", f"GLUE: {scores.pretrained.title}", rows, find_notes(scores))


def _other_metrics(scores: GlueScores) -> list[Table]:
    """A table of the metrics that the columns of tasks do not show; nothing if there are none."""
    rows = [{"method": method} for method in scores.pretrained.methods]
    for task, comparison in scores.tasks.items():
        names = dict.fromkeys(name for run in comparison.runs for name in run.part("final"))
        for row, name in product(rows, [n for n in names if n not in (*NO_METRICS, comparison.metric.name)]):
            shown = statistics.Summary(comparison.results(row["method"], name)).cell(SHOWN)[0]
            row[f"{TITLES[task]} {METRICS.get(name, name)}"] = shown
    return [Table.of("glue_others", "Other metrics", rows)] if len(rows[0]) > 1 else []


def statistics_table(scores: GlueScores) -> Table:
    """A row for each method and task, with differences to the baseline and what else must be compared."""
    rows: list[dict[str, str]] = []
    differences = find_differences(scores)
    for (column, title), method in product(scores.columns.items(), scores.pretrained.methods):
        name = "mean of the tasks" if column == AVERAGE else scores.tasks[column].metric.name
        summary = statistics.Summary(scores.values(method, column))
        for d in differences.get((column, method), [statistics.NO_PAIRS]):
            rows.append(
                {
                    "task": title,
                    "metric": METRICS.get(name, name),
                    "method": method,
                    "n": str(summary.count),
                    "mean": SHOWN.show(summary.mean),
                    "std": SHOWN.show(summary.std),
                    "minus": d.baseline or MISSING,
                    "pairs": str(d.count) if d.baseline else MISSING,
                    "difference": SHOWN.show(d.mean, sign=True),
                    "95 % interval": statistics.interval_cell(d.interval, SHOWN)[0],
                    "p": statistics.show_p(d.p),
                    "p (Holm)": statistics.show_p(d.p_holm),
                }
            )
    note = (
        "Differences are paired by seed of pre-training; positive is better. Holm's correction is over all rows of the "
        "tasks, and for the mean over its own rows. Below three pairs there is no interval and no p."
    )
    return Table.of("glue_statistics", "Each task", rows, (note,) if differences else (), (0, 1, 2, 6))


def find_differences(scores: GlueScores) -> dict[tuple[str, str], list[statistics.PairedDifference]]:
    """By column and method: the method minus the baseline, and minus others that it must be compared with."""
    comparison, differences = scores.pretrained, defaultdict(list)
    pairs = [(method, comparison.baseline) for method in comparison.methods if method != comparison.baseline]
    pairs = list(dict.fromkeys([*pairs, *required_pairs(comparison)]))
    for columns in (tuple(scores.tasks), (AVERAGE,)):
        keys = [(column, a, b) for column in columns for a, b in pairs]
        values = [(a, scores.values(a, column), b, scores.values(b, column)) for column, a, b in keys]
        found = statistics.correct(statistics.compare_paired(*known, higher_is_better=True) for known in values)
        for (column, method, _), difference in zip(keys, found, strict=True):
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
    missing = [title for task, title in TITLES.items() if task not in scores.tasks]
    average = f"Avg. is the mean of {len(scores.tasks)} tasks of eight; not run: {', '.join(missing)}."
    constants = f"Runs whose predictions are all equal (Matthews and correlations are then 0): {', '.join(equal)}."
    return [
        f"Scores times 100 on the validation split after the last epoch, scale {scores.pretrained.scale}; mean and "
        "standard deviation over seeds of pre-training, each with seed 0 of fine-tuning.",
        f"Metrics: {', '.join(metrics)}.",
        f"Rows to train and to evaluate on: {', '.join(sizes)}.",
        "Corrections of a conditioned model were folded into its weights before fine-tuning.",
        *([average] if missing else []),
        *lost,
        *([constants] if equal else []),
    ]

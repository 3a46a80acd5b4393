"""Scores of fine-tuning on GLUE, read from the records in RUN/glue/TASK/seed-S/run.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.run_record import Run, RunRecordError, read_json
from wellcond.lab.report.same_settings import setting_differences
from wellcond.lab.report.values import number

TITLES = {
    "mnli": "MNLI", "sst2": "SST-2", "stsb": "STS-B", "rte": "RTE",
    "qnli": "QNLI", "qqp": "QQP", "mrpc": "MRPC", "cola": "CoLA",
}  # fmt: skip
"""Tasks in the order of the papers' tables."""
AVERAGE = "average"
NO_METRICS = ("step", "epoch", "loss", "train_loss", "seconds", "constant")
OF_THE_RUN = ("model.encoder", "task.tokenizer.file")
"""Settings that name a pre-trained run, and so differ between runs that may be compared."""

Records = dict[str, dict[int, dict[str, Any]]]
"""By task and seed of fine-tuning."""


@dataclass(frozen=True)
class ScoredRun:
    """One pre-trained run."""

    method: str
    seed: int
    records: Records

    def values(self, task: str, metric: str) -> dict[int, float]:
        """A metric after the last epoch, by seed of fine-tuning; of finished runs."""
        of_task = self.records.get(task, {})
        found = {s: number(r["final"].get(metric)) for s, r in of_task.items() if r["status"] == "finished"}
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    def mean(self, task: str, metric: str) -> float:
        """Over the seeds of fine-tuning; NaN of nothing."""
        values = self.values(task, metric)
        return math.fsum(values.values()) / len(values) if values else math.nan


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

    def all_records(self, task: str | None = None) -> Iterable[dict[str, Any]]:
        """Records of fine-tuning, of one task or of all."""
        for run in self.runs:
            for name in self.tasks if task is None else (task,):
                yield from run.records.get(name, {}).values()

    def metric(self, task: str) -> str:
        """Name of the metric that a task is judged by."""
        return next((str(r["metric"]["name"]) for r in self.all_records(task) if r.get("metric")), "")

    def others(self, task: str) -> tuple[str, ...]:
        """Names of its other metrics."""
        rows = [record["final"] for record in self.all_records(task) if record.get("final")]
        return tuple(
            dict.fromkeys(name for row in rows for name in row if name not in (*NO_METRICS, self.metric(task)))
        )

    def values(self, method: str, task: str, metric: str | None = None) -> dict[int, float]:
        """A score of a method: by seed of pre-training or, of a single run, by seed of fine-tuning."""
        if task == AVERAGE:
            return self.averages(method)
        metric = metric or self.metric(task)
        runs = [run for run in self.runs if run.method == method]
        if self.comparison is None:
            return runs[0].values(task, metric)
        means = {run.seed: run.mean(task, metric) for run in runs}
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
    if (folder / "comparison.json").is_file():
        comparison = next(found for found in load_comparisons(folder) if found.folder == folder)
        runs = [ScoredRun(run.method, run.seed, _read(run)) for run in comparison.runs]
        title, scale = comparison.title, comparison.scale
    else:
        comparison = None
        record = read_json(folder / "run.json", "wellcond-run")
        runs = [ScoredRun(str(record["method"]), int(record["seed"]), _read(Run(folder, record)))]
        title, scale = f"{record['recipe']}, {record['method']}, seed {record['seed']}", str(record["scale"])
    scored = tuple(run for run in runs if run.records)
    if not scored:
        raise RunRecordError(folder, "there is no run of fine-tuning in it", "Make some with wellcond glue first.")
    scores = GlueScores(folder, title, scale, scored, comparison)
    for task in scores.tasks:
        _check_same_settings(scores, task)
    return scores


def _read(run: Run) -> Records:
    found: Records = {}
    for path, record in run.fine_tuned():
        task = record["config"]["task"].get("task")
        if task not in TITLES or not isinstance(record.get("final") or {}, dict):
            raise RunRecordError(path, f"expected a run on one of {', '.join(TITLES)}", "It was not written by glue.")
        found.setdefault(task, {})[int(record["seed"])] = record
    return {task: dict(sorted(records.items())) for task, records in found.items()}


def _check_same_settings(scores: GlueScores, task: str) -> None:
    first, *others = scores.all_records(task)
    for other in others:
        differing = different_settings(first["config"], other["config"])
        if differing:
            raise RunRecordError(
                scores.folder,
                f"runs on {task} were made under different settings: {'; '.join(differing[:4])}",
                "They cannot be compared: score all runs with the same options, in folders without older scores.",
            )


def different_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Fields in which two recipes differ, but for those that name the pre-trained run."""
    return [line for line in setting_differences(a, b) if not line.startswith(OF_THE_RUN)]

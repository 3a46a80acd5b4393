"""Fine-tuning and scoring of pre-trained runs: every task and seed is a run of its own, in RUN/glue/TASK/seed-S."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wellcond.lab.glue.pretrained import Pretrained, read_pretrained
from wellcond.lab.glue.recipes import glue_recipe
from wellcond.lab.glue.tasks import NAMES, find_task
from wellcond.lab.methods import MethodSettings
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunError, RunFolder
from wellcond.run_records import COMPLETE


@dataclass(frozen=True)
class GluePlan:
    """What is to be run."""

    runs: tuple[Pretrained, ...]
    jobs: tuple[Job, ...]
    left_out: tuple[str, ...] = ()
    """Runs of a comparison that did not finish, with what became of them."""


def plan_glue(
    folder: Path,
    *,
    tasks: Sequence[str] = NAMES,
    seeds: Sequence[int] = (0,),
    data: Path | None = None,
    limit: int | None = None,
    overrides: Sequence[str] = (),
    base: Path | None = None,
    cpu: bool = False,
) -> GluePlan:
    """All fine-tuning runs of a pre-trained run, or of every finished run of a comparison.

    Args:
        folder: of the run or the comparison.
        tasks: names, each once.
        seeds: of fine-tuning: order of the samples, dropout and the new weights.
        data: see `glue_recipe`.
        limit: see `glue_recipe`.
        overrides: see `glue_recipe`.
        base: folder of the recipe of pre-training, where its relative paths start.
        cpu: do not use a GPU.

    Raises: RunError, RecipeError, DataError, WeightError; before anything is trained.
    """
    chosen = [find_task(name) for name in tasks]
    if not chosen or len(set(tasks)) < len(tasks):
        raise RecipeError(f"--tasks: expected at least one task, and none twice, found {', '.join(tasks) or 'none'}")
    runs, left_out = find_runs(folder, base)
    recipes = {
        (run.folder, task.name): glue_recipe(run, task, data=data, limit=limit, overrides=overrides)
        for run in runs
        for task in chosen
    }
    jobs = [
        Job(
            recipes[run.folder, task.name],
            MethodSettings(label=f"{run.record['method']} (seed {run.record['seed']}) on {task.name}"),
            seed,
            run.place / task.name / f"seed-{seed}",
            base=run.place,
            cpu=cpu,
        )
        for seed in seeds
        for task in chosen
        for run in runs
    ]
    return GluePlan(runs, tuple(jobs), left_out)


def find_runs(folder: Path, base: Path | None = None) -> tuple[tuple[Pretrained, ...], tuple[str, ...]]:
    """Pre-trained runs of a folder, and the names of those that did not finish.

    Raises: RunError if there is none that finished.
    """
    if not (folder / "comparison.json").is_file():
        return (read_pretrained(folder, base),), ()
    found, left_out = [], []
    for path in sorted(folder.glob("*/seed*/run.json")):
        record = RunFolder(path.parent).read_record()
        assert record is not None
        if record["status"] == "finished":
            found.append(read_pretrained(path.parent, base))
        else:
            left_out.append(f"{record['method']}, seed {record['seed']}: {record['status']}")
    if not found:
        raise RunError(f"{folder}: expected finished runs, found {'; '.join(left_out) or 'none'}")
    return tuple(found), tuple(left_out)


def run_glue(plan: GluePlan, *, num_workers: int, observer: JobObserver, keep_checkpoints: bool = False) -> Outcome:
    """Run what is missing. Checkpoints of complete runs are removed unless they are to be kept.

    Raises: as `run_comparison`.
    """
    waiting = {job.base for job in plan.jobs if not _is_complete(job)}
    for run in plan.runs:
        if run.place in waiting:
            run.write_encoder()
    is_first = os.environ.get("RANK", "0") == "0"

    def observe(job: Job, event: Event) -> None:
        observer(job, event)
        if event["event"] == "end" and event["record"]["status"] in COMPLETE and is_first and not keep_checkpoints:
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)

    outcome = run_comparison(plan.jobs, num_workers=num_workers, observer=observe)
    if is_first and not keep_checkpoints and all(map(_is_complete, plan.jobs)):
        for run in plan.runs:
            (run.place / run.encoder_file).unlink(missing_ok=True)
    return outcome


def _is_complete(job: Job) -> bool:
    record = RunFolder(job.folder).read_record()
    return record is not None and record["status"] in COMPLETE

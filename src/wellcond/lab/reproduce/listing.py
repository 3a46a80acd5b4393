"""`--list` and `--dry-run`: what every id needs and costs (by estimates), and whether it can run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from wellcond.lab.report.table import Table
from wellcond.lab.report.values import MISSING
from wellcond.lab.reproduce.catalogue import SCALES, Entry, catalogue
from wellcond.lab.reproduce.plan import Plan, PlannedStudy, PlanOptions, is_complete, make_plan
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.run_folder import RunError, RunFolder

GPU_FLOPS = 1e14
"""Assumed of one GPU in training: a third of an A100's peak in bfloat16."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and two moments in float32."""


@dataclass(frozen=True)
class Cost:
    """Of what is missing of one study, or of several; NaN where it is not known."""

    runs: int = 0
    done: int = 0
    updates: float = 0.0
    seconds: float = 0.0
    """Of one process on this machine, or one like it."""
    gpu_hours: float = 0.0
    gigabytes: float = 0.0
    """Of checkpoints."""

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other."""
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def plan_cost(plan: Plan) -> Cost:
    """Of everything that is missing."""
    return sum(map(study_cost, plan.studies), Cost())


def study_cost(study: PlannedStudy) -> Cost:
    """Of what is missing of one study."""
    settings, runs = study.settings, len(study.missing)
    tuning, updates = study.glue_missing, runs * updates_per_run(study)
    finished = _finished_seconds(study)
    seconds = finished if finished is not None else settings.seconds or math.nan
    # The backward pass costs twice the forward pass.
    flops = 3e9 * (settings.gflops or math.nan) * updates * study.recipe.training.batch_size
    return Cost(
        runs=runs + tuning,
        done=len(study.jobs) + len(study.glue_folders) - runs - tuning,
        updates=updates,
        seconds=runs * seconds + tuning * settings.glue_seconds,
        gpu_hours=flops / GPU_FLOPS / 3600,
        gigabytes=runs * BYTES_PER_PARAMETER * (settings.parameters or math.nan) / 1000,
    )


def updates_per_run(study: PlannedStudy) -> float:
    """Updates of one run; NaN where the length is in epochs of a set whose size is not known."""
    training = study.recipe.training
    if training.length.steps is not None:
        return float(training.length.steps)
    assert training.length.epochs is not None
    samples = study.settings.samples or study.recipe.data.model_dump().get("limit_train")
    if samples is None and study.recipe.data.source == "digits":
        samples = 1038  # of 1,297; the others are held out
    return math.nan if samples is None else training.length.epochs * max(1, samples // training.batch_size)


def _finished_seconds(study: PlannedStudy) -> float | None:
    """Mean time of the runs that are complete; None if there is none."""
    records = [RunFolder(job.folder).read_record() or {} for job in study.jobs if is_complete(job.folder)]
    times = [math.fsum(value for value in (record.get("seconds") or {}).values() if value) for record in records]
    return math.fsum(times) / len(times) if times else None


def list_entries(
    folder_of: Callable[[str], Path], num_workers: int, scales: Iterable[str] = SCALES
) -> list[dict[str, Any]]:
    """Everything about every id, as plain data.

    Args:
        folder_of: where the runs of a scale are, for what is there already.
        num_workers: runs at once on a CPU.
        scales: those to look at.
    """
    wanted = tuple(scales)
    return [
        {
            "id": id,
            "kind": entry.kind,
            "title": entry.title,
            "paper_has_numbers": entry.has_numbers,
            "scales": {scale: _at_scale(id, entry, scale, folder_of(scale), num_workers) for scale in wanted},
        }
        for id, entry in catalogue().entries.items()
    ]


def _at_scale(id: str, entry: Entry, scale: str, folder: Path, num_workers: int) -> dict[str, Any]:
    try:
        plan = make_plan(id, entry, scale, PlanOptions(folder))
    except (RecipeError, RunError) as error:
        return {"here": False, "why_not": [str(error).split(". Allowed")[0]], "data": [], "gpus": 0}
    cost, reasons = plan_cost(plan), plan.why_not_here()
    return {
        "here": not reasons,
        "why_not": reasons,
        "data": [{"name": name, "found": found} for name, found in plan.data().items()],
        "gpus": plan.gpus,
        "gpu_hours_estimate": cost.gpu_hours if plan.gpus else 0.0,
        "minutes_here_estimate": cost.seconds / 60 / num_workers,
        "runs": cost.runs + cost.done,
        "runs_done": cost.done,
        "left_out": list(plan.left_out),
    }


def list_table(listed: Iterable[dict[str, Any]], scale: str) -> Table:
    """One row for each id, at one scale."""
    rows = []
    for row in listed:
        at = row["scales"][scale]
        rows.append(
            (
                row["id"],
                row["title"],
                ", ".join(need["name"] + ("" if need["found"] else " (not here)") for need in at["data"]) or "none",
                str(at["gpus"] or MISSING),
                _about(at.get("gpu_hours_estimate", math.nan)) if at["gpus"] else MISSING,
                show_minutes(at.get("minutes_here_estimate", math.nan)),
                f"{at.get('runs_done', 0)}/{at.get('runs', 0)}",
                "yes" if at["here"] else "no: " + "; ".join(at["why_not"]),
            )
        )
    header = ("id", "what", "data", "GPUs", "GPU hours", "time here", "runs done", "can run here")
    notes = (
        "GPU hours and times are estimates, of what is missing; GPU hours are of all runs together, from counted flops "
        "on GPUs that train at 1e14 a second.",
        "Ids share runs: the figures of a paper use those of its tables.",
    )
    words = frozenset({0, 1, 2, 7})
    return Table("list", f"Tables, figures and ablations at scale {scale}", header, tuple(rows), notes, words)


def show_minutes(minutes: float) -> str:
    """A length of time at a glance.

    Example:
        >>> show_minutes(0.2), show_minutes(12), show_minutes(300), show_minutes(60 * 24 * 8)
        ('~ 12 s', '~ 12 min', '~ 5 h', '~ 8 days')
    """
    if math.isnan(minutes):
        return MISSING
    for unit, size in (("days", 60 * 24), ("h", 60), ("min", 1)):
        if minutes >= 2 * size or (unit == "min" and minutes >= 1):
            return f"~ {minutes / size:.0f} {unit}"
    return f"~ {60 * minutes:.0f} s"


def _about(value: float) -> str:
    return MISSING if math.isnan(value) or not value else f"~ {value:.0f}"


def plan_table(plan: Plan, num_workers: int) -> Table:
    """What a plan would run: `--dry-run`."""
    costs = [study_cost(study) for study in plan.studies]

    def numbers(cost: Cost) -> tuple[str, ...]:
        return (
            str(cost.runs),
            str(cost.done),
            MISSING if math.isnan(cost.updates) else f"{cost.updates:.0f}",
            show_minutes(cost.seconds / 60 / num_workers),
            _about(cost.gpu_hours if plan.gpus else 0.0),
            _about(cost.gigabytes),
        )

    rows = [
        (
            study.name,
            f"{study.recipe.scale}/{study.settings.recipe}",
            ", ".join(method.label for method in study.methods),
            ", ".join(map(str, study.seeds)),
            f"{updates_per_run(study):.0f}",
            *numbers(cost),
        )
        for study, cost in zip(plan.studies, costs, strict=True)
    ]
    if len(rows) > 1:
        rows.append(("all", "", "", "", "", *numbers(sum(costs, Cost()))))
    header = (
        "study", "recipe", "methods", "seeds", "updates a run", "runs to do", "done", "updates", "time here",
        "GPU hours", "disk, GB",
    )  # fmt: skip
    notes = [f"{plan.id} has no runs: it is computed."] if not plan.studies else []
    notes += [*plan.left_out, *(f"Cannot run here: {reason}." for reason in plan.why_not_here())]
    notes.append(f"Times are estimates, for {num_workers} run{'s' * (num_workers > 1)} at once; disk too.")
    title = f"{plan.id} at scale {plan.scale}: {plan.entry.title}"
    return Table("plan", title, header, tuple(rows), tuple(notes), frozenset({0, 1, 2, 3}))

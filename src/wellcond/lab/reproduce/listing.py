"""`--list` and `--dry-run`: what every id needs, how long that takes, and whether it can run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wellcond.lab.report.table import Table
from wellcond.lab.report.values import MISSING
from wellcond.lab.reproduce.catalogue import SCALES, Entry, catalogue
from wellcond.lab.reproduce.plan import Plan, PlannedStudy, PlanOptions, is_complete, make_plan
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.run_folder import RunError, RunFolder


def minutes_left(study: PlannedStudy) -> float:
    """Estimated time of what is missing of a study, in one process on a machine like this; NaN where not known."""
    finished = [RunFolder(job.folder).read_record() or {} for job in study.jobs if is_complete(job.folder)]
    times = [math.fsum(value for value in (record.get("seconds") or {}).values() if value) for record in finished]
    seconds = math.fsum(times) / len(times) if times else study.settings.seconds or math.nan
    return (len(study.missing) * seconds + study.glue_missing * study.settings.glue_seconds) / 60


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
    reasons = plan.why_not_here()
    return {
        "here": not reasons,
        "why_not": reasons,
        "data": [{"name": name, "found": found} for name, found in plan.data().items()],
        "gpus": plan.gpus,
        "minutes_here_estimate": math.fsum(map(minutes_left, plan.studies)) / num_workers,
        "runs": plan.runs,
        "runs_done": plan.runs - plan.missing,
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
                show_minutes(at.get("minutes_here_estimate", math.nan)),
                f"{at.get('runs_done', 0)}/{at.get('runs', 0)}",
                "yes" if at["here"] else "no: " + "; ".join(at["why_not"]),
            )
        )
    header = ("id", "what", "data", "GPUs", "time here", "runs done", "can run here")
    notes = (
        "Times are estimates, of what is missing.",
        "Ids share runs: the figures of a paper use those of its tables.",
    )
    words = frozenset({0, 1, 2, 6})
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


def plan_table(plan: Plan, num_workers: int) -> Table:
    """What a plan would run: `--dry-run`."""
    rows = [
        (
            study.name,
            f"{study.recipe.scale}/{study.settings.recipe}",
            ", ".join(method.label for method in study.methods),
            ", ".join(map(str, study.seeds)),
            f"{updates_per_run(study):.0f}",
            str(study.left),
            str(study.runs - study.left),
            show_minutes(minutes_left(study) / num_workers),
        )
        for study in plan.studies
    ]
    if len(rows) > 1:
        whole = show_minutes(math.fsum(map(minutes_left, plan.studies)) / num_workers)
        rows.append(("all", "", "", "", "", str(plan.missing), str(plan.runs - plan.missing), whole))
    header = ("study", "recipe", "methods", "seeds", "updates a run", "runs to do", "done", "time here")
    notes = [f"{plan.id} has no runs: it is computed."] if not plan.studies else []
    notes += [*plan.left_out, *(f"Cannot run here: {reason}." for reason in plan.why_not_here())]
    notes.append(f"Times are estimates, for {num_workers} run{'s' * (num_workers > 1)} at once.")
    title = f"{plan.id} at scale {plan.scale}: {plan.entry.title}"
    return Table("plan", title, header, tuple(rows), tuple(notes), frozenset({0, 1, 2, 3}))

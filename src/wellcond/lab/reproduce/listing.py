"""`--list` and `--dry-run`: what every id needs and costs, and whether it can run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellcond.lab.report.table import Table
from wellcond.lab.report.values import MISSING
from wellcond.lab.reproduce.catalogue_files import SCALES, Entry, entries
from wellcond.lab.reproduce.cost import Cost, plan_cost, study_cost, updates_per_run
from wellcond.lab.reproduce.needs import data_needs, gpus_needed, why_not_here
from wellcond.lab.reproduce.paper_numbers import paper_tables
from wellcond.lab.reproduce.plan import Plan, Wishes, make_plan
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.run_folder import RunError


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
            "paper_has_numbers": id in paper_tables(),
            "scales": {scale: _at_scale(id, entry, scale, folder_of(scale), num_workers) for scale in wanted},
        }
        for id, entry in entries().items()
    ]


def _at_scale(id: str, entry: Entry, scale: str, folder: Path, num_workers: int) -> dict[str, Any]:
    try:
        plan = make_plan(id, entry, scale, Wishes(folder))
    except (RecipeError, RunError) as error:
        return {"here": False, "why_not": [str(error).split(". Allowed")[0]], "data": [], "gpus": 0}
    cost, reasons = plan_cost(plan), why_not_here(plan)
    return {
        "here": not reasons,
        "why_not": reasons,
        "data": [{"name": need.name, "found": need.found} for need in data_needs(plan)],
        "gpus": gpus_needed(plan),
        "gpu_hours_estimate": cost.gpu_hours,
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
        data = ", ".join(need["name"] + ("" if need["found"] else " (not here)") for need in at["data"])
        hours, minutes = at.get("gpu_hours_estimate", math.nan), at.get("minutes_here_estimate", math.nan)
        rows.append(
            (
                row["id"],
                row["title"],
                data or "none",
                str(at["gpus"] or MISSING),
                f"~ {hours:.0f}" if at["gpus"] and not math.isnan(hours) else MISSING,
                show_minutes(minutes),
                f"{at.get('runs_done', 0)}/{at.get('runs', 0)}",
                "yes" if at["here"] else "no: " + "; ".join(at["why_not"]),
            )
        )
    header = ("id", "what", "data", "GPUs", "GPU hours", "time here", "runs done", "can run here")
    notes = (
        "GPU hours and times are estimates, of what is missing; GPU hours are of all runs together, on GPUs that train "
        "at 1e14 flops a second.",
        "Ids share runs: the figures of a paper use those of its tables.",
    )
    words = frozenset({0, 1, 2, 7})
    return Table("list", f"Tables, figures and ablations at scale {scale}", header, tuple(rows), notes, words)


def show_minutes(minutes: float) -> str:
    """A length of time at a glance.

    Example:
        >>> show_minutes(0.2), show_minutes(12), show_minutes(300), show_minutes(60 * 24 * 800)
        ('~ 12 s', '~ 12 min', '~ 5 h', '~ 2.2 years')
    """
    if math.isnan(minutes):
        return MISSING
    for unit, size, digits in (("years", 60 * 24 * 365, 1), ("days", 60 * 24 * 2, 0), ("h", 120, 0), ("min", 1, 0)):
        if minutes >= size:
            per = {"years": 60 * 24 * 365, "days": 60 * 24, "h": 60, "min": 1}[unit]
            return f"~ {minutes / per:.{digits}f} {unit}"
    return f"~ {60 * minutes:.0f} s"


def plan_table(plan: Plan, num_workers: int) -> Table:
    """What a plan would run: `--dry-run`."""
    costs = [study_cost(study) for study in plan.studies]
    rows = []
    for study, cost in zip(plan.studies, costs, strict=True):
        methods = ", ".join(method.label for method in study.methods)
        rows.append(
            (
                study.name,
                f"{study.recipe.scale}/{study.settings.recipe}",
                methods,
                ", ".join(map(str, study.seeds)),
                f"{updates_per_run(study):.0f}",
                *_numbers(cost, num_workers),
            )
        )
    if len(rows) > 1:
        total = sum(costs, Cost())
        rows.append(("all", "", "", "", "", *_numbers(replace(total, measured=False), num_workers)))
    header = (
        "study", "recipe", "methods", "seeds", "updates a run", "runs to do", "done", "updates", "time here",
        "GPU hours", "disk, MB",
    )  # fmt: skip
    notes = [f"{plan.id} has no runs: it is computed."] if not plan.studies else []
    notes += plan.left_out
    notes += [f"Cannot run here: {reason}." for reason in why_not_here(plan)]
    notes.append(f"Times are estimates, for {num_workers} run{'s' * (num_workers > 1)} at once; disk too.")
    return Table(
        "plan", f"{plan.id} at scale {plan.scale}: {plan.entry.title}", header, tuple(rows), tuple(notes),
        frozenset({0, 1, 2, 3}),
    )  # fmt: skip


def _numbers(cost: Cost, num_workers: int) -> tuple[str, ...]:
    return (
        str(cost.runs),
        str(cost.done),
        MISSING if math.isnan(cost.updates) else f"{cost.updates:.0f}",
        show_minutes(cost.seconds / 60 / num_workers) + (" (as here before)" if cost.measured and cost.runs else ""),
        MISSING if not cost.gpu_hours or math.isnan(cost.gpu_hours) else f"~ {cost.gpu_hours:.0f}",
        f"~ {cost.bytes / 1e6:.0f}",
    )

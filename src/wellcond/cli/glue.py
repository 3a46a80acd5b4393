"""What `wellcond glue` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from wellcond.cli.console import make_console, print_table
from wellcond.cli.experiment_checks import read_seeds
from wellcond.cli.experiments import choose_workers, is_first_process, leaving_together
from wellcond.cli.progress import RunsProgress
from wellcond.lab.report.glue import load_glue, rebuild_glue, scores_table
from wellcond.lab.tasks.glue.run import GluePlan, plan_glue, run_glue
from wellcond.lab.train.compare import Outcome


def score_glue(
    folder: Path,
    *,
    tasks: Sequence[str],
    seeds: str,
    overrides: Sequence[str],
    data: Path | None,
    limit: int | None,
    base: Path | None,
    jobs: str,
    cpu: bool,
    keep_checkpoints: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Fine-tune, score and write the tables; returns the exit code."""
    plan = plan_glue(
        folder,
        tasks=tasks,
        seeds=read_seeds(seeds),
        data=data,
        limit=limit,
        overrides=overrides,
        base=base,
        cpu=cpu,
    )
    silent = quiet or as_json or not is_first_process()
    outcome = _run(plan, choose_workers(jobs, plan.jobs[0].recipe, cpu=cpu), silent, keep_checkpoints)
    if is_first_process():
        if outcome.records:
            _show(folder, as_json=as_json, quiet=quiet)
        _tell_end(outcome, plan, as_json=as_json)
    return 130 if outcome.interrupted else 1 if outcome.failures else 0


def _run(plan: GluePlan, num_workers: int, silent: bool, keep_checkpoints: bool) -> Outcome:
    progress = RunsProgress(len(plan.jobs), quiet=silent)
    with leaving_together(), progress.shown():
        return run_glue(plan, num_workers=num_workers, observer=progress.observe, keep_checkpoints=keep_checkpoints)


def _show(folder: Path, *, as_json: bool, quiet: bool) -> None:
    page = rebuild_glue(folder)
    if as_json:
        print(page.with_suffix(".json").read_text("utf-8"), end="")
        return
    if quiet:
        return
    made = scores_table(load_glue(folder))
    out = make_console()
    print_table(out, made.title, made)
    for note in made.notes:
        out.print(f"- {escape(note)}", soft_wrap=True)
    out.print(f"tables: {page}", markup=False, soft_wrap=True)


def _tell_end(outcome: Outcome, plan: GluePlan, *, as_json: bool) -> None:
    out = Console(stderr=True) if as_json else make_console()
    for _, problem in outcome.failures:
        out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
    for name in plan.left_out:
        out.print(f"[yellow]not scored:[/] {escape(name)}", soft_wrap=True)
    if outcome.interrupted:
        left = len(plan.jobs) - sum(record["status"] in ("finished", "diverged") for record in outcome.records)
        out.print(f"[yellow]stopped[/] with {left} of {len(plan.jobs)} runs to go; the same command resumes from here")

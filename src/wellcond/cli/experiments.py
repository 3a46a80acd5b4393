"""`wellcond train`, `compare`, `demo` and `recipes`."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from wellcond.cli.console import make_console, print_table
from wellcond.cli.engines import job_command
from wellcond.cli.experiment_checks import read_jobs, read_seeds
from wellcond.cli.progress import RunsProgress
from wellcond.cli.report import foresee_power, print_report
from wellcond.errors import WellcondError
from wellcond.files import to_json
from wellcond.lab.cluster import RaySettings
from wellcond.lab.load_recipe import load_recipe, parse_recipe, shipped_recipes
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.recipe import Recipe
from wellcond.lab.report.table import Table
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.compare import Outcome, plan_comparison, run_comparison, write_comparison
from wellcond.lab.train.run import Job


def parse_seeds(text: str | None, recipe: Recipe) -> tuple[int, ...]:
    """Those of the recipe, unless others are asked for.

    Raises: RecipeError.
    """
    return recipe.seeds if text is None else read_seeds(text)


def choose_workers(asked: str, recipe: Recipe, *, cpu: bool) -> int:
    """Runs at once: as many as there are cores, if each keeps to one thread and there is no GPU to share.

    Raises: RecipeError.
    """
    number = read_jobs(asked)
    if number is not None:
        return number
    if "WORLD_SIZE" in os.environ or (torch.cuda.is_available() and not cpu) or recipe.training.threads != 1:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first_process() -> bool:
    """Whether this process may print; `torchrun` and `accelerate launch` start several."""
    return os.environ.get("RANK", "0") == "0"


def run_train(
    recipe_name: str,
    *,
    scale: str | None,
    method: str | None,
    seed: int,
    overrides: Sequence[str],
    folder: Path | None,
    cpu: bool,
    local_code: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """One run; returns the exit code."""
    recipe, base = load_recipe(recipe_name, scale=scale, overrides=overrides)
    asked = [recipe.method] if method is None else parse_methods(method)
    if len(asked) != 1:
        raise RecipeError(f"--method: expected one method, found {len(asked)}; `wellcond compare` takes several")
    chosen = recipe.at_tuned(asked[0])
    place = folder or Path("runs") / f"{recipe.name}-{recipe.scale}" / chosen.slug / f"seed{seed}"
    job = Job(recipe, chosen, seed, place, base=base, cpu=cpu, local_code=local_code)
    with leaving_together():
        outcome = run_jobs([job], 1, quiet=quiet or as_json)
    known = bool(outcome.failures) and not outcome.crashed
    if known and not as_json:
        raise WellcondError(outcome.failures[0][1])
    code = tell_end(outcome, as_json=as_json, num_jobs=1)
    # A comparison that continues with other runs has the exit code 1, whatever error a run ends with.
    return 2 if known else code


def run_compare(
    recipe_name: str,
    *,
    scale: str | None,
    methods: str | None,
    seeds: str | None,
    overrides: Sequence[str],
    folder: Path | None,
    jobs: str,
    cpu: bool,
    local_code: bool,
    as_json: bool,
    quiet: bool,
    report: bool,
    ray: RaySettings | None = None,
    print_only: bool = False,
) -> int:
    """A comparison and its report, or the commands that make one; returns the exit code."""
    recipe, base = load_recipe(recipe_name, scale=scale, overrides=overrides)
    chosen = recipe.methods if methods is None else parse_methods(methods)
    numbers = parse_seeds(seeds, recipe)
    place = folder or Path("runs") / f"{recipe.name}-{recipe.scale}"
    planned = plan_comparison(recipe, chosen, numbers, place, base=base, cpu=cpu, local_code=local_code)
    if print_only:
        lines = [job_command(job, recipe_name, scale=scale, overrides=overrides) for job in planned]
        write_comparison(place, recipe, chosen, numbers)
        _print_jobs(lines, place, as_json=as_json, quiet=quiet)
        return 0
    workers = len(planned) if ray is not None and jobs == "auto" else choose_workers(jobs, recipe, cpu=cpu)
    if is_first_process():
        write_comparison(place, recipe, chosen, numbers)
        if not (quiet or as_json):
            _print_plan(recipe, chosen, numbers, place)
    with leaving_together():
        outcome = run_jobs(planned, workers, quiet=quiet or as_json, ray=ray)
    code = tell_end(outcome, as_json=as_json, num_jobs=len(planned))
    if report and is_first_process() and any(record["final"] for record in outcome.records):
        print_report(place, quiet=quiet or as_json)
    return code


def _print_plan(recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], place: Path) -> None:
    out = make_console()
    out.print(f"[bold]{escape(recipe.title or recipe.name)}[/] ({recipe.scale})")
    out.print(
        f"{len(methods)} methods x {len(seeds)} seeds; runs with the same seed share data order and all other weights. "
        f"Folder: {place}",
        markup=False,
        soft_wrap=True,
    )
    for line in foresee_power(place, len(seeds)):
        out.print(f"From the runs that are there: {line}", markup=False, soft_wrap=True)


def _print_jobs(lines: Sequence[str], place: Path, *, as_json: bool, quiet: bool) -> None:
    """Commands on standard output, so that it can be a file of them; what to do with them on standard error."""
    print(to_json({"jobs": lines}, indent=1) if as_json else "\n".join(lines))
    if not (as_json or quiet):
        told = f"{len(lines)} runs; when they are done: wellcond report {shlex.quote(str(place))}"
        Console(stderr=True).print(told, markup=False, highlight=False, soft_wrap=True)


def run_jobs(jobs: Sequence[Job], num_workers: int, *, quiet: bool, ray: RaySettings | None = None) -> Outcome:
    """Run jobs and show how they go."""
    progress = RunsProgress(len(jobs), quiet=quiet or not is_first_process())
    with progress.shown():
        return run_comparison(jobs, num_workers=num_workers, observer=progress.observe, ray=ray)


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """End the group of processes afterwards, if there is one."""

    def in_a_group() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    try:
        yield
        if in_a_group():
            torch.distributed.barrier()  # nobody leaves while another process still waits for an answer
    finally:
        if in_a_group():
            torch.distributed.destroy_process_group()
            # Models may still hold the group. One of gloo's threads that lets go of its last tensor while the
            # interpreter ends would abort the process, after all work is done: give them the moment that takes.
            time.sleep(0.2)


def tell_end(outcome: Outcome, *, num_jobs: int, as_json: bool, more: Mapping[str, Any] | None = None) -> int:
    """Say what failed or is left, or with `as_json` all of it and `more`; returns the exit code."""
    if not is_first_process():
        return 1 if outcome.failures else 0
    if as_json:
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [{name: record[name] for name in shown if name in record} for record in outcome.records]
        rows += [
            {"method": j.method.label, "seed": j.seed, "status": "failed", "reason": e} for j, e in outcome.failures
        ]
        print(to_json({"runs": rows, "interrupted": outcome.interrupted, **(more or {})}, indent=1))
    else:
        out = make_console()
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        if outcome.interrupted:
            left = num_jobs - sum(record["status"] in ("finished", "diverged") for record in outcome.records)
            out.print(f"[yellow]stopped[/] with {left} of {num_jobs} runs to go; the same command resumes from here")
    return 130 if outcome.interrupted else 1 if outcome.failures else 0


def print_recipes(*, as_json: bool) -> None:
    """List the recipes that ship."""
    recipes = [parse_recipe(shipped.text, f"{shipped.scale}/{shipped.name}") for shipped in shipped_recipes()]
    if as_json:
        print(to_json([recipe.model_dump(mode="json") for recipe in recipes], indent=1))
        return
    rows = []
    for recipe in recipes:
        length = recipe.training.length
        amount = f"{length.epochs:g} epochs" if length.epochs else f"{length.steps} steps"
        if recipe.training.hours is not None:
            amount = f"{recipe.training.hours:g} hours"
        rows.append((recipe.name, recipe.scale, amount, recipe.title))
    header = ("recipe", "scale", "length", "what")
    made = Table("recipes", "Recipes", header, tuple(rows), (), frozenset(range(len(header))))
    print_table(make_console(), made.title, made)

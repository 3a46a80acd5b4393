"""`wellcond train`, `compare`, `demo`, `report` and `recipes`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wellcond.cli.engines import job_command
from wellcond.cli.inspect import make_console
from wellcond.cli.progress import RunsProgress
from wellcond.errors import WellcondError
from wellcond.experiments.compare import Outcome, plan_comparison, run_comparison, write_comparison
from wellcond.experiments.load_recipe import load_recipe, parse_recipe, shipped_recipes
from wellcond.experiments.methods import MethodSettings, parse_methods
from wellcond.experiments.ray_engine.settings import RaySettings
from wellcond.experiments.recipe import Recipe
from wellcond.experiments.run import Job
from wellcond.experiments.settings import RecipeError
from wellcond.files import to_json
from wellcond.report.table import Table as ReportTable

FILE_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")


def data_overrides(data: str | None, input_column: str | None, label_column: str | None) -> list[str]:
    """Settings for the user's own data: a folder of images, a file, or an id of the Hugging Face hub."""
    if data is None:
        if input_column or label_column:
            raise RecipeError("--input and --label name columns of --data; give it too")
        return []
    path = Path(data)
    columns = {name: value for name, value in (("input", input_column), ("label", label_column)) if value}
    if path.is_dir():
        if columns:
            raise RecipeError(f"{path} is a folder of images in class folders: it has no columns to name")
        settings: dict[str, Any] = {"source": "image_folder", "path": str(path.resolve())}
    elif path.suffix in FILE_ENDINGS or path.is_file():
        if not path.is_file():
            raise RecipeError(f"--data: no such file: {path}")
        settings = {"source": "files", "train": str(path.resolve()), "evaluation_fraction": 0.1, **columns}
    else:
        settings = {"source": "hub", "id": data, **columns}
    return [f"data={json.dumps(settings)}"]


def parse_seeds(text: str | None, recipe: Recipe) -> tuple[int, ...]:
    """Those of the recipe, unless others are asked for.

    Raises: RecipeError.
    """
    return recipe.seeds if text is None else read_seeds(text)


def read_seeds(text: str) -> tuple[int, ...]:
    """A number of seeds from 0, or a list such as 3,4,7.

    Raises: RecipeError.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"--seeds: expected a number or a list such as 0,1,2, found {text!r}") from error
    seeds = tuple(range(numbers[0])) if "," not in text else tuple(numbers)
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise RecipeError(f"--seeds: expected at least one seed, none twice or below 0, found {text!r}")
    return seeds


def choose_workers(asked: str, recipe: Recipe, *, cpu: bool) -> int:
    """Runs at once: as many as there are cores, if each keeps to one thread and there is no GPU to share.

    Raises: RecipeError.
    """
    if asked != "auto":
        if not asked.isdigit() or int(asked) < 1:
            raise RecipeError(f"--jobs: expected auto or a number, found {asked!r}")
        return int(asked)
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
    chosen = asked[0]
    place = folder or Path("runs") / f"{recipe.name}-{recipe.scale}" / chosen.slug / f"seed{seed}"
    job = Job(recipe, chosen, seed, place, base=base, cpu=cpu, local_code=local_code)
    outcome = _run([job], 1, quiet=quiet or as_json)
    return _tell_end(outcome, [job], as_json=as_json)


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
    outcome = _run(planned, workers, quiet=quiet or as_json, ray=ray)
    code = _tell_end(outcome, planned, as_json=as_json)
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


def _print_jobs(lines: Sequence[str], place: Path, *, as_json: bool, quiet: bool) -> None:
    """Commands on standard output, so that it can be a file of them; what to do with them on standard error."""
    print(to_json({"jobs": lines}, indent=1) if as_json else "\n".join(lines))
    if not (as_json or quiet):
        told = f"{len(lines)} runs; when they are done: wellcond report {shlex.quote(str(place))}"
        Console(stderr=True).print(told, markup=False, highlight=False, soft_wrap=True)


def _run(jobs: Sequence[Job], num_workers: int, *, quiet: bool, ray: RaySettings | None = None) -> Outcome:
    progress = RunsProgress(len(jobs), quiet=quiet or not is_first_process())
    with leaving_together(), progress.shown():
        return run_comparison(jobs, num_workers=num_workers, observer=progress.observe, ray=ray)


def print_table(out: Console, title: str, made: ReportTable) -> None:
    """Print a table of a report; the console becomes as wide as it needs."""
    table = Table(title=escape(title), header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(made.header):
        table.add_column(escape(name), justify="left" if number in made.text_columns else "right")
    for row in made.rows:
        table.add_row(*map(escape, row))
    out.width = max(out.width, table.__rich_measure__(out, out.options.update(max_width=10_000)).maximum)
    out.print(table)


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


def _tell_end(outcome: Outcome, jobs: Sequence[Job], *, as_json: bool) -> int:
    if not is_first_process():
        return 1 if outcome.failures else 0
    if as_json:
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [{name: record[name] for name in shown if name in record} for record in outcome.records]
        rows += [
            {"method": j.method.label, "seed": j.seed, "status": "failed", "reason": e} for j, e in outcome.failures
        ]
        print(to_json({"runs": rows, "interrupted": outcome.interrupted}, indent=1))
    else:
        out = make_console()
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        if outcome.interrupted:
            left = len(jobs) - sum(record["status"] in ("finished", "diverged") for record in outcome.records)
            out.print(f"[yellow]stopped[/] with {left} of {len(jobs)} runs to go; the same command goes on from here")
    return 130 if outcome.interrupted else 1 if outcome.failures else 0


def print_report(folder: Path, *, pictures: bool = True, quiet: bool = False) -> None:
    """Build the report of a folder, print its summary and where it is."""
    from wellcond.report.analysis import analyse
    from wellcond.report.build import build_report
    from wellcond.report.load_runs import load_comparisons
    from wellcond.report.reading import find_findings
    from wellcond.report.tables import summary_table

    pages = build_report(folder, pictures=pictures)
    if quiet:
        return
    out = make_console()
    for comparison, page in zip(load_comparisons(folder), pages, strict=True):
        analysis = analyse(comparison)
        summary = summary_table(analysis)
        print_table(out, comparison.title, summary)
        for finding in find_findings(analysis):
            out.print(f"- {escape(finding)}", soft_wrap=True)
        out.print(f"report: {page}", markup=False, soft_wrap=True)
        if pictures:
            out.print(f"        {page.with_suffix('.md')}", markup=False, soft_wrap=True)


def print_recipes(*, as_json: bool) -> None:
    """List the recipes that ship."""
    recipes = [parse_recipe(shipped.text, f"{shipped.scale}/{shipped.name}") for shipped in shipped_recipes()]
    if as_json:
        rows = [recipe.model_dump(mode="json") for recipe in recipes]
        print(to_json(rows, indent=1))
        return
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("recipe", "scale", "task", "model", "data", "length", "what"):
        table.add_column(name)
    for recipe in recipes:
        length = recipe.training.length
        amount = f"{length.epochs:g} epochs" if length.epochs else f"{length.steps} steps"
        if recipe.training.hours is not None:
            amount = f"{recipe.training.hours:g} hours"
        data = recipe.data.model_dump()
        table.add_row(
            recipe.name,
            recipe.scale,
            recipe.task.model_dump()["name"],
            recipe.model.name,
            str(data.get("id") or data.get("path") or data.get("generator") or data["source"]),
            amount,
            recipe.title,
        )
    make_console().print(table)


def build_reports(folder: Path, *, pictures: bool) -> None:
    """`wellcond report FOLDER`.

    Raises: WellcondError if there is nothing to report on.
    """
    if not folder.is_dir():
        raise WellcondError(f"no such folder: {folder}")
    print_report(folder, pictures=pictures)

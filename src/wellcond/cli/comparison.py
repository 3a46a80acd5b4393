"""A comparison and its report, run here or on a Ray cluster, or as commands that somebody else runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from wellcond.cli.checks import OptionError, read_seeds
from wellcond.cli.compare import Request
from wellcond.cli.console import make_console
from wellcond.cli.report import foresee_power, print_report
from wellcond.cli.runs import (
    choose_workers,
    is_first_process,
    leaving_together,
    print_json,
    removing_untrained,
    run_jobs,
    tell_end,
)
from wellcond.diagnosis.phrases import count
from wellcond.files import to_json
from wellcond.lab.cluster import RaySettings
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.settings import read_yaml
from wellcond.lab.train.compare import Outcome, plan_comparison, write_comparison
from wellcond.lab.train.run import Job


class Comparison:
    """What a request asks for."""

    def __init__(self, request: Request, suffix: str = "") -> None:
        """Load the recipe.

        Raises: RecipeError, OptionError.
        """
        self.request = request
        self.recipe, base = load_recipe(request.recipe, scale=request.scale, overrides=request.overrides)
        self.methods = self.recipe.methods if request.methods is None else tuple(parse_methods(request.methods))
        self.seeds = self.recipe.seeds if request.seeds is None else read_seeds(request.seeds)
        self.folder = request.folder or Path("runs") / f"{self.recipe.name}-{self.recipe.scale}{suffix}"
        self.options = {"base": base, "cpu": request.cpu, "local_code": request.local_code}

    def plan(self, methods: Sequence[MethodSettings] | None = None) -> list[Job]:
        """Every run.

        Raises: RecipeError.
        """
        return plan_comparison(self.recipe, methods or self.methods, self.seeds, self.folder, **self.options)

    def describe(self) -> None:
        """Write comparison.json.

        Raises: RunError if the folder holds another comparison.
        """
        if is_first_process():
            write_comparison(self.folder, self.recipe, self.methods, self.seeds)

    def run(self, jobs: list[Job]) -> Outcome:
        """Run jobs where the request wants them."""
        ray, asked = self.request.ray, self.request.jobs
        on_ray = ray is not None and asked == "auto"
        workers = len(jobs) if on_ray else choose_workers(asked, self.recipe, cpu=self.request.cpu)
        return run_jobs(jobs, workers, quiet=self.request.silent, ray=ray)

    def report(self, outcome: Outcome) -> None:
        """Build and print the report, if it is wanted and there is something to report."""
        if self.request.report and is_first_process() and any(record["final"] for record in outcome.records):
            print_report(self.folder, quiet=self.request.silent)


def run_compare(request: Request) -> int:
    """A comparison and its report; returns the exit code."""
    comparison = Comparison(request)
    planned = comparison.plan()
    with leaving_together(), removing_untrained(comparison.folder):
        comparison.describe()
        if is_first_process() and not request.silent:
            _print_plan(comparison)
        outcome = comparison.run(planned)
    code = print_json(outcome) if request.as_json else tell_end(outcome, len(planned))
    comparison.report(outcome)
    return code


def _print_plan(comparison: Comparison) -> None:
    out, recipe = make_console(), comparison.recipe
    out.print(f"[bold]{escape(recipe.title or recipe.name)}[/] ({recipe.scale})")
    methods, seeds = count(len(comparison.methods), "method"), count(len(comparison.seeds), "seed")
    out.print(
        f"{methods} x {seeds}; runs with the same seed share data order and all other weights. Folder: "
        f"{comparison.folder}",
        markup=False,
        soft_wrap=True,
    )
    for line in foresee_power(comparison.folder, len(comparison.seeds)):
        out.print(f"From the runs that are there: {line}", markup=False, soft_wrap=True)


def ray_settings(address: str | None, cpus: float | None, gpus: float | None) -> RaySettings:
    """Settings of Ray.

    Raises: OptionError.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError("--engine ray starts its own processes; run the command once, without torchrun or accelerate")
    # Read when ray is imported: its reports of dead processes would go to standard output, between our lines.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return RaySettings(address, cpus, gpus)


def print_commands(request: Request) -> None:
    """`--print-jobs`: commands on standard output, so that it can be a file of them; what to do on standard error."""
    comparison = Comparison(request)
    lines = [
        job_command(job, request.recipe, scale=request.scale, overrides=request.overrides) for job in comparison.plan()
    ]
    comparison.describe()
    print(to_json({"jobs": lines}, indent=1) if request.as_json else "\n".join(lines))
    if not request.silent:
        told = f"{len(lines)} runs; when they are done: wellcond report {shlex.quote(str(comparison.folder))}"
        Console(stderr=True).print(told, markup=False, highlight=False, soft_wrap=True)


def job_command(job: Job, recipe_name: str, *, scale: str | None, overrides: Sequence[str]) -> str:
    """One line for a shell that does exactly this job, in its folder, wherever the shell is.

    Args:
        job: what to run.
        recipe_name: as `load_recipe` takes it.
        scale: as `load_recipe` takes it.
        overrides: as `load_recipe` takes them.

    Raises: OptionError if a path cannot stand on one line.
    """
    words = [*_program(), "train", recipe_name]
    words += [] if scale is None else ["--scale", scale]
    for override in overrides:
        words += ["--set", _on_one_line(override)]
    words += [*_method_words(job.method), "--seed", str(job.seed), "--folder", str(job.folder.absolute())]
    words += ["--cpu"] * job.cpu + ["--trust-local-code"] * job.local_code
    line = f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"
    if len(line.splitlines()) > 1:
        raise OptionError(f"--print-jobs prints one line per run, but a path has several: {line!r}")
    return line


def _program() -> list[str]:
    """The command `wellcond` if that is this installation, its Python otherwise."""
    found = shutil.which("wellcond")
    ours = found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    return ["wellcond"] if ours else [sys.executable, "-m", "wellcond.cli.main"]


def _method_words(method: MethodSettings) -> list[str]:
    """Text where that gives the same method under the same label; all its fields otherwise."""
    try:
        is_text = len(method.label.splitlines()) == 1 and MethodSettings.model_validate(method.label) == method
    except ValidationError:
        is_text = False
    fields = method.model_dump(mode="json")
    return ["--method", method.label] if is_text else ["--set", f"method={json.dumps(fields)}"]


def _on_one_line(override: str) -> str:
    if len(override.splitlines()) <= 1:
        return override
    path, _, text = override.partition("=")
    return f"{path}={json.dumps(read_yaml(text))}"

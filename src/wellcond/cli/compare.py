"""`wellcond compare` and `wellcond demo`: a comparison and its report, run here or on a Ray cluster, or as commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from wellcond.cli import app as cli
from wellcond.errors import check_choice
from wellcond.files import to_json, write_atomically

if TYPE_CHECKING:
    from wellcond.lab.cluster import RaySettings
    from wellcond.lab.methods import MethodSettings
    from wellcond.lab.recipe import Recipe
    from wellcond.lab.train.compare import Outcome
    from wellcond.lab.train.run import Job


@cli.app.command("compare", rich_help_panel=cli.EXPERIMENTS)
def compare(
    recipe: Annotated[str, Option(metavar="NAME|FILE", help="A recipe of `wellcond recipes`, or FILE.yaml.")],
    methods: Annotated[
        str | None, Option(metavar="LIST", help="Such as default,gaussian,conditioned+balanced.")
    ] = None,
    seeds: cli.Seeds = None,
    tune: Annotated[
        list[str] | None,
        Option(
            metavar="FIELD=VALUES",
            rich_help_panel=cli.SEARCH,
            help="Such as optimizer.lr=1e-3,3e-3,1e-2 or identity.lam=1,3,10: each method is first tuned on other "
            "seeds, then all are compared on fresh ones. Several fields search all combinations.",
        ),
    ] = None,
    tuning_seeds: Annotated[
        str, Option(metavar="SEEDS", rich_help_panel=cli.SEARCH, help="How many, from 1000 on, or a list.")
    ] = "2",
    tune_growth: Annotated[
        int, Option(metavar="N", min=0, max=20, rich_help_panel=cli.SEARCH, help="Most steps of a grid beyond an edge.")
    ] = 3,
    scale: cli.ScaleOption = None,
    set: cli.Overrides = None,
    data: cli.Data = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    folder: cli.Folder = None,
    jobs: cli.Jobs = "auto",
    engine: Annotated[str, Option(metavar="NAME", rich_help_panel=cli.CLUSTER, help="local, or ray.")] = "local",
    ray_address: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            rich_help_panel=cli.CLUSTER,
            help="auto or HOST:6379; by default a new cluster on this machine.",
        ),
    ] = None,
    cpus_per_run: Annotated[
        float | None, Option(metavar="N", rich_help_panel=cli.CLUSTER, help="By default the threads of the recipe.")
    ] = None,
    gpus_per_run: Annotated[
        float | None, Option(metavar="N", rich_help_panel=cli.CLUSTER, help="By default 1 where the cluster has GPUs.")
    ] = None,
    cpu: cli.Cpu = False,
    trust_local_code: cli.Trust = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
    report: Annotated[
        bool, Option("--report/--no-report", rich_help_panel=cli.OUTPUT, help="Build the report at the end.")
    ] = True,
    print_jobs: Annotated[
        bool, Option("--print-jobs", rich_help_panel=cli.OUTPUT, help="Run nothing; print one command per run.")
    ] = False,
) -> None:
    """Train every method with every seed under one recipe, and show which is better, by how much, and why."""
    cli.need_train_extra()
    overrides = [*cli.data_overrides(data, input, label), *(set or [])]
    tuning = cli.read_seeds(tuning_seeds, option="--tuning-seeds", first=cli.FIRST_TUNING_SEED)
    fields = cli.read_tuned_fields(tune or [])
    cli.check_experiment(recipe, scale, overrides, seeds, jobs)
    check_choice("engine", engine, ("local", "ray"))
    if print_jobs and (tune or engine == "ray"):
        raise cli.OptionError(
            "--print-jobs knows no runs of --tune and takes no engine; leave out --tune, --engine ray"
        )
    from wellcond.lab.cluster import RaySettings
    from wellcond.lab.load_recipe import load_recipe
    from wellcond.lab.methods import parse_methods

    if data is not None:
        from wellcond.cli.runs import fit_to_data

        overrides += fit_to_data(recipe, scale=scale, overrides=overrides, quiet=quiet or json)
    ray = None
    if engine == "ray":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise cli.OptionError("--engine ray starts its own processes; run the command once, without torchrun")
        # Read when ray is imported: its reports of dead processes would go to standard output, between our lines.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        ray = RaySettings(ray_address, cpus_per_run, gpus_per_run)
    loaded, base = load_recipe(recipe, scale=scale, overrides=overrides)
    comparison = Comparison(
        loaded,
        methods=loaded.methods if methods is None else parse_methods(methods),
        seeds=loaded.seeds if seeds is None else cli.read_seeds(seeds),
        folder=folder or Path("runs") / f"{loaded.name}-{loaded.scale}{'-tuned' * bool(tune)}",
        options={"base": base, "cpu": cpu, "local_code": trust_local_code},
        jobs=jobs, ray=ray, as_json=json, silent=quiet or json, report=report,
    )  # fmt: skip
    if print_jobs:
        lines = [job_command(job, recipe, scale=scale, overrides=overrides) for job in comparison.plan()]
        comparison.describe()
        print(to_json({"jobs": lines}, indent=1) if json else "\n".join(lines))
        if not comparison.silent:  # standard output can be a file of commands
            done = f"wellcond report {shlex.quote(str(comparison.folder))}"
            print(f"{len(lines)} runs; when they are done: {done}", file=sys.stderr)
        return
    if not tune:
        raise typer.Exit(comparison.run_all())
    from wellcond.cli.tuned import tune_and_compare

    raise typer.Exit(tune_and_compare(comparison, fields, tuning, tune_growth))


@cli.app.command("demo", rich_help_panel=cli.EXPERIMENTS)
def demo(folder: cli.Folder = None, seeds: cli.Seeds = None, jobs: cli.Jobs = "auto", quiet: cli.Quiet = False) -> None:
    """Compare initialisations of a small ViT on scikit-learn's digits, each at its tuned learning rate; minutes."""
    cli.need_train_extra()
    place = folder or Path("runs/demo")
    cli.check_experiment("digits", None, (), seeds, jobs)
    from wellcond.lab.load_recipe import load_recipe

    recipe, _ = load_recipe("digits")
    numbers = recipe.seeds if seeds is None else cli.read_seeds(seeds)
    comparison = Comparison(recipe, recipe.methods, numbers, place, jobs=jobs, silent=quiet)
    comparison.describe()
    found = resources.files("wellcond.lab") / "recipes" / "tiny" / "digits.tuning.json"  # of the rates of its methods
    write_atomically(place / "tuning.json", found.read_text(encoding="utf-8"))
    raise typer.Exit(comparison.run_all())


@dataclass
class Comparison:
    """Methods and seeds under one recipe, where they are run, and what is printed."""

    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    seeds: tuple[int, ...]
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    """Of every run."""
    jobs: str = "auto"
    ray: RaySettings | None = None
    as_json: bool = False
    silent: bool = False
    """Whether nothing is printed for people while it runs."""
    report: bool = True

    def plan(self, methods: Sequence[MethodSettings] | None = None) -> list[Job]:
        """Every run; raises RecipeError."""
        from wellcond.lab.train.compare import plan_comparison

        return plan_comparison(self.recipe, methods or self.methods, self.seeds, self.folder, **self.options)

    def describe(self) -> None:
        """Write comparison.json; raises RunError if the folder holds another comparison."""
        from wellcond.lab.train.compare import write_comparison

        if cli.is_first_process():
            write_comparison(self.folder, self.recipe, self.methods, self.seeds)

    def run(self, jobs: list[Job]) -> Outcome:
        """Run jobs here or on Ray."""
        from wellcond.cli.runs import choose_workers, run_jobs

        on_ray = self.ray is not None and self.jobs == "auto"
        workers = len(jobs) if on_ray else choose_workers(self.jobs, self.recipe, cpu=self.options.get("cpu", False))
        return run_jobs(jobs, workers, quiet=self.silent, ray=self.ray)

    def run_all(self) -> int:
        """Every run and the report; returns the exit code."""
        from wellcond.cli.console import make_console
        from wellcond.cli.runs import leaving_together, removing_untrained

        planned = self.plan()
        with leaving_together(), removing_untrained(self.folder):
            self.describe()
            if cli.is_first_process() and not self.silent:
                told = f"{self.recipe.title or self.recipe.name} ({self.recipe.scale}): {len(self.methods)} methods x "
                told += f"{len(self.seeds)} seeds; runs with the same seed share data order and all other weights"
                make_console().print(f"{told}. Folder: {self.folder}", markup=False, soft_wrap=True)
            outcome = self.run(planned)
        return self.end(outcome, len(planned))

    def end(self, outcome: Outcome, num_jobs: int, more: Mapping[str, Any] | None = None) -> int:
        """Say what became of the runs; build and print the report, if it is wanted; returns the exit code."""
        from wellcond.cli.report import print_report
        from wellcond.cli.runs import print_json, tell_end

        code = print_json(outcome, more) if self.as_json else tell_end(outcome, num_jobs)
        if self.report and cli.is_first_process() and any(record["final"] for record in outcome.records):
            print_report(self.folder, quiet=self.silent)
        return code


def job_command(job: Job, recipe_name: str, *, scale: str | None, overrides: Sequence[str]) -> str:
    """One line for a shell that does exactly this job of a recipe with overrides, wherever the shell is."""
    words = [sys.executable, "-m", "wellcond.cli.main", "train", recipe_name]
    words += [] if scale is None else ["--scale", scale]
    for override in (*overrides, f"method={dumps(job.method.model_dump(mode='json'))}"):
        words += ["--set", override]
    words += ["--seed", str(job.seed), "--folder", str(job.folder.absolute())]
    words += ["--cpu"] * job.cpu + ["--trust-local-code"] * job.local_code
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"

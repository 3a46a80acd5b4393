"""`wellcond compare` and `wellcond demo`: a comparison and its report, run here or on a Ray cluster, or as commands."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wellcond.cli import app as cli
from wellcond.errors import check_choice
from wellcond.files import to_json, write_atomically

if TYPE_CHECKING:
    from wellcond.lab.cluster import RaySettings
    from wellcond.lab.methods import MethodSettings
    from wellcond.lab.train.compare import Outcome
    from wellcond.lab.train.run import Job


@cli.app.command("compare", rich_help_panel=cli.EXPERIMENTS)
def compare(
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="A recipe of `wellcond recipes`, or FILE.yaml.")
    ],
    methods: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Separated by commas, such as default, gaussian, conditioned+balanced."),
    ] = None,
    seeds: cli.Seeds = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUES",
            rich_help_panel=cli.SEARCH,
            help="Such as optimizer.lr=1e-3,3e-3,1e-2 or identity.lam=1,3,10: each method is first tuned on other "
            "seeds, then all are compared on fresh ones. Several fields search all combinations.",
        ),
    ] = None,
    tuning_seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            rich_help_panel=cli.SEARCH,
            help="Number of seeds to tune on, counted from 1000, or a list; 2 by default.",
        ),
    ] = None,
    tune_growth: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=20,
            rich_help_panel=cli.SEARCH,
            help="How often the grid may be extended in each direction while the best value is at its edge; 3 by "
            "default.",
        ),
    ] = None,
    scale: cli.ScaleOption = None,
    set: cli.Overrides = None,
    data: cli.Data = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    folder: cli.Folder = None,
    jobs: cli.Jobs = "auto",
    engine: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=cli.CLUSTER, help="local, or ray for a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            rich_help_panel=cli.CLUSTER,
            help="auto or HOST:6379; by default a new cluster on this machine.",
        ),
    ] = None,
    cpus_per_run: Annotated[
        float | None,
        typer.Option(metavar="N", rich_help_panel=cli.CLUSTER, help="By default the threads of the recipe."),
    ] = None,
    gpus_per_run: Annotated[
        float | None,
        typer.Option(metavar="N", rich_help_panel=cli.CLUSTER, help="By default 1 where the cluster has GPUs."),
    ] = None,
    cpu: cli.Cpu = False,
    trust_local_code: cli.Trust = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", rich_help_panel=cli.OUTPUT, help="Build the report at the end.")
    ] = True,
    print_jobs: Annotated[
        bool,
        typer.Option(
            "--print-jobs",
            rich_help_panel=cli.OUTPUT,
            help="Run nothing; print one command per run, for Slurm and the like.",
        ),
    ] = False,
) -> None:
    """Train every method with every seed under one recipe, and show which is better, by how much, and why."""
    cli.need_train_extra()
    overrides = [*cli.data_overrides(data, input, label), *(set or [])]
    tuning = cli.read_seeds(tuning_seeds or "2", option="--tuning-seeds", first=cli.FIRST_TUNING_SEED)
    ray_options = {"--ray-address": ray_address, "--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run}
    if not tune:
        _require_with({"--tuning-seeds": tuning_seeds, "--tune-growth": tune_growth}, "--tune")
    elif print_jobs:
        raise cli.OptionError("--print-jobs cannot know the runs of --tune beforehand; leave out one of them")
    fields = cli.read_tuned_fields(tune or [])
    cli.check_experiment(recipe, scale=scale, overrides=overrides, folder=folder, seeds=seeds, jobs=jobs)
    check_choice("engine", engine, ("local", "ray"))
    if engine == "local":
        _require_with(ray_options, "--engine ray")
    elif print_jobs:
        raise cli.OptionError("--print-jobs runs nothing, so it takes no engine; leave out --engine ray")
    if data is not None:
        from wellcond.cli.runs import fit_to_data

        overrides += fit_to_data(recipe, scale=scale, overrides=overrides, quiet=quiet or json)
    ray = _ray_settings(ray_address, cpus_per_run, gpus_per_run) if engine == "ray" else None
    comparison = Comparison(
        recipe, scale=scale, overrides=overrides, methods=methods, seeds=seeds, folder=folder,
        suffix="-tuned" if tune else "", jobs=jobs, cpu=cpu, local_code=trust_local_code, ray=ray, as_json=json,
        quiet=quiet, report=report,
    )  # fmt: skip
    if print_jobs:
        comparison.print_commands()
        return
    if not tune:
        raise typer.Exit(comparison.run_all())
    from wellcond.cli.tuned import tune_and_compare

    raise typer.Exit(tune_and_compare(comparison, fields, tuning, 3 if tune_growth is None else tune_growth))


@cli.app.command("demo", rich_help_panel=cli.EXPERIMENTS)
def demo(folder: cli.Folder = None, seeds: cli.Seeds = None, jobs: cli.Jobs = "auto", quiet: cli.Quiet = False) -> None:
    """Compare initialisations of a small ViT on scikit-learn's digits, each at its tuned learning rate; minutes."""
    cli.need_train_extra()
    place = folder or Path("runs/demo")
    cli.check_experiment("digits", folder=place, seeds=seeds, jobs=jobs)
    from wellcond.cli.report import print_report
    from wellcond.lab.train.run_folder import writing

    code = Comparison("digits", seeds=seeds, folder=place, jobs=jobs, quiet=quiet, report=False).run_all()
    if code == 0:  # with the search that found the rates of its methods
        found = resources.files("wellcond.lab") / "recipes" / "tiny" / "digits.tuning.json"
        with writing(place / "tuning.json"):
            write_atomically(place / "tuning.json", found.read_text(encoding="utf-8"))
        print_report(place, quiet=quiet)
    raise typer.Exit(code)


def _require_with(options: Mapping[str, object], other: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise cli.OptionError(f"{name} has an effect only with {other}; give both or neither")


def _ray_settings(address: str | None, cpus: float | None, gpus: float | None) -> RaySettings:
    from wellcond.lab.cluster import RaySettings

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise cli.OptionError(
            "--engine ray starts its own processes; run the command once, without torchrun or accelerate"
        )
    # Read when ray is imported: its reports of dead processes would go to standard output, between our lines.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return RaySettings(address, cpus, gpus)


class Comparison:
    """Methods and seeds under one recipe, where they are run, and what is printed."""

    def __init__(
        self,
        name: str,
        *,
        scale: str | None = None,
        overrides: Sequence[str] = (),
        methods: str | None = None,
        seeds: str | None = None,
        folder: Path | None = None,
        suffix: str = "",
        jobs: str = "auto",
        cpu: bool = False,
        local_code: bool = False,
        ray: RaySettings | None = None,
        as_json: bool = False,
        quiet: bool = False,
        report: bool = True,
    ) -> None:
        """Load the recipe; a folder that is not given is named after it, with the suffix.

        Raises: RecipeError, OptionError.
        """
        from wellcond.lab.load_recipe import load_recipe
        from wellcond.lab.methods import parse_methods

        self.asked: dict[str, Any] = {"recipe_name": name, "scale": scale, "overrides": overrides}
        self.recipe, base = load_recipe(name, scale=scale, overrides=overrides)
        self.methods = self.recipe.methods if methods is None else parse_methods(methods)
        self.seeds = self.recipe.seeds if seeds is None else cli.read_seeds(seeds)
        self.folder = folder or Path("runs") / f"{self.recipe.name}-{self.recipe.scale}{suffix}"
        self.options: dict[str, Any] = {"base": base, "cpu": cpu, "local_code": local_code}
        self.jobs, self.ray, self.as_json, self.report = jobs, ray, as_json, report
        self.silent = quiet or as_json
        """Whether nothing is printed for people while it runs."""

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
        workers = len(jobs) if on_ray else choose_workers(self.jobs, self.recipe, cpu=self.options["cpu"])
        return run_jobs(jobs, workers, quiet=self.silent, ray=self.ray)

    def run_all(self) -> int:
        """Every run and the report; returns the exit code."""
        from wellcond.cli.runs import leaving_together, removing_untrained

        planned = self.plan()
        with leaving_together(), removing_untrained(self.folder):
            self.describe()
            if cli.is_first_process() and not self.silent:
                self._print_plan()
            outcome = self.run(planned)
        return self.end(outcome, len(planned))

    def _print_plan(self) -> None:
        from rich.markup import escape

        from wellcond.cli.console import make_console
        from wellcond.cli.report import foresee_power
        from wellcond.diagnosis.phrases import count

        out = make_console()
        out.print(f"[bold]{escape(self.recipe.title or self.recipe.name)}[/] ({self.recipe.scale})")
        methods, seeds = count(len(self.methods), "method"), count(len(self.seeds), "seed")
        shared = "runs with the same seed share data order and all other weights"
        out.print(f"{methods} x {seeds}; {shared}. Folder: {self.folder}", markup=False, soft_wrap=True)
        for line in foresee_power(self.folder, len(self.seeds)):
            out.print(f"From the runs that are there: {line}", markup=False, soft_wrap=True)

    def end(self, outcome: Outcome, num_jobs: int, more: Mapping[str, Any] | None = None) -> int:
        """Say what became of the runs; build and print the report, if it is wanted; returns the exit code."""
        from wellcond.cli.report import print_report
        from wellcond.cli.runs import print_json, tell_end

        code = print_json(outcome, more) if self.as_json else tell_end(outcome, num_jobs)
        if self.report and cli.is_first_process() and any(record["final"] for record in outcome.records):
            print_report(self.folder, quiet=self.silent)
        return code

    def print_commands(self) -> None:
        """Commands on standard output, so that it can be a file of them; what to do on standard error."""
        lines = [job_command(job, **self.asked) for job in self.plan()]
        self.describe()
        print(to_json({"jobs": lines}, indent=1) if self.as_json else "\n".join(lines))
        if not self.silent:
            done = f"wellcond report {shlex.quote(str(self.folder))}"
            print(f"{len(lines)} runs; when they are done: {done}", file=sys.stderr)


def job_command(job: Job, recipe_name: str, *, scale: str | None, overrides: Sequence[str]) -> str:
    """One line for a shell that does exactly this job of a recipe with overrides, wherever the shell is.

    Raises: OptionError if an option or a path cannot stand on one line.
    """
    words = [*_program(), "train", recipe_name]
    words += [] if scale is None else ["--scale", scale]
    for override in overrides:
        words += ["--set", override]
    words += [*_method_words(job.method), "--seed", str(job.seed), "--folder", str(job.folder.absolute())]
    words += ["--cpu"] * job.cpu + ["--trust-local-code"] * job.local_code
    line = f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"
    if len(line.splitlines()) > 1:
        raise cli.OptionError(f"--print-jobs prints one line per run, but an option or a path has several: {line!r}")
    return line


def _program() -> list[str]:
    """The command `wellcond` if that is this installation, its Python otherwise."""
    found = shutil.which("wellcond")
    ours = found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    return ["wellcond"] if ours else [sys.executable, "-m", "wellcond.cli.main"]


def _method_words(method: MethodSettings) -> list[str]:
    """Text where that gives the same method under the same label; all its fields otherwise."""
    from pydantic import ValidationError

    from wellcond.lab.methods import MethodSettings

    try:
        is_text = len(method.label.splitlines()) == 1 and MethodSettings.model_validate(method.label) == method
    except ValidationError:
        is_text = False
    fields = method.model_dump(mode="json")
    return ["--method", method.label] if is_text else ["--set", f"method={dumps(fields)}"]

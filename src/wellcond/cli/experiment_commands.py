"""Arguments of the commands that train and report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from wellcond.cli.commands import app
from wellcond.errors import MissingExtraError, check_choice

ENGINES = ("local", "ray")
DEFAULT_GROWTH = 3

RecipeName = Annotated[str, typer.Option("--recipe", help="Name of a shipped recipe (wellcond recipes), or FILE.yaml.")]
ScaleOption = Annotated[str | None, typer.Option(help="tiny, small or paper, where a recipe exists at several.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field, such as optimizer.lr=1e-3; repeatable."),
]
Data = Annotated[
    str | None, typer.Option(metavar="PATH|ID", help="Your own data: image folder, parquet/jsonl/csv/txt, or hub id.")
]
InputColumn = Annotated[str | None, typer.Option("--input", help="Column of --data with the images or texts.")]
LabelColumn = Annotated[str | None, typer.Option("--label", help="Column of --data with the labels.")]
Folder = Annotated[Path | None, typer.Option("--folder", "-o", help="Where to write; under runs/ by default.")]
Jobs = Annotated[str, typer.Option(help="Runs at once: auto, or a number.")]
Engine = Annotated[str, typer.Option(help="local, or ray: the machines of a Ray cluster.")]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="auto, HOST:6379 or ray://HOST:10001; a cluster on this machine by default."),
]
CpusPerRun = Annotated[float | None, typer.Option(help="With --engine ray; the recipe's threads by default.")]
GpusPerRun = Annotated[float | None, typer.Option(help="With --engine ray; 1 by default where the cluster has GPUs.")]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        "--tune",
        metavar="FIELD=VALUES",
        help="Such as optimizer.lr=3e-4,1e-3,3e-3,1e-2, or identity.lam=1,3,10: each method first finds its best value "
        "on tuning seeds, then all are compared on fresh ones; several fields search their product.",
    ),
]
TuningSeeds = Annotated[
    str | None, typer.Option(help="With --tune: how many, from 1000; or a list. 2 by default, none of them tested.")
]
TuneGrowth = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=20,
        help="With --tune: how often a grid grows each way while its best value is at an edge; 3 by default.",
    ),
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Do not use a GPU.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-local-code", help="Let the recipe name path/to/file.py:callable, and run the code in it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while running.")]


def need_train_extra() -> None:
    """Say what to install before anything is imported that needs it; importing accelerate would load torch."""
    for package, name in (("accelerate", "accelerate"), ("pydantic", "pydantic"), ("yaml", "pyyaml")):
        if sys.modules.get(package, package) is None or importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, "train")


@app.command("train")
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or FILE.yaml.")],
    method: Annotated[
        str | None, typer.Option(help="Such as conditioned, identity(lam=2) or conditioned+balanced.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    scale: ScaleOption = None,
    set: Overrides = None,
    data: Data = None,
    input: InputColumn = None,
    label: LabelColumn = None,
    folder: Folder = None,
    cpu: Cpu = False,
    trust_local_code: Trust = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one model with one method and one seed; the same command resumes an interrupted run."""
    need_train_extra()
    from wellcond.cli.experiment_checks import check_experiment, data_overrides

    overrides = [*data_overrides(data, input, label), *(set or [])]
    check_experiment(recipe, scale=scale, overrides=overrides, folder=folder)
    from wellcond.cli.experiments import run_train

    code = run_train(
        recipe,
        scale=scale,
        method=method,
        seed=seed,
        overrides=overrides,
        folder=folder,
        cpu=cpu,
        local_code=trust_local_code,
        as_json=json,
        quiet=quiet,
    )
    raise typer.Exit(code)


@app.command("compare")
def compare(
    recipe: RecipeName,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated, such as default,conditioned,identity(lam=2).")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="How many, from 0; or a list such as 3,4,7.")] = None,
    tune: Tune = None,
    tuning_seeds: TuningSeeds = None,
    tune_growth: TuneGrowth = None,
    scale: ScaleOption = None,
    set: Overrides = None,
    data: Data = None,
    input: InputColumn = None,
    label: LabelColumn = None,
    folder: Folder = None,
    jobs: Jobs = "auto",
    engine: Engine = "local",
    ray_address: RayAddress = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    cpu: Cpu = False,
    trust_local_code: Trust = False,
    json: Json = False,
    quiet: Quiet = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Build the report at the end.")] = True,
    print_jobs: Annotated[
        bool, typer.Option("--print-jobs", help="Print one command per run, for Slurm and the like; run nothing.")
    ] = False,
) -> None:
    """Train every method with every seed under one recipe, and show who wins, by how much, and why."""
    need_train_extra()
    from wellcond.cli.experiment_checks import check_experiment, check_tuning, data_overrides

    overrides = [*data_overrides(data, input, label), *(set or [])]
    check_tuning(tune or [], seeds=tuning_seeds, growth=tune_growth, print_jobs=print_jobs)
    check_experiment(recipe, scale=scale, overrides=overrides, folder=folder, seeds=seeds, jobs=jobs)
    check_choice("engine", engine, ENGINES)
    from wellcond.cli.engines import choose_engine
    from wellcond.cli.experiments import run_compare

    ray = choose_engine(engine, address=ray_address, cpus=cpus_per_run, gpus=gpus_per_run, print_only=print_jobs)
    settings: dict[str, Any] = {
        "scale": scale,
        "methods": methods,
        "seeds": seeds,
        "overrides": overrides,
        "folder": folder,
        "jobs": jobs,
        "cpu": cpu,
        "local_code": trust_local_code,
        "as_json": json,
        "quiet": quiet,
        "report": report,
        "ray": ray,
    }
    if tune:
        from wellcond.cli.tuned_compare import TuneOptions, run_tuned_compare

        asked = TuneOptions(tune, tuning_seeds, DEFAULT_GROWTH if tune_growth is None else tune_growth)
        raise typer.Exit(run_tuned_compare(recipe, asked, **settings))
    raise typer.Exit(run_compare(recipe, **settings, print_only=print_jobs))


@app.command("demo")
def demo(
    folder: Folder = None,
    seeds: Annotated[str | None, typer.Option(help="How many, from 0; or a list.")] = None,
    jobs: Jobs = "auto",
    quiet: Quiet = False,
) -> None:
    """Compare starts of a small ViT on scikit-learn's digits, each at its tuned rate: minutes on two cores."""
    need_train_extra()
    from wellcond.cli.experiment_checks import check_experiment

    place = folder or Path("runs/demo")
    check_experiment("digits", scale=None, overrides=[], folder=place, seeds=seeds, jobs=jobs)
    from wellcond.cli.demo import run_demo

    raise typer.Exit(run_demo(place, seeds=seeds, jobs=jobs, quiet=quiet))


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="A comparison, or a folder with several.")],
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Draw figures and make the page.")] = True,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Loss within which a tuned value counts as good; by default 2 points of a percentage, 2 % of others.",
        ),
    ] = None,
) -> None:
    """Rebuild tables, figures and the page from the records."""
    from wellcond.cli.report import build_reports

    build_reports(folder, pictures=pictures, tolerance=tolerance)


@app.command("recipes")
def recipes(json: Json = False) -> None:
    """List the recipes that ship with wellcond."""
    need_train_extra()
    from wellcond.cli.experiments import print_recipes

    print_recipes(as_json=json)

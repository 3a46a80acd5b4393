"""Commands that train: `wellcond compare`, `demo`, `train` and `glue`; and the recipes that ship."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from wellcond.arguments import check_choice
from wellcond.cli import app as cli
from wellcond.cli.console import (
    ConsoleWatch,
    echo_json,
    is_rank_zero,
    make_console,
    print_line,
    print_tables,
    run_watched,
    tell_end,
)
from wellcond.errors import WellcondError
from wellcond.files import to_json
from wellcond.lab.report.table import Cell, Table

if TYPE_CHECKING:
    from wellcond.lab.comparison import Result

tuning_option = functools.partial(Option, rich_help_panel="Tuning")
ray_option = functools.partial(Option, rich_help_panel="On a Ray cluster")


@cli.app.command("compare", rich_help_panel=cli.EXPERIMENTS)
def compare(
    recipe: Annotated[
        str | None, Option(metavar="NAME|FILE", help="One of `wellcond recipes`, or FILE.yaml; by default from --data.")
    ] = None,
    methods: Annotated[
        str | None, Option(metavar="LIST", help="Methods to compare, such as default,gaussian,conditioned+balanced.")
    ] = None,
    seeds: cli.Seeds = None,
    tune: Annotated[
        list[str] | None,
        tuning_option(
            metavar="FIELD=VALUES",
            help="e.g. optimizer.lr=1e-3,3e-3 or identity.lam=1,3: each method is tuned on other seeds, then tested on "
            "fresh ones. Several fields: all combinations.",
        ),
    ] = None,
    tuning_seeds: Annotated[
        str, tuning_option(metavar="SEEDS", help="Number of seeds to tune on (from 1000 on), or a list.")
    ] = "2",
    tune_growth: Annotated[
        int, tuning_option(metavar="N", min=0, max=20, help="Steps that a search may go beyond its grid.")
    ] = 3,
    scale: cli.ScaleOption = None,
    set: cli.Overrides = None,
    model: cli.OwnModel = None,
    data: cli.Data = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    import_: cli.Import = None,
    folder: cli.Folder = None,
    jobs: cli.Jobs = "auto",
    engine: Annotated[str, ray_option(metavar="NAME", help="What starts the runs: local, or ray.")] = "local",
    ray_address: Annotated[
        str | None, ray_option(metavar="ADDRESS", help="Cluster to use: auto or HOST:6379; by default a new one.")
    ] = None,
    cpus_per_run: Annotated[
        float | None,
        ray_option(metavar="N", min=0, max=10_000, help="Cores of one run; by default the recipe's threads."),
    ] = None,
    gpus_per_run: cli.GpusPerRun = None,
    cpu: cli.Cpu = False,
    trust_local_code: cli.Trust = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
    report: Annotated[bool, cli.output_option("--report/--no-report", help="Build the report at the end.")] = True,
) -> None:
    """Train every method with every seed under one recipe, and show which is better, by how much, and why."""
    cli.need_train_extra()
    numbers, at_once = cli.read_seeds(seeds), cli.read_jobs(jobs)
    tuning = cli.read_seeds(tuning_seeds, option="--tuning-seeds", first=cli.FIRST_TUNING_SEED) or ()
    grid = cli.read_tuned_fields(tune or [])
    check_choice("engine", engine, ("local", "ray"))
    if engine == "ray" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise cli.OptionError("--engine ray starts its own processes; run the command once, without torchrun")
    if engine == "ray" and gpus_per_run is not None and gpus_per_run > 1:
        raise cli.OptionError("--gpus-per-run: with --engine ray a run is one process, so at most 1")
    cli.check_parts(recipe, scale, set, model, data)
    from wellcond.lab import comparison
    from wellcond.lab.cluster import RaySettings

    result = comparison.compare(
        recipe,
        model=model,
        data=data,
        methods=methods,
        seeds=numbers,
        tune=grid,
        tuning_seeds=tuning,
        tune_growth=tune_growth,
        settings=set or (),
        scale=scale,
        folder=folder,
        files=import_ or (),
        at_once=at_once,
        ranks=1 if engine == "ray" else cli.read_ranks(gpus_per_run),
        ray=RaySettings(ray_address, cpus_per_run, gpus_per_run) if engine == "ray" else None,
        cpu=cpu,
        local_code=trust_local_code,
        data_options=cli.column_options(input, label),
        watch=ConsoleWatch(quiet=quiet or json),
    )
    raise typer.Exit(_finish(result, as_json=json, quiet=quiet, report=report))


def _finish(result: Result, *, as_json: bool, quiet: bool, report: bool) -> int:
    """Print how a comparison ended, and its report if anything was trained; returns the exit code."""
    from wellcond.cli.report import print_report

    more: dict[str, Any] = {"rates": result.rates} if result.rates else {}
    more |= {"tuning": result.tuning} if result.tuning else {}
    code = tell_end(result.outcome, as_json=as_json, **more)
    tested = result.tested and any(record["final"] for record in result.outcome.records)
    if report and tested and is_rank_zero():
        print_report(result.folder, quiet=quiet or as_json)
    return code


@cli.app.command("try", rich_help_panel=cli.EXPERIMENTS)
def try_(
    model: cli.Model,
    data: Annotated[str, Option(metavar="PATH|ID", help=cli.DATA_HELP)],
    methods: Annotated[
        str, Option(metavar="LIST", help="Methods to compare; the first is the baseline.")
    ] = "default,calibrated",
    seeds: Annotated[
        int | None, Option(metavar="N", min=3, max=1000, help="Number of seeds; by default 5, or 3 if time is short.")
    ] = None,
    minutes: Annotated[
        float, Option(metavar="N", min=0.1, max=100_000, help="Time for all runs together on this machine.")
    ] = 5.0,
    set: cli.Overrides = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    import_: cli.Import = None,
    folder: cli.Folder = None,
    jobs: cli.Jobs = "auto",
    cpu: cli.Cpu = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
) -> None:
    """Find out whether an initialisation helps your model on your data; the same command resumes.

    The learning rate of every method is searched alike, on other seeds than those of the answer.
    """
    cli.need_train_extra()
    at_once = cli.read_jobs(jobs)
    cli.check_parts(None, None, None, model, data)
    from wellcond.lab import trial

    answer = trial.try_(
        model,
        data,
        methods=methods,
        seeds=seeds,
        minutes=minutes,
        settings=set or (),
        folder=folder,
        files=import_ or (),
        at_once=at_once,
        cpu=cpu,
        data_options=cli.column_options(input, label),
        watch=ConsoleWatch(quiet=quiet or json),
    )
    found = {"answer": list(answer.lines), "verdicts": dict(answer.verdicts), "seeds_needed": dict(answer.seeds_needed)}
    code = tell_end(answer.result.outcome, as_json=json, **found)
    if not json and is_rank_zero():
        for line in answer.lines:
            print_line(make_console(), line)
    raise typer.Exit(code)


@cli.app.command("demo", rich_help_panel=cli.EXPERIMENTS)
def demo(folder: cli.Folder = None, seeds: cli.Seeds = None, jobs: cli.Jobs = "auto", quiet: cli.Quiet = False) -> None:
    """Compare initialisations of a small ViT on scikit-learn's digits, each at its tuned learning rate; minutes."""
    cli.need_train_extra()
    numbers, at_once = cli.read_seeds(seeds), cli.read_jobs(jobs)
    from wellcond.lab import comparison

    place = folder or Path("runs/demo")
    watch = ConsoleWatch(quiet=quiet)
    result = comparison.compare("digits", seeds=numbers or 3, folder=place, at_once=at_once, watch=watch)
    code = _finish(result, as_json=False, quiet=quiet, report=True)
    if not quiet and not code and is_rank_zero():
        watch.say("", *describe_demo(result.outcome.records))
    raise typer.Exit(code)


def describe_demo(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the demo shows, in plain words with the numbers of its runs, and the command to type next."""
    scores: dict[str, list[float]] = {}
    for record in records:
        if record["status"] == "finished" and record.get("test"):
            scores.setdefault(record["method"], []).append(100 * record["test"]["accuracy"])
    shown = {method: f"{sum(found) / len(found):.1f} %" for method, found in scores.items()}
    sentences = (
        (
            "Scale matters: timm's weights, made for a width of 768, give {} of the test digits in this small model; "
            "at the scale that they have at width 768 they give {}.",
            ("default(library=true)", "default"),
        ),
        (
            "Tokens matter too: with larger positions it is {}, and `calibrated`, which finds such scales on one "
            "batch, gives {}.",
            ("tokens(embeddings=3, positions=50)", "calibrated"),
        ),
        (
            "Does conditioning add to scale? `conditioned` gives {}, and `gaussian`, of the same scale without "
            "conditioning, {}. Over ten seeds we found no difference (results/README.md).",
            ("conditioned", "gaussian"),
        ),
    )
    lines = [text.format(*(shown[name] for name in names)) for text, names in sentences if set(names) <= set(shown)]
    numbered = [f"{number}. {line}" for number, line in enumerate(lines, 1)]
    return [
        "See what every attention head does, act on it, and know whether it helped. The demo in plain words:",
        *numbered,
        "Next, on your own data:  wellcond doctor timm:vit_tiny_patch16_224 --data FOLDER_OF_IMAGES",
    ]


@cli.app.command("train", rich_help_panel=cli.EXPERIMENTS)
def train(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="Name of a shipped recipe, or FILE.yaml.")],
    method: Annotated[
        str | None,
        Option(metavar="NAME", help="Method to train with, such as identity(lam=2) or conditioned+balanced."),
    ] = None,
    seed: Annotated[int, Option(metavar="N", min=0, help="Seed of everything random.")] = 0,
    scale: cli.ScaleOption = None,
    set: cli.Overrides = None,
    model: cli.OwnModel = None,
    data: cli.Data = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    import_: cli.Import = None,
    folder: cli.Folder = None,
    gpus_per_run: cli.GpusPerRun = None,
    cpu: cli.Cpu = False,
    trust_local_code: cli.Trust = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
) -> None:
    """Train one model with one method and one seed; the same command resumes an interrupted run."""
    cli.need_train_extra()
    cli.check_parts(recipe, scale, set, model, data)
    from wellcond.lab.comparison import training_in
    from wellcond.lab.methods import parse_methods
    from wellcond.lab.plan import choose_folder, describe_rate, join_parts
    from wellcond.lab.train.run import Job

    watch = ConsoleWatch(quiet=quiet or json, stderr=True)
    columns = cli.column_options(input, label)
    parts = join_parts(recipe, scale, set or (), model, data, columns, import_ or (), watch.say)
    loaded = parts.recipe
    labelled = [known for known in loaded.methods if known.label == method]
    asked = labelled or ([loaded.method] if method is None else parse_methods(method))
    if len(asked) != 1:
        raise cli.OptionError(f"--method: expected one method, found {len(asked)}; `wellcond compare` takes several")
    chosen = loaded.at_tuned(asked[0])
    place = folder or choose_folder(parts) / chosen.slug / f"seed{seed}"
    job = Job(loaded, chosen, seed, place, **parts.job_options(cpu=cpu, local_code=trust_local_code))
    watch.say(f"{chosen.label}: {describe_rate(loaded, asked[0])}")
    with training_in(place):
        outcome = run_watched([job], 1, quiet=quiet or json, ranks=cli.read_ranks(gpus_per_run))
    if outcome.failures and not json:
        raise WellcondError(outcome.failures[0][1])
    code = tell_end(outcome, as_json=json)
    # A comparison that continues with other runs has the exit code 1, whatever error a run ends with.
    raise typer.Exit(2 if outcome.failures else code)


@cli.app.command("glue", rich_help_panel=cli.EXPERIMENTS)
def glue(
    run: Annotated[
        Path,
        cli.folder_argument(metavar="RUN", help="Folder of a run of masked language modelling, or of a comparison."),
    ],
    tasks: Annotated[str | None, Option(metavar="LIST", help="Tasks such as cola,sst2; all eight by default.")] = None,
    limit: Annotated[
        int | None, Option(metavar="N", min=0, help="Rows to take of a split, 0 for all; 3000 at scale tiny.")
    ] = None,
    jobs: cli.Jobs = "auto",
    cpu: cli.Cpu = False,
    quiet: cli.Quiet = False,
) -> None:
    """Fine-tune a pre-trained model on GLUE and score it; the same command resumes.

    Corrections of a conditioned model are folded into its weights first.
    """
    cli.need_train_extra()
    from wellcond.lab.report.glue import TITLES, load_glue, rebuild_glue, scores_table

    chosen = list(TITLES) if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in chosen:
        check_choice("GLUE task", name, list(TITLES))
    at_once = cli.read_jobs(jobs)
    from wellcond.lab.comparison import training_in
    from wellcond.lab.train.glue import plan_glue

    plan = plan_glue(run, tasks=chosen, limit=limit, cpu=cpu)
    with training_in(run):
        outcome = run_watched(plan, at_once, quiet=quiet)
    if is_rank_zero() and outcome.records:
        page = rebuild_glue(run)
        if not quiet:
            print_tables([scores_table(load_glue(run))], f"tables: {page}")
    raise typer.Exit(tell_end(outcome))


@cli.app.command("recipes", rich_help_panel=cli.EXPERIMENTS)
def recipes(json: cli.Json = False) -> None:
    """List the recipes that ship with wellcond."""
    cli.need_train_extra()
    from wellcond.lab.recipe import load_recipe
    from wellcond.lab.settings import shipped_recipes

    listed = [load_recipe(name, scale=scale)[0] for scale, name in (found.split("/") for found in shipped_recipes())]
    if json:
        echo_json(to_json([recipe.model_dump(mode="json") for recipe in listed], indent=1))
        return
    rows: list[dict[str, Cell]] = []
    for recipe in listed:
        length, hours = recipe.training.length, recipe.training.hours
        amount = f"{length.epochs:g} epochs" if length.epochs else f"{length.steps} steps"
        shown = amount if hours is None else f"{hours:g} hours"
        rows.append({"recipe": recipe.name, "scale": recipe.scale, "length": shown, "what": recipe.title})
    print_tables([Table.of("recipes", "Recipes", rows, words=range(4))])

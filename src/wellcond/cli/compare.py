"""`wellcond compare`: its options, and what can be known of them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wellcond.cli import app as cli
from wellcond.cli.checks import (
    FIRST_TUNING_SEED,
    OptionError,
    check_experiment,
    data_overrides,
    read_seeds,
    read_tuned_fields,
)
from wellcond.errors import check_choice

if TYPE_CHECKING:
    from wellcond.lab.cluster import RaySettings

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Request:
    """A comparison as it is asked for."""

    recipe: str
    scale: str | None = None
    methods: str | None = None
    seeds: str | None = None
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    jobs: str = "auto"
    cpu: bool = False
    local_code: bool = False
    as_json: bool = False
    quiet: bool = False
    report: bool = True
    ray: RaySettings | None = None
    tune: tuple[str, ...] = ()
    tuning_seeds: tuple[int, ...] = ()
    tune_growth: int = 0

    @property
    def silent(self) -> bool:
        """Whether nothing is printed for people while it runs."""
        return self.quiet or self.as_json


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
            help="auto, HOST:6379 or ray://HOST:10001; by default a new cluster on this machine.",
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
    overrides = [*data_overrides(data, input, label), *(set or [])]
    tuning = read_seeds(tuning_seeds or "2", option="--tuning-seeds", first=FIRST_TUNING_SEED)
    ray_options = {"--ray-address": ray_address, "--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run}
    if not tune:
        _require_with({"--tuning-seeds": tuning_seeds, "--tune-growth": tune_growth}, "--tune")
    elif print_jobs:
        raise OptionError("--print-jobs cannot know the runs of --tune beforehand; leave out one of them")
    else:
        read_tuned_fields(tune)
    check_experiment(recipe, scale=scale, overrides=overrides, folder=folder, seeds=seeds, jobs=jobs)
    check_choice("engine", engine, ENGINES)
    if engine == "local":
        _require_with(ray_options, "--engine ray")
    elif print_jobs:
        raise OptionError("--print-jobs runs nothing, so it takes no engine; leave out --engine ray")
    if data is not None:
        from wellcond.cli.runs import fit_to_data

        overrides += fit_to_data(recipe, scale=scale, overrides=overrides, quiet=quiet or json)
    from wellcond.cli.comparison import print_commands, ray_settings, run_compare

    request = Request(
        recipe, scale, methods, seeds, tuple(overrides), folder, jobs, cpu, trust_local_code, json, quiet, report,
        ray_settings(ray_address, cpus_per_run, gpus_per_run) if engine == "ray" else None,
        tuple(tune or ()), tuning, 3 if tune_growth is None else tune_growth,
    )  # fmt: skip
    if print_jobs:
        print_commands(request)
        return
    if tune:
        from wellcond.cli.tuned import run_tuned_compare as run_compare
    raise typer.Exit(run_compare(request))


def _require_with(options: Mapping[str, object], other: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name} has an effect only with {other}; give both or neither")

"""`wellcond compare`: its options, and what can be known of them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wellcond.cli import app as cli
from wellcond.cli.checks import OptionError, check_experiment, data_overrides, read_seeds
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


@cli.app.command("compare")
def compare(
    recipe: Annotated[str, typer.Option("--recipe", help="Name of a shipped recipe (wellcond recipes), or FILE.yaml.")],
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated, such as default,conditioned,identity(lam=2).")
    ] = None,
    seeds: cli.Seeds = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUES",
            help="Such as optimizer.lr=3e-4,1e-3,3e-3,1e-2, or identity.lam=1,3,10: each method first finds its best "
            "value on tuning seeds, then all are compared on fresh ones; several fields search their product.",
        ),
    ] = None,
    tuning_seeds: Annotated[
        str | None, typer.Option(help="With --tune: how many, from 1000; or a list. 2 by default, none of them tested.")
    ] = None,
    tune_growth: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=20,
            help="With --tune: how often a grid grows each way while its best value is at an edge; 3 by default.",
        ),
    ] = None,
    scale: cli.ScaleOption = None,
    set: cli.Overrides = None,
    data: cli.Data = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    folder: cli.Folder = None,
    jobs: cli.Jobs = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray: the machines of a Ray cluster.")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="auto, HOST:6379 or ray://HOST:10001; a cluster on this machine by default."
        ),
    ] = None,
    cpus_per_run: Annotated[
        float | None, typer.Option(help="With --engine ray; the recipe's threads by default.")
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="With --engine ray; 1 by default where the cluster has GPUs.")
    ] = None,
    cpu: cli.Cpu = False,
    trust_local_code: cli.Trust = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Build the report at the end.")] = True,
    print_jobs: Annotated[
        bool, typer.Option("--print-jobs", help="Print one command per run, for Slurm and the like; run nothing.")
    ] = False,
) -> None:
    """Train every method with every seed under one recipe, and show who wins, by how much, and why."""
    cli.need_train_extra()
    from wellcond.lab.tune.grid import FIRST_TUNING_SEED, read_tuned_fields

    overrides = [*data_overrides(data, input, label), *(set or [])]
    read_tuned_fields(tune or ())
    tuning = read_seeds(tuning_seeds or "2", option="--tuning-seeds", first=FIRST_TUNING_SEED)
    ray_options = {"--ray-address": ray_address, "--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run}
    if not tune:
        _refuse({"--tuning-seeds": tuning_seeds, "--tune-growth": tune_growth}, "--tune")
    elif print_jobs:
        raise OptionError("--print-jobs prints runs that are known before any has ended; leave it out with --tune")
    check_experiment(recipe, scale=scale, overrides=overrides, folder=folder, seeds=seeds, jobs=jobs)
    check_choice("engine", engine, ENGINES)
    if engine == "local":
        _refuse(ray_options, "--engine ray")
    elif print_jobs:
        raise OptionError("--print-jobs runs nothing, so it goes with no engine; leave out --engine ray")
    if data is not None:
        from wellcond.cli.own_data import fit_to_data

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


def _refuse(options: Mapping[str, object], other: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name} belongs to {other}; give both or neither")

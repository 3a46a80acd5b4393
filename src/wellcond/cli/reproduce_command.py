"""`wellcond reproduce ID` and `wellcond claims RESULTS`: the papers' tables, figures and claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.commands import app
from wellcond.cli.experiment_commands import Cpu, Jobs, Json, Overrides, Quiet, need_train_extra
from wellcond.errors import WellcondError, check_choice


@app.command("reproduce")
def reproduce(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Table, figure or ablation: C-T1, S-F2, A-scale.")
    ] = (None),
    list_all: Annotated[bool, typer.Option("--list", help="Show every id, what it needs, and if it can run here.")] = (
        False
    ),
    scale: Annotated[str, typer.Option(help="tiny (CPU, minutes), small (one GPU, hours) or paper.")] = "tiny",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its cost; run nothing.")] = False,
    records: Annotated[
        Path | None, typer.Option(help="Print from committed records, such as results; run nothing.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these of its methods, and default.")] = None,
    seeds: Annotated[str | None, typer.Option(help="How many, from 0; or a list such as 3,4,7.")] = None,
    set: Overrides = None,
    data: Annotated[
        Path | None, typer.Option(help="Mirror of data sets (as WELLCOND_DATA), or images in train/ and val/.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-o", help="Where to write; reproduce/SCALE by default.")
    ] = None,
    jobs: Jobs = "auto",
    cpu: Cpu = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run what is missing of a table or figure of the papers, and print the paper's numbers beside ours."""
    if list_all == (id is not None):
        raise typer.BadParameter("give either an ID or --list")
    need_train_extra()
    from wellcond.cli.experiment_checks import check_folder, read_jobs, read_seeds
    from wellcond.lab.reproduce.catalogue_files import SCALES, find_entry

    check_choice("scale", scale, SCALES)
    if id is not None:
        find_entry(id)
    for name, place in (("--records", records), ("--data", data)):
        if place is not None and not place.is_dir():
            raise WellcondError(f"{name}: expected a folder, found none at {place}")
    if seeds is not None:
        read_seeds(seeds)
    read_jobs(jobs)
    check_folder(folder)
    from wellcond.cli.reproduce import Request, print_list, run_reproduce

    if id is None:
        print_list(scale, folder, jobs=jobs, data=data, as_json=json)
        return
    request = Request(
        id, scale, folder, seeds=seeds, methods=methods, overrides=tuple(set or ()), data=data, jobs=jobs, cpu=cpu,
        as_json=json, quiet=quiet,
    )  # fmt: skip
    raise typer.Exit(run_reproduce(request, dry_run=dry_run, records=records))


@app.command("claims")
def claims(
    results: Annotated[Path, typer.Argument(help="Folder of committed records, such as results.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Markdown to write, HTML beside it; RESULTS/claims.md.")
    ] = None,
    json: Json = False,
) -> None:
    """Judge the papers' claims by committed records, one by one: better, worse, equal within a margin, or undecided."""
    need_train_extra()
    if not results.is_dir():
        raise WellcondError(f"no such folder: {results}")
    from wellcond.cli.reproduce import print_claims

    print_claims(results, output or results / "claims.md", as_json=json)

"""`wellcond claims RESULTS`: the papers' claims, judged by records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.app import PAPERS, Json, app, need_train_extra
from wellcond.cli.checks import OutputError, check_is_folder


@app.command("claims", rich_help_panel=PAPERS)
def claims(
    results: Annotated[Path, typer.Argument(help="Folder of committed records, such as results.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Markdown to write; by default RESULTS/claims.md."),
    ] = None,
    json: Json = False,
) -> None:
    """Judge each claim of the papers by committed records: better, worse, equal within a margin, or undecided."""
    need_train_extra()
    check_is_folder(results)
    output = output or results / "claims.md"
    if output.is_dir():
        raise OutputError(f"--output: expected a name for the markdown, such as claims.md, found {output}")
    from wellcond.cli.console import print_tables
    from wellcond.files import to_json
    from wellcond.lab.reproduce.claims import claims_table, judge_claims, write_claims

    judged = judge_claims(results)
    try:
        write_claims(judged, output, results)
    except OSError as error:
        raise OutputError(f"--output: {output} could not be written: {error.strerror or error}") from error
    if json:
        print(to_json([one.model_dump(mode="json") for one in judged], indent=1))
        return
    print_tables([claims_table(judged)], f"written: {output}")

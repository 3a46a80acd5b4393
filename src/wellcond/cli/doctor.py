"""`wellcond doctor MODEL`: what is wrong with a model's attention, and the line that mends it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wellcond.cli.app import (
    MODELS,
    Force,
    Model,
    ModelArguments,
    Seed,
    Weights,
    app,
    check_outputs,
    check_weights,
    describe_spec,
    write_output,
)
from wellcond.models import check_model, parse_values

if TYPE_CHECKING:
    from wellcond.diagnosis.records import Diagnosis

STYLES = {"fault": "bold red", "warning": "bold yellow", "note": "bold cyan", "mend": "bold", "records": "dim"}


@app.command("doctor", rich_help_panel=MODELS)
def doctor(
    model: Model,
    input: Annotated[
        str,
        typer.Option("--input", metavar="INPUT", help="digits, random, a FOLDER of images (png, jpg), or FILE.npy"),
    ] = "random",
    weights: Weights = None,
    model_arg: ModelArguments = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Samples to run the model on.")] = 8,
    tokens: Annotated[int, typer.Option(metavar="N", help="Length of random token ids.")] = 32,
    trained: Annotated[
        bool | None, typer.Option("--trained/--fresh", help="Whether MODEL is trained; by default its norms tell.")
    ] = None,
    jacobian: Annotated[
        bool, typer.Option("--jacobian", help="Also measure kappa(J) of every head, which takes minutes.")
    ] = False,
    seed: Seed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON to write.")] = None,
    html: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    force: Force = False,
) -> None:
    """Say what is wrong with the attention of MODEL, and which line of code mends it; seconds."""
    from wellcond.cli.app import check_input

    check_input(input, tokens=tokens)
    check_outputs([path for path in (output, html) if path is not None], force=force)
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_weights(weights)
    from wellcond.cli.checkpoints import build_loaded
    from wellcond.cli.inputs import make_batch, try_forward
    from wellcond.diagnosis.diagnose import diagnose

    built = build_loaded(model, arguments, weights, seed)
    batch, described = make_batch(built, input, samples=samples, tokens=tokens, seed=seed)
    try_forward(built, batch)
    found = diagnose(built, batch, trained=trained, jacobian=jacobian)
    spec = describe_spec(model, model_arg or [], weights, seed)
    facts = {"model": f"{spec}: {found.run['model']}", "input": described}
    found = dataclasses.replace(found, run=found.run | facts)
    if json:
        typer.echo(found.to_json())
    else:
        _print(found)
    for path, text in ((output, found.to_json() + "\n" if output else ""), (html, found.to_html() if html else "")):
        if path is not None:
            write_output(path, text, force=force)
            typer.echo(f"wrote {path}", err=json)


def _print(found: Diagnosis) -> None:
    """Text of at most 100 columns, less in a narrower terminal, with the words that begin a line in colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    shown = Text(found.to_text(width=min(100, console.width) if console.is_terminal else 100))
    for word, style in STYLES.items():
        shown.highlight_regex(rf"(?m)^(?:\d+\.|  ) {word}:", style)
    console.print(shown)

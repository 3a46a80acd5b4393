"""`wellcond doctor MODEL`: what is wrong with a model's attention, and the line that mends it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from typer import Option

from wellcond.cli import app as cli
from wellcond.files import write_atomically


@cli.app.command("doctor", rich_help_panel=cli.MODELS)
def doctor(
    model: cli.Model,
    input: cli.Input = "random",
    weights: cli.Weights = None,
    model_arg: cli.ModelArguments = None,
    samples: cli.Samples = 8,
    tokens: cli.Tokens = 32,
    trained: Annotated[
        bool | None, Option("--trained/--fresh", help="Whether MODEL is trained; by default its norms tell.")
    ] = None,
    jacobian: Annotated[
        bool, Option("--jacobian", help="Also measure kappa(J) of every head, which takes minutes.")
    ] = False,
    seed: cli.Seed = 0,
    json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
    output: cli.JsonFile = None,
    html: cli.HtmlFile = None,
    force: cli.Force = False,
) -> None:
    """Say what is wrong with the attention of MODEL, and which line of code mends it; seconds."""
    cli.check_input(input)
    cli.check_outputs(output, html, force=force)
    arguments = cli.read_model(model, model_arg, weights)
    from rich.console import Console

    from wellcond.cli.checkpoints import build_loaded
    from wellcond.cli.inputs import make_batch
    from wellcond.diagnosis.diagnose import diagnose

    built = build_loaded(model, arguments, weights, seed)
    batch, described = make_batch(built, input, samples=samples, tokens=tokens, seed=seed)
    found = diagnose(built, batch, trained=trained, jacobian=jacobian)
    spec = cli.describe_spec(model, model_arg, weights, seed)
    facts = {"model": f"{spec}: {found.run['model']}", "input": described}
    found = dataclasses.replace(found, run=found.run | facts)
    if json:
        typer.echo(found.to_json())
    else:
        out = Console()
        print(found.to_text(width=min(100, out.width) if out.is_terminal else 100))
    for path, text in ((output, found.to_json() + "\n" if output else ""), (html, found.to_html() if html else "")):
        if path is not None:
            write_atomically(path, text)
            typer.echo(f"wrote {path}", err=json)

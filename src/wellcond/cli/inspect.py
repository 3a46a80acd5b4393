"""`wellcond inspect`: what is found in a model, or in a whole library."""

from __future__ import annotations

from typing import Annotated

import typer

from wellcond.cli.app import MODEL_HELP, MODELS, ModelArguments, Seed, Weights, app
from wellcond.cli.checks import check_weights, describe_spec
from wellcond.errors import check_choice
from wellcond.models import check_model, parse_values


@app.command("inspect", rich_help_panel=MODELS)
def inspect(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    weights: Weights = None,
    model_arg: ModelArguments = None,
    seed: Seed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    zoo: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instead of one model, all of a library: timm or hf.")
    ] = None,
) -> None:
    """List every attention of MODEL: kind, heads, widths, layout, condition numbers of W_Q, W_K, W_V."""
    if (model is None) == (zoo is None):
        raise typer.BadParameter("give either a MODEL or --zoo timm|hf")
    if model is None:
        check_choice("zoo", zoo, ("timm", "hf"))
        from wellcond.cli.zoo import print_zoo

        print_zoo(str(zoo), as_json=json)
        return
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_weights(weights)
    from wellcond.cli.inspect_print import build_to_inspect, print_model

    built = build_to_inspect(model, arguments, weights, seed)
    print_model(built, as_json=json, title=describe_spec(model, model_arg or [], weights, seed))

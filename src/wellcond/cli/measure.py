"""`wellcond measure`: its options, checked before a model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.app import MODELS, Force, Model, ModelArguments, Seed, Weights, app
from wellcond.cli.checks import check_input, check_outputs, check_weights, describe_spec
from wellcond.errors import WellcondError, check_choice
from wellcond.models import check_model, parse_values

CONVENTIONS = ("wide", "stack")
KAPPAS = ("strict", "pseudo")
COMBINES = ("mean", "stack")
METHODS = ("auto", "dense", "gram", "cholesky", "implicit")


class MeasureError(WellcondError, ValueError):
    """Options that do not fit the model or each other."""


@app.command("measure", rich_help_panel=MODELS)
def measure(
    model: Model,
    input: Annotated[
        str,
        typer.Option("--input", metavar="INPUT", help="digits, random, a FOLDER of images (png, jpg), or FILE.npy"),
    ] = "random",
    layers: Annotated[
        str, typer.Option(metavar="LIST", help="all, or numbers such as 0,5,11, as inspect lists them.")
    ] = "all",
    heads: Annotated[str, typer.Option(metavar="LIST", help="all, or numbers of key/value heads such as 0,1.")] = "all",
    convention: Annotated[
        str, typer.Option(metavar="NAME", help="wide (the Jacobian) or stack (the papers' matrix).")
    ] = "wide",
    kappa: Annotated[
        str, typer.Option(metavar="NAME", help="strict, or pseudo (over non-zero singular values).")
    ] = "strict",
    samples: Annotated[int, typer.Option(metavar="N", help="Samples (or windows) to measure.")] = 1,
    combine: Annotated[
        str, typer.Option(metavar="NAME", help="mean (one by one) or stack (one Jacobian of all samples).")
    ] = "mean",
    method: Annotated[str, typer.Option(metavar="NAME", help="auto, dense, gram, cholesky or implicit.")] = "auto",
    biases: Annotated[bool, typer.Option("--biases", help="Count biases as parameters.")] = False,
    tokens: Annotated[int, typer.Option(metavar="N", help="Length of random token ids.")] = 32,
    weights: Weights = None,
    model_arg: ModelArguments = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON report to write.")] = None,
    html: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="File in which every measured head is recorded; the same command resumes from it."),
    ] = None,
    force: Force = False,
) -> None:
    """Measure every head on an input: condition numbers of weights and Jacobian, attention entropy, a verdict."""
    check_choice("convention", convention, CONVENTIONS)
    check_choice("kappa", kappa, KAPPAS)
    check_choice("combine", combine, COMBINES)
    check_choice("Jacobian method", method, METHODS)
    if samples < 1:
        raise MeasureError(f"--samples: expected at least 1, found {samples}")
    if convention == "stack" and biases:
        raise MeasureError("--convention stack is defined without biases. Leave out --biases, or use --convention wide")
    numbers = {"layers": read_numbers(layers, "--layers"), "heads": read_numbers(heads, "--heads")}
    check_input(input, tokens=tokens)
    check_outputs([path for path in (output, html) if path is not None], force=force)
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_weights(weights)
    from wellcond.cli.fold import build_loaded
    from wellcond.cli.measure_print import measure_and_print, write_report

    built = build_loaded(model, arguments, weights, seed)
    options = {"convention": convention, "kappa": kappa, "samples": samples, "combine": combine, "method": method,
               "biases": biases, "resume": resume}  # fmt: skip
    spec = describe_spec(model, model_arg or [], weights, seed)
    report = measure_and_print(built, spec, input, numbers | options, tokens=tokens, seed=seed)
    write_report(report, output, html, force=force)


def read_numbers(text: str, option: str) -> list[int] | None:
    """Numbers such as ``0,5,11``; None for ``all``.

    Raises: MeasureError for anything else, and for numbers that are given twice.

    Example:
        >>> read_numbers("0, 5", "--layers"), read_numbers("all", "--layers")
        ([0, 5], None)
    """
    if text.strip() == "all":
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise MeasureError(f"{option}: expected 'all' or numbers such as 0,5,11, found {text!r}") from error
    if len(set(numbers)) < len(numbers):
        raise MeasureError(f"{option}: expected every number once, found {text!r}")
    return numbers

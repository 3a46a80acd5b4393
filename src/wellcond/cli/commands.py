"""Arguments of every sub-command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import wellcond
from wellcond.cli import inspect as inspect_command
from wellcond.errors import WeightError
from wellcond.experiments.models import build_model, parse_values
from wellcond.experiments.weights import conditioning_in, load_state, load_weights, read_state_dict, save_weights

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Well-conditioned attention for PyTorch.")

MODEL_HELP = "timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME, or path/to/file.py:callable"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelArguments = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="KEY=VALUE", help="Argument for building MODEL; repeatable."),
]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint to load (.safetensors, or .pt with tensors only).")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write (.safetensors).")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"wellcond {wellcond.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command("inspect")
def inspect(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    weights: Weights = None,
    model_arg: ModelArguments = None,
    seed: Seed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    zoo: Annotated[str | None, typer.Option(help="Walk a whole library instead: timm or hf.")] = None,
) -> None:
    """Table of every attention: layer, kind, heads, dims, arrangement, condition numbers of W_Q, W_K, W_V."""
    if (model is None) == (zoo is None):
        raise typer.BadParameter("give either a MODEL or --zoo timm|hf")
    if zoo is not None:
        inspect_command.print_zoo(zoo, as_json=json)
        return
    assert model is not None
    torch.manual_seed(seed)
    built = build_model(model, parse_values(model_arg or []))
    if weights is not None:
        _load_raw_or_plain(built, weights)
    inspect_command.print_model(built, as_json=json)


@app.command("init")
def init(
    model: Model,
    output: Output,
    method: Annotated[
        str, typer.Option(help="conditioned, orthogonal, gaussian, mimetic, weight_selection, default")
    ] = ("conditioned"),
    weights: Weights = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Option of the method; repeatable.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="Larger MODEL, for weight_selection.")] = None,
    teacher_weights: Annotated[Path | None, typer.Option(help="Checkpoint of the teacher.")] = None,
    model_arg: ModelArguments = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Initialise the attention of MODEL and write a plain checkpoint."""
    torch.manual_seed(seed)
    built = build_model(model, parse_values(model_arg or []))
    if weights is not None:
        load_weights(built, weights)
    options = parse_values(option or [])
    if teacher is not None:
        options["teacher"] = build_model(teacher)
        if teacher_weights is not None:
            load_weights(options["teacher"], teacher_weights)
    wellcond.init_(built, method, generator=torch.Generator().manual_seed(seed), **options)
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: {len(wellcond.find_attention(built))} attentions initialised as {method!r}")


@app.command("fold")
def fold(
    model: Model,
    output: Output,
    weights: Annotated[Path, typer.Option(help="Checkpoint of a conditioned model.")],
    ema: Annotated[bool, typer.Option("--ema", help="The moving average in a file of timm's train script.")] = False,
    model_arg: ModelArguments = None,
    force: Force = False,
) -> None:
    """Merge the correction that a conditioned checkpoint names into its weights, and write a plain checkpoint."""
    built = build_model(model, parse_values(model_arg or []))
    settings = _load_raw_or_plain(built, weights, averaged=ema)
    if settings is None:
        raise WeightError(f"{weights} is a plain checkpoint already: it names no correction to fold")
    wellcond.fold_(built)
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: folded {settings['method']!r} into {len(settings['sites'])} attentions")


def _load_raw_or_plain(model: torch.nn.Module, path: Path, *, averaged: bool = False) -> dict | None:
    """Load a checkpoint; if it holds raw weights, condition the model as it says first."""
    state = read_state_dict(path, averaged=averaged)
    settings = conditioning_in(state)
    if settings is not None:
        wellcond.recondition_(model, settings)
    load_state(model, state, str(path))
    return settings


@app.command("measure")
def measure(
    model: Model,
    input: Annotated[
        str,
        typer.Option("--input", metavar="INPUT", help="digits, random, a FOLDER of images (png, jpg), or FILE.npy"),
    ] = "random",
    layers: Annotated[str, typer.Option(help="all, or numbers such as 0,5,11 in the order of inspect.")] = "all",
    heads: Annotated[str, typer.Option(help="all, or numbers of key/value heads such as 0,1.")] = "all",
    convention: Annotated[str, typer.Option(help="wide (the Jacobian) or stack (the papers' matrix)")] = "wide",
    kappa: Annotated[str, typer.Option(help="strict, or pseudo (over non-zero singular values)")] = "strict",
    samples: Annotated[int, typer.Option(help="Samples (or windows) to measure.")] = 1,
    combine: Annotated[str, typer.Option(help="mean (one by one) or stack (one Jacobian of all samples)")] = "mean",
    method: Annotated[str, typer.Option(help="auto, dense, gram, cholesky or implicit")] = "auto",
    biases: Annotated[bool, typer.Option("--biases/--no-biases", help="Biases count as parameters.")] = False,
    tokens: Annotated[int, typer.Option(help="Length of random token ids.")] = 32,
    weights: Weights = None,
    model_arg: ModelArguments = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON report to write.")] = None,
    html: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    force: Force = False,
) -> None:
    """Condition numbers of weights and Jacobians, attention and verdicts of every head, on an input."""
    from wellcond.cli.measure import Options, check_outputs, run_measure

    check_outputs([path for path in (output, html) if path is not None], force=force)
    torch.manual_seed(seed)
    built = build_model(model, parse_values(model_arg or []))
    if weights is not None:
        _load_raw_or_plain(built, weights)
    options = Options(layers, heads, convention, kappa, samples, combine, method, biases)
    run_measure(built, model, input, options, tokens=tokens, seed=seed, output=output, html=html, force=force)

"""Arguments of every sub-command; what they do is imported when it is needed, since torch takes seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import wellcond
from wellcond.cli.checks import check_outputs, check_weights, describe_spec
from wellcond.errors import DEBUG_VARIABLE, check_choice
from wellcond.models import check_model, parse_values

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Well-conditioned attention for PyTorch.",
)

MODEL_HELP = "timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME, or path/to/file.py:callable"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelArguments = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="KEY=VALUE", help="Argument for building MODEL; repeatable."),
]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint to load (.safetensors, or .pt with tensors only).")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write (.safetensors).")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
CHECKPOINT = ".safetensors"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"wellcond {wellcond.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the traceback of an error, as {DEBUG_VARIABLE}=1 does.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


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
        check_choice("zoo", zoo, ("timm", "hf"))
        from wellcond.cli.inspect import print_zoo

        print_zoo(zoo, as_json=json)
        return
    assert model is not None
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_weights(weights)
    from wellcond.cli.inspect import run_inspect

    title = describe_spec(model, model_arg or [], weights, seed)
    run_inspect(model, arguments, weights=weights, seed=seed, as_json=json, title=title)


@app.command("init")
def init(
    model: Model,
    output: Output,
    method: Annotated[
        str,
        typer.Option(
            help="conditioned, calibrated, orthogonal, gaussian, mimetic, nanochat, small, t_fixup, weight_selection "
            "or default"
        ),
    ] = ("conditioned"),
    weights: Weights = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Option of the method; repeatable.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="Larger MODEL, for weight_selection.")] = None,
    teacher_weights: Annotated[Path | None, typer.Option(help="Checkpoint of the teacher.")] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", metavar="INPUT", help="Of calibrated: digits, random, a FOLDER of images or FILE.npy"),
    ] = None,
    model_arg: ModelArguments = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Initialise the attention of MODEL and write a plain checkpoint."""
    arguments, options = parse_values(model_arg or []), parse_values(option or [])
    check_model(model, arguments)
    check_outputs([output], force=force, suffix=CHECKPOINT)
    check_weights(weights, teacher_weights)
    if teacher is not None:
        check_model(teacher, {})
    if (teacher is None) == (method == "weight_selection"):
        raise typer.BadParameter("--teacher MODEL and --method weight_selection go together; give both or neither")
    if teacher is None and teacher_weights is not None:
        raise typer.BadParameter("--teacher-weights are those of --teacher MODEL; give it too")
    if (input is None) == (method == "calibrated"):
        raise typer.BadParameter("--input INPUT and --method calibrated go together; give both or neither")
    if input is not None:
        from wellcond.cli.measure_options import check_input

        check_input(input)
    from wellcond.cli.checkpoints import run_init

    run_init(
        model, arguments, method, options, weights=weights, teacher=teacher, teacher_weights=teacher_weights,
        input=input, seed=seed, output=output, force=force,
    )  # fmt: skip


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
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_outputs([output], force=force, suffix=CHECKPOINT)
    check_weights(weights)
    from wellcond.cli.checkpoints import run_fold

    run_fold(model, arguments, weights, averaged=ema, output=output, force=force)


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
    resume: Annotated[
        Path | None, typer.Option(help="File that notes every measured head; the same command resumes from it.")
    ] = None,
    force: Force = False,
) -> None:
    """Condition numbers of weights and Jacobians, attention and verdicts of every head, on an input."""
    from wellcond.cli.measure_options import Options, check_input

    options = Options(layers, heads, convention, kappa, samples, combine, method, biases)
    options.check()
    check_input(input, tokens=tokens)
    check_outputs([path for path in (output, html) if path is not None], force=force)
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_weights(weights)
    import torch

    from wellcond.cli.checkpoints import load_raw_or_plain
    from wellcond.cli.measure import run_measure
    from wellcond.models import build_model

    torch.manual_seed(seed)
    built = build_model(model, arguments)
    if weights is not None:
        load_raw_or_plain(built, weights)
    spec = describe_spec(model, model_arg or [], weights, seed)
    run_measure(
        built, spec, input, options, tokens=tokens, seed=seed, output=output, html=html, resume=resume, force=force
    )

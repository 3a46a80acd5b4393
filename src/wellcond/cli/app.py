"""The root of the command line, and the options that several commands share."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import wellcond
from wellcond.errors import DEBUG_VARIABLE, MissingExtraError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Well-conditioned attention for PyTorch.",
)

# Of commands on a model
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

# Of commands that train
SEEDS_HELP = "How many, from 0: 3 means 0, 1, 2. A list such as 3,4,7 names them."
ScaleOption = Annotated[
    str | None, typer.Option(help="tiny, small or paper; by default the smallest at which the recipe exists.")
]
Seeds = Annotated[str | None, typer.Option(help=SEEDS_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field, such as optimizer.lr=1e-3; repeatable."),
]
Data = Annotated[
    str | None, typer.Option(metavar="PATH|ID", help="Your own data: image folder, parquet/jsonl/csv/txt, or hub id.")
]
InputColumn = Annotated[str | None, typer.Option("--input", help="Column of --data with the images or texts.")]
LabelColumn = Annotated[str | None, typer.Option("--label", help="Column of --data with the labels.")]
Folder = Annotated[Path | None, typer.Option("--folder", "-o", help="Where to write; under runs/ by default.")]
Jobs = Annotated[str, typer.Option(help="Runs at once: auto, or a number.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Do not use a GPU.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-local-code", help="Let the recipe name path/to/file.py:callable, and run the code in it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while running.")]


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


def need_train_extra() -> None:
    """Say what to install before anything is imported that needs it; importing accelerate would load torch."""
    for package, name in (("accelerate", "accelerate"), ("pydantic", "pydantic"), ("yaml", "pyyaml")):
        if sys.modules.get(package, package) is None or importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, "train")

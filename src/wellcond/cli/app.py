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
    help="Well-conditioned attention for PyTorch. A good start: `wellcond doctor MODEL`, or `wellcond demo`.",
)

MODELS, EXPERIMENTS, PAPERS = "On a model", "Experiments", "The papers, and records of runs"
"""Groups of commands."""
SEARCH, CLUSTER, OUTPUT = "Tuning", "On a Ray cluster", "Output"
"""Groups of options."""


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise typer.BadParameter(f"expected a number from 0 to {2**32 - 1}, found {seed}")
    return seed


# Of commands on a model
MODEL_HELP = "timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME, or path/to/file.py:callable"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelArguments = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="KEY=VALUE", help="Argument for building MODEL, such as depth=4; repeatable."),
]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint to load (.safetensors, or .pt with tensors only).")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write (.safetensors).")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(metavar="N", callback=_check_seed, help="Seed of everything random.")]

# Of commands that train
SEEDS_HELP = "Number of seeds (3 means 0, 1, 2), or a list such as 3,4,7."
ScaleOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="tiny, small or paper; by default the smallest at which the recipe exists."),
]
Seeds = Annotated[str | None, typer.Option(metavar="SEEDS", help=SEEDS_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field of the recipe, such as optimizer.lr=1e-3; repeatable."
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|ID", help="Your own data: a folder of images, a parquet, jsonl, csv or txt file, or a hub id."
    ),
]
InputColumn = Annotated[
    str | None, typer.Option("--input", metavar="COLUMN", help="Column of --data with the images or texts.")
]
LabelColumn = Annotated[str | None, typer.Option("--label", metavar="COLUMN", help="Column of --data with the labels.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", "-o", rich_help_panel=OUTPUT, help="Where to write; under runs/ by default.")
]
Jobs = Annotated[str, typer.Option(metavar="N", help="Concurrent runs: auto, or a number.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Do not use a GPU.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-local-code", help="Allow a recipe that names path/to/file.py:callable to run that code."),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print only JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print nothing while running.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"wellcond {wellcond.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the traceback of an error; the same as {DEBUG_VARIABLE}=1.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def need_train_extra() -> None:
    """Say what to install before anything is imported that needs it; importing accelerate would load torch."""
    for package, name in (("accelerate", "accelerate"), ("pydantic", "pydantic"), ("yaml", "pyyaml")):
        if sys.modules.get(package, package) is None or importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, "train")

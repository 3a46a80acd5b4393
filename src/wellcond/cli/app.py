"""The root of the command line, the options that several commands share, and what is checked of them before torch."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

import wellcond
from wellcond.errors import DEBUG_VARIABLE, MissingExtraError, OptionError, WeightError
from wellcond.lab.models.build import build_model, check_model, parse_values

if TYPE_CHECKING:
    from torch import nn

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See what every attention head does, act on it, and know whether it helped. "
    "Begin with `wellcond doctor MODEL` or `wellcond demo`.",
)

MODELS, EXPERIMENTS, PAPERS = "On a model", "Experiments", "The papers, and records of runs"
"""Groups of commands."""
output_option = functools.partial(Option, rich_help_panel="Output")


def _must_be_a_folder(path: Path | None) -> Path | None:
    """Also refuse what `file_okay` lets pass: /dev/null, a pipe or a socket."""
    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"expected a folder, found {path}, which is none")
    return path


folder_argument = functools.partial(Argument, exists=True, file_okay=False, callback=_must_be_a_folder)
folder_option = functools.partial(Option, exists=True, file_okay=False, callback=_must_be_a_folder)

# Of commands on a model
MODEL_HELP = "timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME, or path/to/file.py:callable"
Model = Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP)]
ModelArguments = Annotated[
    list[str] | None, Option(metavar="KEY=VALUE", help="Argument of MODEL, such as depth=4; repeatable.")
]
BATCH_HELP = "digits, random, a FOLDER of images (png, jpg), FILE.txt, or FILE.npy"
BatchData = Annotated[str, Option("--data", metavar="DATA", help=BATCH_HELP)]
Samples = Annotated[int, Option(metavar="N", min=1, max=10_000, help="Samples to run the model on.")]
Tokens = Annotated[int, Option(metavar="N", min=1, max=100_000, help="Length of a sample of tokens.")]
JsonFile = Annotated[Path | None, Option("--output", "-o", help="JSON file to write.")]
HtmlFile = Annotated[Path | None, Option("--html", help="HTML page to write.")]
checkpoint_option = functools.partial(Option, exists=True, dir_okay=False)
Weights = Annotated[Path | None, checkpoint_option(help="Checkpoint to load: .safetensors, or .pt with tensors only.")]
Output = Annotated[Path, Option("--output", "-o", help="Checkpoint to write (.safetensors).")]
Force = Annotated[bool, Option("--force", help="Replace the output if it exists.")]
Seed = Annotated[int, Option(metavar="N", min=0, max=2**32 - 1, help="Seed of everything random.")]

# Of commands that train
ScaleOption = Annotated[str | None, Option(metavar="NAME", help="tiny, small or paper; the smallest by default.")]
Seeds = Annotated[
    str | None, Option(metavar="SEEDS", help="Number of seeds (3 means 0, 1, 2), or a list such as 3,4,7.")
]
Overrides = Annotated[
    list[str] | None, Option(metavar="PATH=VALUE", help="Field of the recipe, such as optimizer.lr=1e-3; repeatable.")
]
OwnModel = Annotated[str | None, Option("--model", metavar="MODEL", help=f"Your own model: {MODEL_HELP}")]
Import = Annotated[
    list[Path] | None,
    Option("--import", metavar="FILE.py", help="Python file with methods of your own; its code is run."),
]
DATA_HELP = "Your own data: images, parquet, jsonl, csv, txt, or a hub id."
Data = Annotated[str | None, Option(metavar="PATH|ID", help=DATA_HELP)]
InputColumn = Annotated[
    str | None, Option("--input", metavar="COLUMN", help="Column of --data that holds images or texts.")
]
LabelColumn = Annotated[str | None, Option("--label", metavar="COLUMN", help="Column of --data that holds labels.")]
Folder = Annotated[Path | None, output_option("--folder", "-o", help="Folder to write to; by default one under runs/.")]
Jobs = Annotated[str, Option(metavar="N", help="Concurrent runs: auto, or a number.")]
GpusPerRun = Annotated[
    float | None,
    Option(
        metavar="N",
        min=0,
        max=1024,
        help="GPUs of one run, 1 by default (0.5 with --engine ray: two runs share one); with --cpu, its processes.",
    ),
]
Cpu = Annotated[bool, Option("--cpu", help="Do not use a GPU.")]
Trust = Annotated[bool, Option("--trust-local-code", help="Allow a recipe's path/to/file.py:callable to run.")]
Json = Annotated[bool, output_option("--json", help="Print only JSON.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Print nothing while running.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"wellcond {wellcond.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, Option("--debug", help=f"Show tracebacks of errors, as {DEBUG_VARIABLE}=1 does.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def need_train_extra() -> None:
    """Say what to install before anything is imported that needs it; importing accelerate would load torch."""
    for package, name in (("accelerate", "accelerate"), ("pydantic", "pydantic"), ("yaml", "pyyaml")):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, "train")


MOST_SEEDS, FIRST_TUNING_SEED = 10_000, 1000


def check_outputs(*paths: Path | None, force: bool, suffix: str = "") -> None:
    """Raise OptionError unless every file may be written."""
    for path in filter(None, paths):
        if not path.name.endswith(suffix) or path.is_dir():
            raise OptionError(f"expected an output named *{suffix}, and no folder, found {path}")
        if path.exists() and not force:
            raise OptionError(f"{path} exists; give another name or --force")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}; give another folder") from error


def build_loaded(
    spec: str, arguments: Sequence[str] | None, weights: Path | None, seed: int, *, averaged: bool = False
) -> nn.Module:
    """The model of a command, with a checkpoint if one is given; if that holds raw weights, it is conditioned."""
    values = parse_values(arguments or [])
    check_model(spec, values)
    import torch

    from wellcond.conditioning.apply import recondition_
    from wellcond.lab.models.weights import conditioning_in, load_state, read_state_dict

    torch.manual_seed(seed)
    model = build_model(spec, values)
    if weights is None:
        return model
    state = read_state_dict(weights, averaged=averaged)
    settings = conditioning_in(state)
    if settings is not None:
        try:
            recondition_(model, settings)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise WeightError(
                f"{weights}: the checkpoint's wellcond marker is damaged: {settings} cannot be applied ({error}). "
                "Write the checkpoint again"
            ) from error
    load_state(model, state, str(weights))
    return model


def describe_spec(model: str, arguments: Sequence[str] | None, weights: Path | None, seed: int) -> str:
    """Which model a command is about: its name, arguments, and weights, or the seed of random ones."""
    library, _, name = model.partition(":")
    named = library in ("timm", "hf", "wellcond") and not Path(name).is_dir()
    drawn = f"random weights of seed {seed}" if named else f"seed {seed}"
    source = drawn if weights is None else f"weights {weights.name}"
    return f"{' '.join([model, *(arguments or ())])}, {source}"


TEXTS = (".txt", ".text", ".md")
"""Files that a text model reads as they are."""


def check_batch_data(source: str) -> None:
    """Raise OptionError unless ``--data`` of a command on one model names something that makes a batch."""
    path = Path(source)
    a_file = path.suffix in (".npy", *TEXTS) and path.is_file()
    if source not in ("random", "digits") and not path.is_dir() and not a_file:
        said = "" if path.exists() else ", which does not exist"
        raise OptionError(
            "--data: expected 'digits', 'random', a folder of images, a text file (*.txt) or a file named *.npy, "
            f"found {source!r}{said}"
        )


def column_options(input_column: str | None, label_column: str | None) -> dict[str, str]:
    """Which columns of the user's own data are what."""
    columns = {"input": input_column, "label": label_column}
    return {name: value for name, value in columns.items() if value is not None}


HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.csv)(?<!\.tsv)(?<!\.txt)(?<!\.json)(?<!\.jsonl)(?<!\.parquet)")


def check_parts(
    recipe: str | None, scale: str | None, changes: Sequence[str] | None, model: str | None, data: str | None
) -> None:
    """Raise what is wrong with the parts of a comparison and can be seen before torch is loaded."""
    if recipe is None and data is None:
        raise OptionError("expected --recipe with a name of `wellcond recipes` or a file, or --data of your own")
    if recipe is not None:
        from wellcond.lab.settings import check_text

        check_text(recipe, scale, changes or ())
    if data is not None and not Path(data).expanduser().exists() and ".py:" not in data and not HUB_ID.fullmatch(data):
        raise OptionError(f"--data: no such file or folder: {data}, and it is no id of the hub such as uoft-cs/cifar10")
    if model is not None:
        check_model(model, {})


def read_seeds(text: str | None, *, option: str = "--seeds", first: int = 0) -> tuple[int, ...] | None:
    """A number of seeds from the first one on, or a list such as 3,4,7; None where none are given."""
    if text is None:
        return None
    try:
        seeds = [int(part) for part in text.split(",")]
        if "," not in text:
            seeds = list(range(first, first + min(seeds[0], MOST_SEEDS + 1)))
    except ValueError:
        seeds = []
    if not 0 < len(seeds) <= MOST_SEEDS or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise OptionError(
            f"{option}: expected a number or a list such as 0,1,2 (1 to {MOST_SEEDS} seeds, none twice), found {text!r}"
        )
    return tuple(seeds)


def read_tuned_fields(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """`optimizer.lr=3e-4,1e-3` and the like as fields with their values in ascending order."""
    from wellcond.lab.settings import plain_numbers

    fields: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, _, listed = (part.strip() for part in text.partition("="))
        try:
            values = sorted({plain_numbers(float(value)) for value in listed.split(",")})
        except ValueError:
            values = []
        if len(values) < 2 or not all(math.isfinite(value) for value in values) or "." not in name or name in fields:
            raise OptionError(
                "--tune: expected a FIELD once, with two numbers or more, such as optimizer.lr=1e-3,3e-3; "
                f"found {text!r}"
            )
        fields[name] = tuple(values)
    return fields


def read_ranks(gpus_per_run: float | None) -> int:
    """How many processes a run has on this machine."""
    if gpus_per_run is None:
        return 1
    if gpus_per_run < 1 or not gpus_per_run.is_integer():
        raise OptionError(
            f"--gpus-per-run: expected a whole number from 1, found {gpus_per_run:g}; --engine ray can share a GPU"
        )
    return int(gpus_per_run)


def read_jobs(text: str) -> int | None:
    """How many runs to make at once; None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise OptionError(f"--jobs: expected auto or a number, found {text!r}")
    return int(text)

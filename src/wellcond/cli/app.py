"""The root of the command line, the options that several commands share, and what is checked of them before torch."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import wellcond
from wellcond.errors import DEBUG_VARIABLE, MissingExtraError, WeightError, WellcondError
from wellcond.models import check_model, parse_values

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


# Of commands on a model
MODEL_HELP = "timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME, or path/to/file.py:callable"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelArguments = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="KEY=VALUE", help="Argument for building MODEL, such as depth=4; repeatable."),
]
Input = Annotated[
    str, typer.Option("--input", metavar="INPUT", help="digits, random, a FOLDER of images (png, jpg), or FILE.npy")
]
Samples = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Samples to run the model on.")]
Tokens = Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Length of random token ids.")]
JsonFile = Annotated[Path | None, typer.Option("--output", "-o", help="JSON to write.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="HTML page to write.")]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint to load (.safetensors, or .pt with tensors only).")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write (.safetensors).")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of everything random.")]

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


def is_first_process() -> bool:
    """Whether this process may print; `torchrun` and `accelerate launch` start several."""
    return os.environ.get("RANK", "0") == "0"


def need_train_extra() -> None:
    """Say what to install before anything is imported that needs it; importing accelerate would load torch."""
    for package, name in (("accelerate", "accelerate"), ("pydantic", "pydantic"), ("yaml", "pyyaml")):
        if sys.modules.get(package, package) is None or importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, "train")


FILE_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
MOST_SEEDS, FIRST_TUNING_SEED = 10_000, 1000


class OutputError(WellcondError, ValueError):
    """A file that may not or cannot be written."""


class InputError(WellcondError, ValueError):
    """An input that is missing, unreadable, or not what the model reads."""


class OptionError(WellcondError, ValueError):
    """An option that has no meaning, or does not fit the model or another option."""


def check_outputs(paths: Sequence[Path], *, force: bool, suffix: str = "") -> None:
    """Raise OutputError unless every file may be written."""
    for path in paths:
        if path.suffix != (suffix or path.suffix):
            raise OutputError(f"expected an output named *{suffix}, got {path}")
        if path.is_dir():
            raise OutputError(f"expected a file to write, found the folder {path}")
        if path.exists() and not force:
            raise OutputError(f"{path} exists; give another name or --force")
        if not path.parent.is_dir():
            raise OutputError(f"no such folder: {path.parent}")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}; give another folder") from error


def read_model(model: str, arguments: Sequence[str] | None, *weights: Path | None) -> dict[str, Any]:
    """Arguments of MODEL; raises ModelSpecError or WeightError for what can be known to be wrong before it is built."""
    values = parse_values(arguments or [])
    check_model(model, values)
    for path in weights:
        if path is not None and not path.is_file():
            raise WeightError(f"no such weights file: {path}")
    return values


def check_is_folder(folder: Path, option: str = "") -> None:
    """Raise WellcondError unless a folder to read is there."""
    if not folder.is_dir():
        found = f"{option}: expected a folder, found none at {folder}" if option else f"no such folder: {folder}"
        raise WellcondError(found)


def describe_spec(model: str, arguments: Sequence[str] | None, weights: Path | None, seed: int) -> str:
    """Which model a command is about: its name, arguments, and weights, or the seed of random ones.

    Example:
        >>> describe_spec("timm:vit_tiny_patch16_224", ["depth=1"], None, 0)
        'timm:vit_tiny_patch16_224 depth=1, seed 0'
    """
    source = f"seed {seed}" if weights is None else f"weights {weights.name}"
    return f"{' '.join([model, *(arguments or ())])}, {source}"


def check_input(source: str) -> None:
    """Raise InputError unless ``--input`` names something."""
    path = Path(source)
    if source not in ("random", "digits") and not path.is_dir() and not (path.suffix == ".npy" and path.is_file()):
        said = "" if path.exists() else ", which does not exist"
        raise InputError(
            f"--input: expected 'digits', 'random', a folder of images or a file named *.npy, found {source!r}{said}"
        )


def data_overrides(data: str | None, input_column: str | None, label_column: str | None) -> list[str]:
    """Settings for the user's own data: a folder of images, a file, or an id of the Hugging Face hub."""
    if data is None:
        if input_column or label_column:
            raise OptionError("--input and --label name columns of --data; give it too")
        return []
    path = Path(data)
    columns = {name: value for name, value in (("input", input_column), ("label", label_column)) if value}
    if path.is_dir():
        if columns:
            raise OptionError(f"{path} is a folder of images in class folders: it has no columns to name")
        settings: dict[str, Any] = {"source": "image_folder", "path": str(path.resolve())}
    elif path.suffix in FILE_ENDINGS or path.is_file():
        if not path.is_file():
            raise OptionError(f"--data: no such file: {path}")
        settings = {"source": "files", "train": str(path.resolve()), "evaluation_fraction": 0.1, **columns}
    elif not HUB_ID.fullmatch(data):
        raise OptionError(
            f"--data: expected a folder of images, a file named *{', *'.join(FILE_ENDINGS)}, or an id of the Hugging "
            f"Face hub such as uoft-cs/cifar10; found no file or folder {data}"
        )
    else:
        settings = {"source": "hub", "id": data, **columns}
    return [f"data={json.dumps(settings)}"]


def read_seeds(text: str, *, option: str = "--seeds", first: int = 0) -> tuple[int, ...]:
    """A number of seeds from the first one on, or a list such as 3,4,7.

    Example:
        >>> read_seeds("3"), read_seeds("2000,2001")
        ((0, 1, 2), (2000, 2001))
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{option}: expected a number or a list such as 0,1,2, found {text!r}") from error
    if "," not in text:
        if not 0 < numbers[0] <= MOST_SEEDS:
            raise OptionError(f"{option}: expected 1 to {MOST_SEEDS} seeds or a list such as 0,1,2, found {text!r}")
        return tuple(range(first, first + numbers[0]))
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise OptionError(f"{option}: expected at least one seed, none twice or below 0, found {text!r}")
    return tuple(numbers)


def read_tuned_fields(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """`optimizer.lr=3e-4,1e-3` and the like as fields with their values in ascending order.

    Example:
        >>> read_tuned_fields(["optimizer.lr=1e-2,1e-3"])
        {'optimizer.lr': (0.001, 0.01)}
    """
    from wellcond.lab.settings import plain_number

    fields: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, _, listed = (part.strip() for part in text.partition("="))
        try:
            values = sorted({plain_number(float(value)) for value in listed.split(",")})
        except ValueError:
            values = []
        if len(values) < 2 or not all(math.isfinite(value) for value in values) or "." not in name or name in fields:
            raise OptionError(
                "--tune: expected a FIELD once, with two numbers or more, such as optimizer.lr=1e-3,3e-3; "
                f"found {text!r}"
            )
        fields[name] = tuple(values)
    return fields


def read_jobs(text: str) -> int | None:
    """Runs at once; None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise OptionError(f"--jobs: expected auto or a number, found {text!r}")
    return int(text)


def check_folder(folder: Path | None) -> None:
    """Raise OptionError for a folder to write that is, or lies in, a file."""
    if folder is None:
        return
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise OptionError(f"--folder: expected a folder to write, found the file {nearest}; give another name")


def check_experiment(
    recipe: str,
    *,
    scale: str | None = None,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    seeds: str | None = None,
    jobs: str = "auto",
) -> None:
    """What can be known of a training command without torch."""
    from wellcond.lab.load_recipe import read_recipe

    check_folder(folder)
    if seeds is not None:
        read_seeds(seeds)
    read_jobs(jobs)
    read_recipe(recipe, scale=scale, overrides=overrides)

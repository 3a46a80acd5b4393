"""What `train`, `compare`, `glue` and `reproduce` check of their arguments before torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.lab.load_recipe import read_recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tune.grid import FIRST_TUNING_SEED, read_tuned_fields

FILE_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
MOST_SEEDS = 10_000


def data_overrides(data: str | None, input_column: str | None, label_column: str | None) -> list[str]:
    """Settings for the user's own data: a folder of images, a file, or an id of the Hugging Face hub."""
    if data is None:
        if input_column or label_column:
            raise RecipeError("--input and --label name columns of --data; give it too")
        return []
    path = Path(data)
    columns = {name: value for name, value in (("input", input_column), ("label", label_column)) if value}
    if path.is_dir():
        if columns:
            raise RecipeError(f"{path} is a folder of images in class folders: it has no columns to name")
        settings: dict[str, Any] = {"source": "image_folder", "path": str(path.resolve())}
    elif path.suffix in FILE_ENDINGS or path.is_file():
        if not path.is_file():
            raise RecipeError(f"--data: no such file: {path}")
        settings = {"source": "files", "train": str(path.resolve()), "evaluation_fraction": 0.1, **columns}
    else:
        settings = {"source": "hub", "id": data, **columns}
    return [f"data={json.dumps(settings)}"]


def read_seeds(text: str, *, option: str = "--seeds", first: int = 0) -> tuple[int, ...]:
    """A number of seeds from the first one on, or a list such as 3,4,7.

    Raises: RecipeError.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"{option}: expected a number or a list such as 0,1,2, found {text!r}") from error
    if "," not in text:
        if not 0 < numbers[0] <= MOST_SEEDS:
            raise RecipeError(f"{option}: expected 1 to {MOST_SEEDS} seeds or a list such as 0,1,2, found {text!r}")
        return tuple(range(first, first + numbers[0]))
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise RecipeError(f"{option}: expected at least one seed, none twice or below 0, found {text!r}")
    return tuple(numbers)


def read_tuning_seeds(text: str | None) -> tuple[int, ...]:
    """Seeds of a search: two by default, counted from one that is not tested.

    Raises: RecipeError.
    """
    return read_seeds(text or "2", option="--tuning-seeds", first=FIRST_TUNING_SEED)


def read_jobs(text: str) -> int | None:
    """Runs at once; None for ``auto``.

    Raises: RecipeError.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"--jobs: expected auto or a number, found {text!r}")
    return int(text)


def check_experiment(
    recipe: str,
    *,
    scale: str | None,
    overrides: Sequence[str],
    folder: Path | None,
    seeds: str | None = None,
    jobs: str = "auto",
) -> None:
    """What can be known of a training command without torch.

    Raises: RecipeError.
    """
    check_folder(folder)
    if seeds is not None:
        read_seeds(seeds)
    read_jobs(jobs)
    read_recipe(recipe, scale=scale, overrides=overrides)


def check_tuning(tune: Sequence[str], *, seeds: str | None, growth: int | None, print_jobs: bool) -> None:
    """What can be known of --tune and its options without torch.

    Raises: RecipeError.
    """
    if not tune:
        for name, value in (("--tuning-seeds", seeds), ("--tune-growth", growth)):
            if value is not None:
                raise RecipeError(f"{name} belongs to --tune; give both or neither")
        return
    if print_jobs:
        raise RecipeError("--print-jobs prints runs that are known before any has ended; leave it out with --tune")
    read_tuned_fields(tune)
    read_tuning_seeds(seeds)


def check_folder(folder: Path | None) -> None:
    """Raise RecipeError for a folder to write that is, or lies in, a file."""
    if folder is None:
        return
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise RecipeError(f"--folder: expected a folder to write, found the file {nearest}; give another name")

"""What `train`, `compare`, `glue` and `reproduce` check of their arguments before torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.experiments.load_recipe import read_recipe
from wellcond.experiments.settings import RecipeError

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


def read_seeds(text: str) -> tuple[int, ...]:
    """A number of seeds from 0, or a list such as 3,4,7.

    Raises: RecipeError.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"--seeds: expected a number or a list such as 0,1,2, found {text!r}") from error
    if "," not in text:
        if not 0 < numbers[0] <= MOST_SEEDS:
            raise RecipeError(f"--seeds: expected 1 to {MOST_SEEDS} seeds or a list such as 0,1,2, found {text!r}")
        return tuple(range(numbers[0]))
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise RecipeError(f"--seeds: expected at least one seed, none twice or below 0, found {text!r}")
    return tuple(numbers)


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


def check_folder(folder: Path | None) -> None:
    """Raise RecipeError for a folder to write that is, or lies in, a file."""
    if folder is None:
        return
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise RecipeError(f"--folder: expected a folder to write, found the file {nearest}; give another name")

"""Source `pathfinder_folder`: Pathfinder images as the Long Range Arena published them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from wellcond.files import read_regular
from wellcond.lab.data.base import (
    Data,
    DataError,
    SourceConfig,
    TensorDataset,
    describe_sizes,
    files_or_folders,
    find_path,
    register_source,
    report_progress,
)
from wellcond.lab.data.images import decode_image, to_channels
from wellcond.lab.data.pathfinder.scenes import CLASS_NAMES

FEWEST = 10


class PathfinderFolderConfig(SourceConfig):
    """Settings of `pathfinder_folder`."""

    source: Literal["pathfinder_folder"] = "pathfinder_folder"
    path: str
    """Folder with one folder per difficulty, such as pathfinder32; from the recipe's folder, or a name in a mirror."""
    difficulty: str = Field("curv_contour_length_14", pattern=r"^\w[\w.-]*$")
    """Also published: curv_contour_length_9 and curv_baseline, of contour length 6."""
    seed: int = 0
    """Of the split into 80 % training, 10 % evaluation and 10 % test examples."""


@register_source(PathfinderFolderConfig)
def load(config: PathfinderFolderConfig, base: Path) -> Data:
    """Read everything, check it, and split it."""
    folder = find_path(config.path, base)
    whole = _read_images(folder / config.difficulty)
    if len(whole) < FEWEST:
        raise DataError(
            f"{folder}: too few images in {config.difficulty}.",
            expected=f"at least {FEWEST}, so that 10 % are one image",
            found=str(len(whole)),
            todo="Copy the whole data set.",
        )
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(config.seed))
    tenth = len(whole) // 10
    assert whole.labels is not None
    train, evaluation, test = (
        TensorDataset("image", whole.inputs[rows], whole.labels[rows])
        for rows in (part.sort().values for part in order.split([len(whole) - 2 * tenth, tenth, tenth]))
    )
    description = (
        f"Pathfinder images of {folder.name}, {config.difficulty}, split with seed {config.seed}: "
        f"{describe_sizes(train, evaluation, CLASS_NAMES)}; {len(test)} test examples"
    )
    return Data(folder.name, "image", train, evaluation, CLASS_NAMES, description, {"test": test})


def _read_images(root: Path) -> TensorDataset:
    """The images that the files in `metadata` name, which in spite of their own names hold lines of text."""
    metadata = sorted((root / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not metadata:
        there = root if root.is_dir() else root.parent
        raise DataError(
            f"{root}: there are no metadata.",
            expected="files metadata/0.npy, 1.npy and so on, each beside the folder imgs/0, imgs/1 and so on",
            found=f"in {there}: {files_or_folders(there.iterdir())}",
            todo="Correct 'path' or 'difficulty'.",
        )
    images: list[np.ndarray] = []
    labels = []
    for number, file in enumerate(metadata):
        report_progress(f"reading {root.name}, folders", number, len(metadata))
        for line, row in enumerate(file.read_text("utf-8", "replace").splitlines()):
            where = f"{file}, row {line} (the first is 0)"
            try:
                folder, name, _, label, *_ = row.split()  # then follows how the image was made
                labels.append({"0": 0, "1": 1}[label])
                path = root / folder / name
                if not path.resolve().is_relative_to(root.resolve()):  # a link may lead anywhere
                    raise ValueError("the path leads out of its data set")
                encoded = read_regular(path)
            except (OSError, ValueError, KeyError) as error:
                raise DataError(
                    f"{where}: the row cannot be used.",
                    expected=f"text: folder, image file, number, label 0 or 1, ...; the file in {root}",
                    found=f"{row[:80]!r}; {type(error).__name__}: {error}",
                    todo="Correct or remove the row, or copy the data set again.",
                ) from error
            image = to_channels(decode_image(encoded, f"{where}: {path}"), 1, where)
            images.append(np.array(image))
            if images[0].shape != images[-1].shape:
                raise DataError(
                    f"{where}: the image {path} has another size than the first.",
                    expected="{1} x {0} pixels".format(*images[0].shape),
                    found="{1} x {0}".format(*images[-1].shape),
                    todo="Replace the image, or keep sets of different sizes apart.",
                )
    inputs = torch.from_numpy(np.stack(images)[:, None]) if images else torch.empty(0)
    return TensorDataset("image", inputs, torch.tensor(labels))

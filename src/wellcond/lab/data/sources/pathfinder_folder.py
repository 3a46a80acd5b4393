"""Source `pathfinder_folder`: Pathfinder images as the Long Range Arena published them, or in an .npz file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wellcond.files import read_regular
from wellcond.lab.data.base import (
    Data,
    Dataset,
    TensorDataset,
    check_index,
    describe_sizes,
    draw_subset,
)
from wellcond.lab.data.errors import DataError, files_or_folders, listed
from wellcond.lab.data.images import decode_image
from wellcond.lab.data.pathfinder_metadata import read_metadata
from wellcond.lab.data.reading import find_folder, require_file
from wellcond.lab.data.registry import SourceConfig, register_source

CLASS_NAMES = ("apart", "joined")
ARRAY_NAMES = (("image", "label"), ("x", "y"))
FEWEST = 10


class PathfinderFolderConfig(SourceConfig):
    """Settings of `pathfinder_folder`."""

    source: Literal["pathfinder_folder"] = "pathfinder_folder"
    path: str
    """Folder with one folder per difficulty, such as pathfinder32; from the recipe's folder, or a name in a mirror."""
    difficulty: str = Field("curv_contour_length_14", pattern=r"^\w[\w.-]*$")
    """Also published: curv_contour_length_9 and curv_baseline, of contour length 6."""
    file: str | None = Field(None, pattern=r"^\w[\w.-]*\.npz$")
    """An .npz file in `path` to read instead, with the arrays image and label, or x and y."""
    seed: int = 0
    """Of the split into 80 % training, 10 % evaluation and 10 % test examples."""
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    limit_test: int | None = Field(None, ge=1)
    """Largest number of examples, drawn with a fixed seed."""


@dataclass(frozen=True, eq=False)
class PathfinderFiles:
    """Image files, opened when asked for; all must have the size of the first."""

    root: Path
    files: Sequence[str]
    labels: Tensor
    places: Sequence[str]
    """Where the metadata name each file."""
    size: tuple[int, int]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The decoded image and its class."""
        index = check_index(index, len(self))
        where = f"{self.places[index]}: {self.files[index]}"
        image = decode_image(self.content(index), where)
        if image.size != self.size:
            raise DataError(
                f"{where}: the image has another size than the first.",
                expected=f"{self.size[0]} x {self.size[1]} pixels",
                found=f"{image.size[0]} x {image.size[1]}",
                todo="Replace the image, or keep sets of different sizes apart.",
            )
        return {"image": image, "label": int(self.labels[index])}

    def content(self, index: int) -> bytes:
        """The file's bytes."""
        index = check_index(index, len(self))
        return _read_image(self.root, self.files[index], self.places[index])

    def select(self, rows: Tensor) -> PathfinderFiles:
        """Some of the images."""
        files, places = ([values[row] for row in rows.tolist()] for values in (self.files, self.places))
        return PathfinderFiles(self.root, files, self.labels[rows], places, self.size)


@register_source(PathfinderFolderConfig)
def load(config: PathfinderFolderConfig, base: Path) -> Data:
    """Check the labels and that every image is there, and split; images are decoded when asked for."""
    folder = find_folder(config.path, base)
    if config.file is not None:
        whole: TensorDataset | PathfinderFiles = _read_arrays(require_file(folder / config.file, "file"))
        origin = config.file
    else:
        whole, origin = _list_images(folder, config.difficulty), config.difficulty
    if len(whole) < FEWEST:
        raise DataError(
            f"{folder}: too few images in {origin}.",
            expected=f"at least {FEWEST}, so that 10 % are one image",
            found=str(len(whole)),
            todo="Copy the whole data set.",
        )
    train, evaluation, test = _split(whole, config)
    description = (
        f"Pathfinder images of {folder.name}, {origin}, split with seed {config.seed}: "
        f"{describe_sizes(train, evaluation, CLASS_NAMES)}; {len(test)} test examples"
    )
    return Data(folder.name, "image", train, evaluation, CLASS_NAMES, description, {"test": test})


def _split(whole: TensorDataset | PathfinderFiles, config: PathfinderFolderConfig) -> list[Dataset]:
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(config.seed))
    tenth = len(whole) // 10
    parts = order.split([len(whole) - 2 * tenth, tenth, tenth])
    splits: list[Dataset] = []
    for part, limit in zip(parts, (config.limit_train, config.limit_evaluation, config.limit_test), strict=True):
        rows = part.sort().values
        drawn = draw_subset(len(rows), limit)
        rows = rows if drawn is None else rows[drawn]
        if isinstance(whole, PathfinderFiles):
            splits.append(whole.select(rows))
        else:
            assert whole.labels is not None
            splits.append(TensorDataset("image", whole.inputs[rows], whole.labels[rows]))
    return splits


def _list_images(folder: Path, difficulty: str) -> PathfinderFiles:
    root = folder / difficulty
    if not root.is_dir():
        raise DataError(
            f"{root}: this difficulty is missing.",
            expected="a folder with the folders imgs and metadata",
            found=f"in {folder}: {files_or_folders(folder.iterdir())}",
            todo="Correct 'difficulty' or 'path', or set 'file' to read an .npz file.",
        )
    rows = read_metadata(root)
    files, places = [row.image for row in rows], [row.where for row in rows]
    first = decode_image(_read_image(root, files[0], places[0]), f"{places[0]}: {files[0]}")
    return PathfinderFiles(root, files, torch.tensor([row.label for row in rows]), places, first.size)


def _read_image(root: Path, file: str, where: str) -> bytes:
    path = root / file
    try:
        # Followed to its end: a link may lead anywhere.
        if not path.resolve().is_relative_to(root.resolve()):
            raise OSError(None, "it is a link out of the data set")
        return read_regular(path)
    except OSError as error:
        raise DataError(
            f"{where}: the image cannot be opened.",
            expected=f"an image file at {path}",
            found=f"{type(error).__name__}: {error.strerror}",
            todo="Restore the file, or remove the row.",
        ) from error


def _read_arrays(file: Path) -> TensorDataset:
    try:
        # Opened here: numpy leaves a broken archive open.
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError(f"a single array of shape {archive.shape}")
            found = list(archive)
            names = next((pair for pair in ARRAY_NAMES if set(pair) <= set(found)), None)
            arrays = [] if names is None else [archive[name] for name in names]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file}: the arrays cannot be read.",
            expected="an .npz file of numbers",
            found=f"{type(error).__name__}: {error}",
            todo="Copy the file again.",
        ) from error
    if names is None:
        raise DataError(
            f"{file}: the arrays are missing.",
            expected=" or ".join(" and ".join(pair) for pair in ARRAY_NAMES),
            found=listed(found),
            todo="Rename the arrays.",
        )
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[1] != 1):
        raise DataError(
            f"{file}: the array {names[0]!r} holds no grey images.",
            expected="uint8 of shape (n, height, width) or (n, 1, height, width)",
            found=f"{images.dtype} of shape {images.shape}",
            todo="Convert the array.",
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{file}: the array {names[1]!r} does not have one label per image.",
            expected=f"shape {images.shape[:1]}",
            found=f"shape {labels.shape}",
            todo="Correct the array.",
        )
    wrong = np.flatnonzero(~np.isin(labels, (0, 1)))
    if len(wrong):
        raise DataError(
            f"{file}, row {wrong[0]} (the first is 0): the label is wrong.",
            expected="0 or 1",
            found=str(labels[wrong[0]]),
            todo="Correct the array.",
        )
    inputs = torch.from_numpy(images.reshape(len(images), 1, *images.shape[-2:]))
    return TensorDataset("image", inputs, torch.from_numpy(labels.astype(np.int64)))

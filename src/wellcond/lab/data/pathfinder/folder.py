"""Source `pathfinder_folder`: Pathfinder images as the Long Range Arena published them, or in an .npz file."""

from __future__ import annotations

import zipfile
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
    require,
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
    file: str | None = Field(None, pattern=r"^\w[\w.-]*\.npz$")
    """An .npz file in `path` to read instead, with the arrays image and label, or x and y."""
    seed: int = 0
    """Of the split into 80 % training, 10 % evaluation and 10 % test examples."""


@register_source(PathfinderFolderConfig)
def load(config: PathfinderFolderConfig, base: Path) -> Data:
    """Read everything, check it, and split it."""
    folder = find_path(config.path, base)
    file, difficulty = config.file, config.difficulty
    whole = _read_images(folder / difficulty) if file is None else _read_arrays(require(folder / file, field="file"))
    if len(whole) < FEWEST:
        raise DataError(
            f"{folder}: too few images in {file or difficulty}.",
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
        f"Pathfinder images of {folder.name}, {file or difficulty}, split with seed {config.seed}: "
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
            todo="Correct 'path' or 'difficulty', or set 'file' to read an .npz file.",
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


def _read_arrays(file: Path) -> TensorDataset:
    try:
        # Opened here: numpy leaves a broken archive open.
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError(f"a single array of shape {archive.shape}")
            names = ("image", "label") if "image" in archive else ("x", "y")
            images, labels = (archive[name] for name in names)
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[1] != 1):
            raise ValueError(f"{names[0]} is {images.dtype} of shape {images.shape}")
        if labels.shape != images.shape[:1]:
            raise ValueError(f"{names[1]} has the shape {labels.shape}")
        wrong = np.flatnonzero(~np.isin(labels, (0, 1)))
        if len(wrong):
            raise ValueError(f"the label {labels[wrong[0]]} in row {wrong[0]} (the first is 0)")
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file}: the arrays cannot be read.",
            expected="an .npz file with image (or x), uint8 of shape (n, height, width) or (n, 1, height, width), and "
            "label (or y), 0 or 1 for each image",
            found=f"{type(error).__name__}: {error}",
            todo="Correct the arrays, or copy the file again.",
        ) from error
    inputs = torch.from_numpy(images.reshape(len(images), 1, *images.shape[-2:]))
    return TensorDataset("image", inputs, torch.from_numpy(labels.astype(np.int64)))

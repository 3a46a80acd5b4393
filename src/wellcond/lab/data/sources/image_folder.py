"""Source `image_folder`: one folder per split, in it one folder per class, in it the images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wellcond.files import read_regular
from wellcond.lab.data.base import Data, check_index, describe_sizes
from wellcond.lab.data.errors import DataError, files_or_folders, listed
from wellcond.lab.data.images import decode_image, import_pil, picture_formats
from wellcond.lab.data.registry import SourceConfig, register_source

EVALUATION_NAMES = ("val", "validation", "test")


class ImageFolderConfig(SourceConfig):
    """Settings of `image_folder`."""

    source: Literal["image_folder"] = "image_folder"
    path: str
    train: str = "train"
    """Folder of the training split, within `path`."""
    evaluation: str | None = None
    """Folder of the evaluation split, within `path`; by default the first of val, validation, test that exists."""


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Image files, opened when asked for."""

    files: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        """Number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The decoded image and its class."""
        index = check_index(index, len(self))
        return {"image": decode_image(self.content(index), self.files[index]), "label": int(self.labels[index])}

    def content(self, index: int) -> bytes:
        """The file's bytes."""
        try:
            return read_regular(self.files[index])
        except OSError as error:
            raise DataError(
                f"{self.files[index]}: the image cannot be opened.",
                expected="the file that was there when the folder was listed",
                found=f"{type(error).__name__}: {error.strerror}",
                todo="Restore the file, or start again to list the folder anew.",
            ) from error


@register_source(ImageFolderConfig)
def load(config: ImageFolderConfig, base: Path) -> Data:
    """List the images; classes are sorted by name and must be the same in every split."""
    root = base / Path(os.path.expanduser(config.path))
    _require_folder(root, "the image folder", "Correct the field 'path'; relative paths start at the recipe's folder.")
    _require_folder(root / config.train, "the training split", "Set 'train' to the name of the folder to train on.")
    evaluation = config.evaluation or _find_evaluation(root, config.train)
    _require_folder(root / evaluation, "the evaluation split", "Set 'evaluation' to the name of a folder.")

    train, ignored = _list_split(root / config.train)
    names = tuple(train)
    splits = {config.train: train}
    others = [name for name in EVALUATION_NAMES if name not in (config.train, evaluation) and (root / name).is_dir()]
    for name in (evaluation, *others):
        splits[name], more = _list_split(root / name)
        ignored += more
        _require_classes(root / name, splits[name], names)
    made = {name: _make_split(split, names) for name, split in splits.items()}
    sizes = describe_sizes(made[config.train], made[evaluation], names)
    note = f", {ignored} other files ignored" if ignored else ""
    description = f"image folder {root.name!r}, evaluated on {evaluation!r}: {sizes}{note}"
    rest = {name: made[name] for name in others}
    return Data(root.name, "image", made[config.train], made[evaluation], names, description, rest)


def _require_folder(path: Path, what: str, todo: str) -> None:
    if not path.is_dir():
        parent = path.parent
        there = files_or_folders(parent.iterdir()) if parent.is_dir() else "nothing: that folder is missing too"
        raise DataError(f"{path}: {what} is missing.", expected="a folder", found=f"in {parent}: {there}", todo=todo)


def _find_evaluation(root: Path, train: str) -> str:
    for name in EVALUATION_NAMES:
        if name != train and (root / name).is_dir():
            return name
    raise DataError(
        f"{root}: there is no split to evaluate on.",
        expected=f"one of the folders {listed(EVALUATION_NAMES)}",
        found=files_or_folders(root.iterdir()),
        todo="Make one of these folders, or name yours in the field 'evaluation'.",
    )


def _list_split(folder: Path) -> tuple[dict[str, list[str]], int]:
    """Image files by class, sorted, and how many other files were passed over."""
    # The table of extensions also names formats that PIL only writes.
    formats = picture_formats()
    suffixes = {suffix for suffix, name in import_pil().registered_extensions().items() if name in formats}
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    classes = [path for path in entries if path.is_dir()]
    loose = [path for path in entries if path.is_file() and path.suffix.lower() in suffixes]
    if loose or not classes:
        raise DataError(
            f"{folder}: the images are not sorted into classes." if loose else f"{folder}: there are no images.",
            expected="one folder per class, with the images of that class in it",
            found=f"{len(loose)} images outside of a class, such as {loose[0].name}" if loose else "no folder",
            todo="Move the images into folders named after their classes.",
        )
    result, ignored = {}, len(entries) - len(classes)
    for path in classes:
        files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names if name[0] != "."]
        images = sorted(name for name in files if os.path.splitext(name)[1].lower() in suffixes)
        ignored += len(files) - len(images)
        if not images:
            raise DataError(
                f"{path}: this class has no images.",
                expected=f"at least one image ({listed(sorted(suffixes), most=8)})",
                found=f"{len(files)} other files",
                todo="Add images, or remove the folder.",
            )
        result[path.name] = images
    return result, ignored


def _require_classes(folder: Path, split: dict[str, list[str]], names: tuple[str, ...]) -> None:
    missing, unknown = sorted(set(names) - set(split)), sorted(set(split) - set(names))
    if missing or unknown:
        raise DataError(
            f"{folder}: the classes are not those of the training split.",
            expected=f"the folders {listed(names)}",
            found=f"missing: {listed(missing)}; not in training: {listed(unknown)}",
            todo="Give both splits the same class folders.",
        )


def _make_split(split: dict[str, list[str]], names: tuple[str, ...]) -> FolderSplit:
    files = [file for name in names for file in split[name]]
    counts = torch.tensor([len(split[name]) for name in names])
    return FolderSplit(files, torch.arange(len(names)).repeat_interleave(counts))

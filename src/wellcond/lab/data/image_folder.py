"""Source `image_folder`: one folder per class, with its images; below one folder per split, or without splits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from wellcond.lab.data.base import (
    Data,
    DataError,
    SourceConfig,
    describe_sizes,
    draw_fraction,
    files_or_folders,
    find_path,
    listed,
    register_source,
    require,
)
from wellcond.lab.data.images import decode_image, import_pil, picture_formats, read_image

EVALUATION_NAMES = ("val", "validation", "test")
DEFAULT_FRACTION = 0.1


class ImageFolderConfig(SourceConfig):
    """Settings of `image_folder`."""

    source: Literal["image_folder"] = "image_folder"
    path: str
    """From the recipe's folder, or a name in a mirror."""
    train: str | None = None
    """Folder of the training split, within `path`; by default train, or `path` itself if there are no splits."""
    evaluation: str | None = None
    """Folder of the evaluation split, within `path`; by default the first of val, validation, test that exists."""
    evaluation_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of the training images to evaluate on instead, of every class alike; 0.1 if there are no splits."""
    seed: int = 0
    """Of the images that `evaluation_fraction` draws."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> ImageFolderConfig:
        if self.evaluation is not None and self.evaluation_fraction is not None:
            raise ValueError("expected either 'evaluation' (a folder) or 'evaluation_fraction', got both.")
        return self


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files, opened when asked for."""

    files: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        """Number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The decoded image and its class."""
        return {"image": decode_image(self.content(index), self.files[index]), "label": int(self.labels[index])}

    def content(self, index: int) -> bytes:
        """The file's bytes."""
        return read_image(self.files[index], self.files[index])

    def take(self, rows: Tensor) -> ImageFiles:
        """Some of the images."""
        return ImageFiles([self.files[row] for row in rows.tolist()], self.labels[rows])


@register_source(ImageFolderConfig)
def load(config: ImageFolderConfig, base: Path) -> Data:
    """List the images; classes are sorted by name and must be the same in every split."""
    root = find_path(config.path, base)
    splits = [name for name in ("train", *EVALUATION_NAMES) if (root / name).is_dir()]
    train, fraction = config.train or ("train" if splits else "."), config.evaluation_fraction
    usual = [name for name in splits if name not in ("train", train)]
    if train == "." and config.evaluation is None:
        fraction = fraction or DEFAULT_FRACTION
    evaluation = train if fraction else config.evaluation or (usual[0] if usual else None)
    if evaluation is None:
        raise DataError(
            f"{root}: there is no split to evaluate on.",
            expected=f"one of the folders {listed(EVALUATION_NAMES)}",
            found=files_or_folders(root.iterdir()),
            todo="Make one of these folders, name yours in 'evaluation', or set 'evaluation_fraction', such as 0.1.",
        )
    names = dict.fromkeys([train, evaluation, *usual])
    fields = {train: "train", evaluation: "evaluation"}
    folders = {name: require(root / name, "folder", fields.get(name)) for name in names}
    # Folders are compared before any is searched: a data set of millions of files takes minutes to list.
    classes = _classes(folders[train])
    for folder in folders.values():
        _classes(folder, expected=classes)
    listings = {name: _list_images(folder, classes) for name, folder in folders.items()}
    made, ignored = {name: images for name, (images, _) in listings.items()}, sum(n for _, n in listings.values())
    trained, evaluated = made[train], made[evaluation]
    told = f"evaluated on {evaluation!r}"
    if fraction:
        rows, others = draw_fraction(trained, fraction, seed=config.seed, what=str(root / train))
        trained, evaluated = trained.take(rows), evaluated.take(others)
        told = f"evaluated on {fraction:g} of the images of every class, set aside by seed {config.seed}"
    note = f", {ignored} other files ignored" if ignored else ""
    class_names = tuple(classes)
    sizes = describe_sizes(trained, evaluated, class_names)
    description = f"image folder {root.name!r}, {told}: {sizes}{note}"
    rest = {name: made[name] for name in usual if name != evaluation}
    return Data(root.name, "image", trained, evaluated, class_names, description, rest)


def _suffixes() -> set[str]:
    # The table of extensions also names formats that PIL only writes.
    formats = picture_formats()
    return {suffix for suffix, name in import_pil().registered_extensions().items() if name in formats}


def _is_image(name: str, suffixes: set[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes


def _classes(folder: Path, expected: list[str] | None = None) -> list[str]:
    """Names of the folders of classes, sorted, which must be those expected."""
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    classes, suffixes = sorted(entry.name for entry in entries if entry.is_dir()), _suffixes()
    loose = sorted(entry.name for entry in entries if entry.is_file() and _is_image(entry.name, suffixes))
    if loose or not classes:
        raise DataError(
            f"{folder}: the images are not sorted into classes." if loose else f"{folder}: there are no images.",
            expected="one folder per class, with the images of that class in it",
            found=f"{len(loose)} images outside of a class, such as {loose[0]}" if loose else "no folder",
            todo="Move the images into folders named after their classes.",
        )
    if expected is not None and classes != expected:
        missing, unknown = sorted(set(expected) - set(classes)), sorted(set(classes) - set(expected))
        raise DataError(
            f"{folder}: the classes are not those of the training split.",
            expected=f"the folders {listed(expected)}",
            found=f"missing: {listed(missing)}; not in training: {listed(unknown)}",
            todo="Give both splits the same class folders.",
        )
    return classes


def _list_images(folder: Path, classes: Sequence[str]) -> tuple[ImageFiles, int]:
    """Image files by class, sorted, and how many other files were passed over."""
    suffixes, images, counts = _suffixes(), [], []
    ignored = sum(not entry.is_dir() for entry in os.scandir(folder) if not entry.name.startswith("."))
    for name in classes:
        walked = os.walk(folder / name)
        files = [os.path.join(top, file) for top, _, found in walked for file in found if file[0] != "."]
        chosen = sorted(file for file in files if _is_image(file, suffixes))
        if not chosen:
            raise DataError(
                f"{folder / name}: this class has no images.",
                expected=f"at least one image ({listed(sorted(suffixes), most=8)})",
                found=f"{len(files)} other files",
                todo="Add images, or remove the folder.",
            )
        images += chosen
        counts.append(len(chosen))
        ignored += len(files) - len(chosen)
    return ImageFiles(images, torch.arange(len(classes)).repeat_interleave(torch.tensor(counts))), ignored

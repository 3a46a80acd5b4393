"""Images: reading and decoding them, their channels, a whole split as one tensor; folders by class, and the digits."""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wellcond.errors import DataError, needs_extra
from wellcond.files import read_regular
from wellcond.lab.data.base import (
    Data,
    Dataset,
    SourceConfig,
    TensorDataset,
    draw_fraction,
    listed,
    register_source,
    report_progress,
)
from wellcond.lab.data.disk import contents, find_path, require

if TYPE_CHECKING:
    from PIL.Image import Image

BYTE_LIMIT = 2**30
EVALUATION_NAMES = ("val", "validation", "test")


def import_pil() -> Any:
    """The module PIL.Image; MissingExtraError if Pillow is not installed."""
    with needs_extra("pillow", "vision", "PIL"):
        from PIL import Image
    return Image


@lru_cache
def picture_formats() -> list[str]:
    """Formats that PIL reads by itself; it would have Ghostscript run a file of PostScript, whatever its name."""
    pil = import_pil()
    pil.init()
    return [name for name in pil.OPEN if name != "EPS"]


def read_image(file: str | Path, *, within: Path | None = None) -> bytes:
    """Encoded bytes of an image file; DataError if its path, followed to its end, leads out of the folder `within`."""
    try:
        if within is not None and not Path(file).resolve().is_relative_to(within.resolve()):
            raise PermissionError(errno.EPERM, f"the path leads out of its folder {within}")
        return read_regular(file)
    except OSError as error:
        raise DataError(
            f"{file}: the image cannot be opened.",
            expected="an image file",
            found=f"{type(error).__name__}: {error.strerror}",
            path=file,
        ) from error


def decode_image(encoded: bytes, where: str) -> Image:
    """Decode an image completely and turn it upright if its EXIF data say so; errors begin with `where`."""
    pil = import_pil()
    from PIL import ImageOps

    try:
        image = pil.open(io.BytesIO(encoded), formats=picture_formats())
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return image
    except (OSError, SyntaxError, ValueError, struct.error, EOFError, pil.DecompressionBombError) as error:
        raise DataError(
            f"{where}: the image cannot be read.",
            expected="a whole image in a format that PIL reads, and no PostScript, which is a program",
            found=f"{len(encoded)} bytes; {type(error).__name__}: {error}",
        ) from error


def image_of_array(values: np.ndarray) -> Image | None:
    """A PIL image of an array (height, width) or (height, width, channels) of bytes; None for another array."""
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (1, 3, 4)):
        return None
    return import_pil().fromarray(values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values)


def side_of(split: Dataset) -> int:
    """A side in pixels for the images of a split: the median of the shorter sides of up to 64 images.

    Where all images are squares of one size, it is theirs.
    """
    few = torch.linspace(0, len(split) - 1, min(64, len(split))).long().unique().tolist()
    images = [split[index]["image"] for index in few]
    sides = sorted(int(min(image.shape[-2:] if isinstance(image, Tensor) else image.size)) for image in images)
    return sides[(len(sides) - 1) // 2]


def place_of(split: Dataset, index: int) -> str:
    """The file of an image, or its number where it has none."""
    files = getattr(split, "files", None)
    return f"image {index}" if files is None else str(files[index])


def to_channels(image: Image | Tensor, channels: int, where: str = "an image") -> Image | Tensor:
    """The image with 1 (grey) or 3 (RGB) channels; errors begin with `where`.

    Grey becomes RGB by repetition; RGB becomes grey with weights 0.299, 0.587, 0.114; transparency is dropped; 16-bit
    grey keeps its upper 8 bits. A tensor (C, H, W) keeps its dtype; one of floats in colour is not made grey.
    """
    if isinstance(image, Tensor):
        if len(image) == 3 and channels == 1 and image.dtype == torch.uint8:  # rounded as PIL does
            grey = import_pil().fromarray(image.permute(1, 2, 0).contiguous().numpy()).convert("L")
            return torch.from_numpy(np.array(grey))[None]
        if len(image) not in (1, channels):
            expected = f"{channels}, or 1 to be repeated"
            raise DataError(f"{where}: channels of a tensor (C, H, W)", expected=expected, found=str(len(image)))
        return image.expand(channels, -1, -1)
    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I;16"):
        image = cast("Image", import_pil().fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)))
    if image.mode in ("I", "F"):
        raise DataError(
            f"{where} has 32-bit pixels, whose range is unknown.",
            expected="8 bits per channel, or 16-bit grey",
            found=f"mode {image.mode!r}",
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # PIL warns of transparency stored as bytes unless it is first applied
    return image if image.mode == mode else image.convert(mode)


def as_tensor_images(
    split: Dataset,
    *,
    channels: int,
    size: int | None = None,
    resampling: Literal["bicubic", "bilinear"] = "bicubic",
    what: str = "decoding images",
) -> Tensor | None:
    """Decode a split of images once, so that epochs cost no decoding.

    With `size`, the shorter side is resized to it by PIL's filter, which averages over all the pixels that a smaller
    one covers, and a square is cut from the centre; tensors always keep their size.

    Returns: (n, C, H, W), uint8 if the images were decoded, else the dtype of the source's tensors; None when it would
        exceed 1 GiB or the images differ in size.
    """
    count = len(split)
    first = _pixels(split, 0, size, channels, resampling)
    if count * first.numel() * first.element_size() > BYTE_LIMIT:
        return None
    images = torch.empty((count, *first.shape), dtype=first.dtype)
    step = max(1, count // 100)
    for index in range(count):
        pixels = _pixels(split, index, size, channels, resampling)
        if pixels.shape != first.shape:
            return None
        images[index] = pixels
        if (index + 1) % step == 0 or index + 1 == count:
            report_progress(what, index + 1, count)
    return images


def _pixels(split: Dataset, index: int, size: int | None, channels: int, resampling: str) -> Tensor:
    image = to_channels(split[index]["image"], channels, place_of(split, index))
    if isinstance(image, Tensor):
        return image
    if size is not None and image.size != (size, size):
        scale = size / min(image.size)
        # max: rounding must not make the shorter side smaller than the square.
        width, height = (max(size, round(side * scale)) for side in image.size)
        image = image.resize((width, height), import_pil().Resampling[resampling.upper()])
        left, top = (width - size) // 2, (height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    # A copy, since torch wants a writable array.
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


# Source `image_folder`: one folder per class, with its images; below one folder per split, or without splits


class ImageFolderConfig(SourceConfig):
    """Settings of `image_folder`."""

    source: Literal["image_folder"] = "image_folder"
    path: str
    """From the recipe's folder, or a name in a mirror. With the folder train in it, the first of val, validation and
    test is evaluated on; without any of these, it has the folders of the classes."""
    evaluation_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of the training images to evaluate on instead, of every class alike; 0.1 if there are no splits."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files, opened when asked for."""

    files: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": decode_image(self.content(index), self.files[index]), "label": int(self.labels[index])}

    def content(self, index: int) -> bytes:
        """The file's bytes."""
        return read_image(self.files[index])

    def take(self, rows: Tensor) -> ImageFiles:
        """Some of the images."""
        return ImageFiles([self.files[row] for row in rows.tolist()], self.labels[rows])


@register_source(ImageFolderConfig)
def load_folder(config: ImageFolderConfig, base: Path) -> Data:
    """List the images; classes are sorted by name and must be the same in every split."""
    root = find_path(config.path, base)
    others = [name for name in EVALUATION_NAMES if (root / name).is_dir()]
    train = "train" if others or (root / "train").is_dir() else "."
    fraction = config.evaluation_fraction or (0.1 if train == "." else None)
    # Folders are compared before any is searched: a data set of millions of files takes minutes to list.
    folders = {name: require(root / name, "folder") for name in (train, *others)}
    classes = [_classes(folder) for folder in folders.values()]
    if classes.count(classes[0]) != len(classes) or not (fraction or others):
        raise DataError(
            f"{root}: there is no split to evaluate on, or its classes are not those of the training split.",
            expected=f"one of the folders {listed(EVALUATION_NAMES)}, with the classes {listed(classes[0])}",
            found="; ".join(f"{name}: {listed(found)}" for name, found in zip(folders, classes, strict=True)),
            todo="Give all splits the same class folders, or set 'evaluation_fraction', such as 0.1.",
        )
    made = {name: _list_images(folder, classes[0]) for name, folder in folders.items()}
    trained = made.pop(train)
    if fraction:
        trained, evaluated = draw_fraction(trained, fraction, str(folders[train]))
        told = f"{fraction:g} of the images of every class, set aside by seed 0"
    else:
        evaluated, told = made.pop(others[0]), repr(others[0])
    origin = f"image folder {root.name!r}, evaluated on {told}"
    return Data(root.name, "image", trained, evaluated, tuple(classes[0]), origin, made)


def folder_splits(root: Path) -> tuple[dict[str, ImageFiles], tuple[str, ...]]:
    """All splits of a folder that has train and others in it, with the names of the classes; val is validation."""
    names = [name for name in ("train", *EVALUATION_NAMES) if (root / name).is_dir()]
    folders = {{"val": "validation"}.get(name, name): require(root / name, "folder") for name in names}
    if "train" not in folders:
        raise DataError(
            f"{root}: there are folders, but none for training.",
            expected="the folders train and val (or validation, test) with a folder for each class in them",
            found=contents(root),
        )
    classes = {split: _classes(folder) for split, folder in folders.items()}
    for split, found in classes.items():
        if found != classes["train"]:
            raise DataError(
                f"{folders[split]}: its classes are not those of training.",
                expected=listed(classes["train"]),
                found=listed(found),
            )
    made = {split: _list_images(folder, classes["train"]) for split, folder in folders.items()}
    return made, tuple(classes["train"])


def joined(parts: Sequence[ImageFiles]) -> ImageFiles:
    """Several lists of images as one."""
    return ImageFiles([file for part in parts for file in part.files], torch.cat([part.labels for part in parts]))


def _is_image(name: str) -> bool:
    # The table of extensions also names formats that PIL only writes.
    return import_pil().registered_extensions().get(Path(name).suffix.lower()) in picture_formats() and name[0] != "."


def has_classes(folder: Path) -> bool:
    """Whether there are folders in a folder, for splits or classes, as for images."""
    return any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())


def _classes(folder: Path) -> list[str]:
    """Names of the folders of classes, sorted."""
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    loose = sorted(entry.name for entry in entries if entry.is_file() and _is_image(entry.name))
    if loose or not classes:
        raise DataError(
            f"{folder}: the images are not sorted into classes.",
            expected="one folder per class, with the images of that class in it",
            found=f"{listed(loose, most=3)} outside of a class" if loose else "no folder",
        )
    return classes


def _list_images(folder: Path, classes: Sequence[str]) -> ImageFiles:
    """Image files by class, sorted; other files are passed over."""
    images, labels = [], []
    for label, name in enumerate(classes):
        walked = os.walk(folder / name)
        chosen = sorted(os.path.join(top, file) for top, _, found in walked for file in found if _is_image(file))
        if not chosen:
            raise DataError(
                f"{folder / name}: this class has no images.", expected="at least one that PIL reads", found="none"
            )
        images += chosen
        labels += [label] * len(chosen)
    return ImageFiles(images, torch.tensor(labels))


# Source `digits`: the 1797 grey images of 8 x 8 that come with scikit-learn


class DigitsConfig(SourceConfig):
    """Settings of `digits`."""

    source: Literal["digits"] = "digits"
    held_out: float | None = Field(None, gt=0, lt=1)
    """Share of the training images to evaluate on; the test images are then the test split."""


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 8, 8), normalised, in one fixed random order: the first 1297 to train on, the other 500 to test on."""
    with needs_extra("scikit-learn", "train", "sklearn"):
        from sklearn.datasets import load_digits as load
    data = load()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    images = (images - images[:1297].mean()) / images[:1297].std()
    whole = TensorDataset("image", images, torch.tensor(data.target)[order])
    return whole.take(slice(1297)), whole.take(slice(1297, None))


@register_source(DigitsConfig)
def load_digits_source(config: DigitsConfig, base: Path) -> Data:
    """The split of `load_digits`; with `held_out`, a part of the training images is evaluated on."""
    train, evaluation = load_digits()
    others: dict[str, Dataset] = {}
    if config.held_out is not None:
        others["test"] = evaluation
        kept = len(train) - max(1, round(config.held_out * len(train)))  # in random order as they are
        train, evaluation = train.take(slice(kept)), train.take(slice(kept, None))
    names = tuple("0123456789")
    return Data("digits", "image", train, evaluation, names, "scikit-learn's digits, grey, 8 x 8, normalised", others)

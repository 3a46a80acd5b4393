"""What detectors found in a few images, as it stands in run records: read, checked, and arranged by image."""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.run_record import RunRecordError
from wellcond.run_lengths import read_counts

JPEG_START = b"\xff\xd8\xff"
MOST_PIXELS = 10**8
FEWEST_SHOWN = 5
"""Predictions that are drawn at least, if there are so many; otherwise as many as there are objects."""


@dataclass(frozen=True)
class Found:
    """An object: in the truth, or found by a model."""

    category: str
    box: tuple[float, float, float, float]
    """x, y, width, height."""
    runs: list[int]
    """Of its mask: lengths of background and object in turn, column by column."""
    score: float | None

    @property
    def label(self) -> str:
        """Category and, of a prediction, the score."""
        return self.category if self.score is None else f"{self.category} {self.score:.2f}"


@dataclass(frozen=True)
class Prediction:
    """What a run found in an image."""

    method: str
    seed: int
    objects: list[Found]
    """The best first."""

    def shown(self, num_true: int) -> list[Found]:
        """Those that are drawn beside so many true ones."""
        return self.objects[: max(num_true, FEWEST_SHOWN)]


@dataclass(frozen=True)
class Picture:
    """An image, the truth about it, and what the methods found."""

    image_id: int
    name: str
    height: int
    width: int
    jpeg: bytes
    """The image, perhaps smaller."""
    truth: list[Found]
    source: Path
    """The record that the image is from."""
    predictions: list[Prediction] = field(default_factory=list)

    @property
    def categories(self) -> list[str]:
        """All that are drawn, those of the truth first."""
        drawn = [*self.truth, *(found for part in self.predictions for found in part.shown(len(self.truth)))]
        return list(dict.fromkeys(found.category for found in drawn))


def hold_detections(stored: Any) -> bool:
    """Whether the samples of a record are images."""
    return isinstance(stored, list) and any(isinstance(row, dict) and "image_id" in row for row in stored)


def find_pictures(comparison: Comparison) -> list[Picture]:
    """Images in the order of the records: of each method those of the finished run with the lowest seed that has any.

    Raises: RunRecordError if a record holds something else.
    """
    pictures: dict[int, Picture] = {}
    for method in comparison.methods:
        runs = [run for run in comparison.of(method) if run.finished and hold_detections(run.record.get("samples"))]
        for run in runs[:1]:
            for at, row in enumerate(run.record["samples"]):
                try:
                    picture = _read_picture(row, run.folder / "run.json")
                    found = [_read_found(entry, picture, scored=True) for entry in row["predictions"]]
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise _broken(run.folder / "run.json", at, error) from error
                shared = pictures.setdefault(picture.image_id, picture)
                shared.predictions.append(Prediction(method, run.seed, found))
    return list(pictures.values())


def _broken(path: Path, at: int, error: Exception) -> RunRecordError:
    return RunRecordError(
        path,
        "expected 'samples' to be images with image_id, file_name, size, jpeg, truth and predictions; entry "
        f"{at} is not ({type(error).__name__}: {error})",
        "Repeat the run.",
    )


def _read_picture(row: dict[str, Any], source: Path) -> Picture:
    height, width = row["size"]
    if not (type(height) is int and type(width) is int and min(height, width) > 0 and height * width <= MOST_PIXELS):
        raise ValueError(f"size {row['size']!r}")
    try:
        jpeg = base64.b64decode(row["jpeg"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"the image is not in base 64: {error}") from error
    if not jpeg.startswith(JPEG_START):
        raise ValueError("the image is no JPEG")
    picture = Picture(int(row["image_id"]), str(row["file_name"]), height, width, jpeg, [], source)
    picture.truth.extend(_read_found(entry, picture, scored=False) for entry in row["truth"])
    return picture


def _read_found(entry: dict[str, Any], picture: Picture, *, scored: bool) -> Found:
    x, y, width, height = (float(number) for number in entry["bbox"])
    score = float(entry["score"]) if scored else None
    if not all(map(math.isfinite, (x, y, width, height, score or 0.0))):
        raise ValueError("a number that is not finite")
    runs = read_counts(entry["segmentation"]["counts"])
    if min(runs, default=-1) < 0 or sum(runs) != picture.height * picture.width:
        raise ValueError(f"a mask that does not fill {picture.height} x {picture.width} pixels")
    return Found(str(entry["category"]), (x, y, width, height), runs, score)

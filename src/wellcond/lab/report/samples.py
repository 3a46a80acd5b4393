"""What models made after training, as it stands in run records: text of language models, objects found in images.

Both can hold anything. Text is shown as text, and an image is checked to be a JPEG but never decoded here.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby
from typing import Any, NamedTuple

import numpy as np

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.records import Run, RunRecordError
from wellcond.lab.report.table import plain_markdown, visible
from wellcond.run_lengths import read_counts

WIDTH = 100
"""Characters in a line of a sample."""
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
MOST_PIXELS = 10**8
FEWEST_SHOWN = 5
"""Predictions that are drawn at least, if there are so many; otherwise as many as there are objects."""
COLOURS = ("#ff4d4d", "#35c3ff", "#ffd21f", "#5fe36b", "#ff7be5", "#ff9a2e", "#b59bff", "#2ff0d0")
"""Bright, as they must be seen on photographs."""
FINEST = 256
"""Columns of a mask that are drawn at most."""
SMALLEST_LABELLED = 0.02
"""Share of the image that a box must cover for its label to be drawn; others only show theirs when pointed at."""


def _shown_runs(comparison: Comparison, *, images: bool) -> Iterator[Run]:
    """Of each method the finished run with the lowest seed that has samples of a kind."""
    for method in comparison.methods:
        for run in comparison.of(method):
            stored = run.record.get("samples")
            rows = stored if isinstance(stored, list) else []
            if run.finished and stored and images == any(isinstance(row, dict) and "image_id" in row for row in rows):
                yield run
                break


class Sample(NamedTuple):
    """One text of one run."""

    title: str
    """Which run wrote it."""
    given: str
    """The prompt, where the tokeniser gives it back unchanged."""
    continued: str
    """What the model wrote."""
    problem: str
    """Why there is no text."""


def find_samples(comparison: Comparison) -> dict[str, list[Sample]]:
    """Texts by prompt, of one run of each method.

    Raises: RunRecordError if a record holds something else under `samples`.
    """
    found: dict[str, list[Sample]] = {}
    for run in _shown_runs(comparison, images=False):
        try:
            for row in run.record["samples"]:
                prompt, problem = row["prompt"], row.get("problem", "")
                text = "" if problem else row["text"]
                if not all(isinstance(said, str) for said in (prompt, text, problem)):
                    raise TypeError
                given = prompt if text.startswith(prompt) else ""
                sample = Sample(f"{run.method}, seed {run.seed}", given, text.removeprefix(given), problem)
                found.setdefault(prompt, []).append(sample)
        except (TypeError, KeyError, AttributeError) as error:
            said = "expected 'samples' to be a list of {prompt, text}"
            raise RunRecordError(run.folder / "run.json", said, "Repeat the run.") from error
    return found


def samples_markdown(samples: dict[str, list[Sample]]) -> Iterator[str]:
    """Lines of a section; texts are blocks of code, in which nothing is markup."""
    if not samples:
        return
    yield from ("## Samples", "", "What the models write after training, from the same random numbers.", "")
    for prompt, of_prompt in samples.items():
        shown = f"With a beginning: {plain_markdown(visible(prompt))}" if prompt else "Without a beginning"
        yield from (f"### {shown}", "")
        for sample in of_prompt:
            title = plain_markdown(sample.title)
            if sample.problem:
                yield from (f"{title}: nothing was written ({plain_markdown(visible(sample.problem))})", "")
                continue
            text = sample.given + sample.continued
            lines = [line.expandtabs(4) for line in visible(text).split("\n")]
            wrapped = [textwrap.wrap(x, WIDTH, drop_whitespace=False, replace_whitespace=False) or [""] for x in lines]
            # Fences longer than any in the text.
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
            yield from (f"{title}:", "", f"{fence}text", *(part for parts in wrapped for part in parts), fence, "")


@dataclass(frozen=True)
class Detection:
    """An object: in the truth, or found by a model."""

    category: str
    box: tuple[float, float, float, float]
    """x, y, width, height."""
    runs: list[int]
    """Of its mask: lengths of background and object in turn, column by column."""
    label: str
    """Category and, of a prediction, the score."""

    @property
    def area(self) -> float:
        """Of its box."""
        return self.box[2] * self.box[3]


@dataclass(frozen=True)
class Picture:
    """An image, the truth about it, and what the methods found."""

    title: str
    height: int
    width: int
    jpeg: str
    """The image in base 64, perhaps smaller."""
    truth: list[Detection]
    predictions: dict[str, list[Detection]] = field(default_factory=dict)
    """By run, the best first."""

    def shown(self, title: str) -> list[Detection]:
        """Predictions of a run that are drawn."""
        return self.predictions[title][: max(len(self.truth), FEWEST_SHOWN)]


def find_pictures(comparison: Comparison) -> list[Picture]:
    """Images in the order of the records, with what one run of each method found.

    Raises: RunRecordError if a record holds something else.
    """
    pictures: dict[int, Picture] = {}
    for run in _shown_runs(comparison, images=True):
        for at, row in enumerate(run.record["samples"]):
            try:
                picture = _read_picture(row)
                found = [_read_detection(entry, picture, scored=True) for entry in row["predictions"]]
                shared = pictures.setdefault(int(row["image_id"]), picture)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said = "expected 'samples' to be images with image_id, file_name, size, jpeg, truth and predictions; "
                said += f"entry {at} is not ({type(error).__name__}: {error})"
                raise RunRecordError(run.folder / "run.json", said, "Repeat the run.") from error
            shared.predictions[f"{run.method}, seed {run.seed}"] = found
    return list(pictures.values())


def _read_picture(row: dict[str, Any]) -> Picture:
    height, width = row["size"]
    if not (type(height) is int and type(width) is int and min(height, width) > 0 and height * width <= MOST_PIXELS):
        raise ValueError(f"size {row['size']!r}")
    try:
        jpeg = base64.b64decode(row["jpeg"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"the image is not in base 64: {error}") from error
    if not (jpeg.startswith(JPEG_START) and jpeg.endswith(JPEG_END)):
        raise ValueError("the image is no JPEG, or not all of one")
    title = f"Image {int(row['image_id'])}: {visible(str(row['file_name']))}"
    picture = Picture(title, height, width, base64.b64encode(jpeg).decode(), [])
    picture.truth.extend(_read_detection(entry, picture, scored=False) for entry in row["truth"])
    return picture


def _read_detection(entry: dict[str, Any], picture: Picture, *, scored: bool) -> Detection:
    x, y, width, height = (float(number) for number in entry["bbox"])
    score = float(entry["score"]) if scored else 0.0
    if not all(map(math.isfinite, (x, y, width, height, score))):
        raise ValueError("a number that is not finite")
    runs = read_counts(entry["segmentation"]["counts"])
    if min(runs, default=-1) < 0 or sum(runs) != picture.height * picture.width:
        raise ValueError(f"a mask that does not fill {picture.height} x {picture.width} pixels")
    category = str(entry["category"])
    return Detection(category, (x, y, width, height), runs, visible(f"{category} {score:.2f}" if scored else category))


def detection_parts(pictures: Sequence[Picture]) -> Iterator[dict[str, Any]]:
    """What the page shows of each image: the truth, then what each method found."""
    for at, picture in enumerate(pictures):
        count, unit = len(picture.truth), max(picture.height, picture.width) / 250
        truth = "1 object" if count == 1 else f"{count} objects" if count else "no objects"
        listed = [("Truth", truth, picture.truth)]
        for title, found in picture.predictions.items():
            shown = picture.shown(title)
            note = f"the best {len(shown)} of {len(found)} recorded" if shown else "nothing found"
            listed.append((title, note, shown))
        # Categories of the truth first; colours come round again after eight.
        categories = dict.fromkeys(found.category for _, _, objects in listed for found in objects)
        colours = dict(zip(categories, cycle(COLOURS), strict=False))
        panels = [
            {
                "title": title, "note": note, "words": ", ".join(found.label for found in objects) or note,
                # Large objects first: small ones stay on top, and can be pointed at.
                "shapes": [
                    _shape(found, picture, unit) | {"colour": colours[found.category]}
                    for found in sorted(objects, key=lambda found: -found.area)
                ],
            }
            for title, note, objects in listed
        ]  # fmt: skip
        yield {
            "kind": "detections", "id": f"picture-{at}", "title": picture.title, "picture": picture, "panels": panels,
            "unit": unit, "colours": [(visible(category), colour) for category, colour in colours.items()],
        }  # fmt: skip


def _shape(found: Detection, picture: Picture, unit: float) -> dict[str, Any]:
    x, y, width, height = found.box
    return {
        "label": found.label, "mask": mask_path(found.runs, picture.height, picture.width),
        "x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height),
        "labelled": found.area >= SMALLEST_LABELLED * picture.height * picture.width,
        # Inside of the picture, also where a box begins outside.
        "text_x": max(x, 0.0) + 2 * unit, "text_y": min(max(y, 0.0) + 11 * unit, picture.height - 2 * unit),
    }  # fmt: skip


def mask_path(runs: Sequence[int], height: int, width: int) -> str:
    """An SVG path of rectangles that cover a mask, given by its runs; of a wide image every second column or fewer.

    Example:
        >>> mask_path([1, 2, 2, 2, 1], height=4, width=2)
        'M0 1h2v2h-2z'
    """
    step = -(-width // FINEST)
    mask = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height)
    parts, left = [], 0
    for column, alike in groupby(mask[step // 2 :: step], key=np.ndarray.tobytes):
        right = min(left + step * len(list(alike)), width)
        # Where the object begins and ends, from top to bottom.
        edges = np.flatnonzero(np.diff(np.frombuffer(column, bool), prepend=False, append=False)).tolist()
        wide, pairs = right - left, zip(edges[::2], edges[1::2], strict=True)
        parts += [f"M{left} {top}h{wide}v{end - top}h-{wide}z" for top, end in pairs]
        left = right
    return "".join(parts)


def detections_markdown(pictures: Sequence[Picture]) -> Iterator[str]:
    """Lines of a section, in words."""
    if not pictures:
        return
    yield from ("## Detections", "", "What the models find in the first evaluation images, beside the truth.", "")
    for picture in pictures:
        yield from (f"### {plain_markdown(picture.title)}", "")
        for title in picture.predictions:
            shown = ", ".join(found.label for found in picture.shown(title)) or "nothing found"
            yield f"- {plain_markdown(f'{title}: {shown}')}"
        truth = ", ".join(found.label for found in picture.truth) or "no objects"
        yield from (f"- truth: {plain_markdown(truth)}", "")

"""What models made after training, as it stands in run records: text of language models, objects found in images.

Both can hold anything. Text is shown as text, and an image is checked to be a JPEG but never decoded here.
"""

from __future__ import annotations

import base64
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.lab.records import Comparison, Run
from wellcond.lab.report.table import plain_markdown, visible

LINES = textwrap.TextWrapper(width=100, tabsize=4, drop_whitespace=False, replace_whitespace=False)
MOST_PIXELS = 10**8
FEWEST_SHOWN = 5
"""Predictions of an image that are shown at least, the best first; more only if it has more objects."""
COLOURS = ("#ff4d4d", "#35c3ff", "#ffd21f", "#5fe36b", "#ff7be5", "#ff9a2e", "#b59bff", "#2ff0d0")
"""Bright, as they must be seen on photographs."""
Entry = dict[str, Any]


def _shown_runs(comparison: Comparison, *, images: bool) -> Iterator[Run]:
    """For each method, the finished run with the lowest seed that has samples of a kind."""
    for method in comparison.methods:
        for run in comparison.finished(method).values():
            stored = run.record.get("samples")
            rows = stored if isinstance(stored, list) else []
            if stored and images == any(isinstance(row, dict) and "image_id" in row for row in rows):
                yield run
                break


def find_samples(comparison: Comparison) -> dict[str, list[dict[str, str]]]:
    """Texts by prompt, of one run of each method: title, what was given, what the model wrote, or why there is none."""
    found: dict[str, list[dict[str, str]]] = {}
    for run in _shown_runs(comparison, images=False):
        try:
            for row in run.record["samples"]:
                prompt, problem = row["prompt"], row.get("problem", "")
                text = "" if problem else row["text"]
                if not all(isinstance(said, str) for said in (prompt, text, problem)):
                    raise TypeError
                given = prompt if text.startswith(prompt) else ""  # a tokeniser may not give it back unchanged
                said = {"given": given, "continued": text.removeprefix(given), "problem": problem}
                found.setdefault(prompt, []).append({"title": f"{run.method}, seed {run.seed}", **said})
        except (TypeError, KeyError, AttributeError) as error:
            expected = "expected 'samples' to be a list of {prompt, text}"
            raise RunRecordError(run.file, expected, "Repeat the run.") from error
    return found


def samples_markdown(samples: dict[str, list[dict[str, str]]]) -> Iterator[str]:
    """Lines of a section; texts are blocks of code, in which nothing is markup."""
    if samples:
        yield from ("## Samples", "", "What the models write after training, from the same random numbers.", "")
    for prompt, of_prompt in samples.items():
        shown = f"With a beginning: {plain_markdown(visible(prompt))}" if prompt else "Without a beginning"
        yield from (f"### {shown}", "")
        for sample in of_prompt:
            title, text = plain_markdown(sample["title"]), sample["given"] + sample["continued"]
            if sample["problem"]:
                yield from (f"{title}: nothing was written ({plain_markdown(visible(sample['problem']))})", "")
                continue
            wrapped = [LINES.wrap(line) or [""] for line in visible(text).split("\n")]
            # Fences longer than any in the text.
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
            yield from (f"{title}:", "", f"{fence}text", *(part for parts in wrapped for part in parts), fence, "")


def find_pictures(comparison: Comparison) -> list[Entry]:
    """Images in the order of the records: title, size, JPEG, and the objects of the truth and of each run shown."""
    pictures: dict[int, Entry] = {}
    for run in _shown_runs(comparison, images=True):
        for at, row in enumerate(run.record["samples"]):
            try:
                read = _read_picture(row)
                found = [_read_object(entry, scored=True) for entry in row["predictions"]]
                picture = pictures.setdefault(int(row["image_id"]), read)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said = f"expected 'samples' to be images with truth and predictions; entry {at} is not ({error!r})"
                raise RunRecordError(run.file, said, "Repeat the run.") from error
            most = max(len(picture["panels"]["Truth"]), FEWEST_SHOWN)
            picture["panels"][f"{run.method}, seed {run.seed}"] = found[:most]
    for picture in pictures.values():  # categories of the truth first; colours come round again after eight
        objects = [found for panel in picture["panels"].values() for found in panel]
        picture["colours"] = dict(zip(dict.fromkeys(o["category"] for o in objects), cycle(COLOURS), strict=False))
    return list(pictures.values())


def _read_picture(row: Entry) -> Entry:
    height, width = row["size"]
    if not (type(height) is int and type(width) is int and 0 < height * width <= MOST_PIXELS and height > 0):
        raise ValueError(f"size {row['size']!r}")
    jpeg = base64.b64decode(row["jpeg"], validate=True)
    if not (jpeg.startswith(b"\xff\xd8\xff") and jpeg.endswith(b"\xff\xd9")):
        raise ValueError("the image is no JPEG, or not all of one")
    return {
        "title": f"Image {int(row['image_id'])}: {visible(str(row['file_name']))}",
        "height": height,
        "width": width,
        "jpeg": base64.b64encode(jpeg).decode(),
        "unit": max(height, width) / 400,
        "panels": {"Truth": [_read_object(entry, scored=False) for entry in row["truth"]]},
    }


def _read_object(entry: Entry, *, scored: bool) -> Entry:
    """An object, in the truth or found by a model: its category, its box (x, y, width, height) and its label."""
    box, score = [float(number) for number in entry["bbox"]], float(entry["score"]) if scored else 0.0
    if len(box) != 4 or not all(map(math.isfinite, (*box, score))):
        raise ValueError(f"a box that cannot be: {entry['bbox']!r}")
    category = visible(str(entry["category"]))
    return {"category": category, "box": box, "label": f"{category} {score:.2f}" if scored else category}


def detections_markdown(pictures: Sequence[Entry]) -> Iterator[str]:
    """Lines of a section, in words."""
    if pictures:
        yield from ("## Detections", "", "What the models find in the first evaluation images, beside the truth.", "")
    for picture in pictures:
        yield from (f"### {plain_markdown(picture['title'])}", "")
        truth, *found = picture["panels"].items()
        for title, objects in found:
            shown = ", ".join(one["label"] for one in objects) or "nothing found"
            yield f"- {plain_markdown(f'{title}: {shown}')}"
        yield from (f"- truth: {plain_markdown(', '.join(one['label'] for one in truth[1]) or 'no objects')}", "")

"""The report on detectors: boxes over the image, beside the truth, whatever the records hold."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from lab.report.fake_runs import FakeMethod, only_comparison, page_of, write_with_samples
from lab.tasks.detection.coco_sets import compressed
from wellcond.errors import RunRecordError
from wellcond.lab.report.page import build_report
from wellcond.lab.report.samples import find_pictures, find_samples

pytest.importorskip("matplotlib")
BOX_AP = {"name": "box_AP", "higher_is_better": True, "percent": True}
HEIGHT, WIDTH = 30, 40
EVIL = "</title></svg><script>document.title='taken'</script>\"onload=x \x00\u202e$x^"


def jpeg(size=(WIDTH, HEIGHT), colour=(40, 90, 160)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def found(category, x, y, width, height, score=None):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[y : y + height, x : x + width] = 1
    row = {"bbox": [x, y, width, height], "category": category, "segmentation": compressed(mask)}
    return row if score is None else {**row, "score": score}


def sample(image_id, predictions, *, truth=None, name=None):
    truth = [found("cat", 2, 3, 20, 20), found("dog", 30, 1, 3, 3)] if truth is None else truth
    return {
        "image_id": image_id, "file_name": name or f"{image_id:06}.jpg", "size": [HEIGHT, WIDTH], "jpeg": jpeg(),
        "truth": truth, "predictions": predictions,
    }  # fmt: skip


def write_runs(folder, change=None):
    """Runs with two images each; `change` edits a record."""
    methods = [FakeMethod("default", {0: 0.1, 1: 0.2}), FakeMethod("balanced", {1: 0.15, 2: 0.12})]

    def samples_of(record):
        own = f"{record['method']} {record['seed']}"
        boxes = [found(own, 4, 5, 15, 15, 0.9), found("dog", 20, 2, 10, 20, 0.25)]
        return [sample(7, boxes), sample(9, [], truth=[])]

    return write_with_samples(folder, methods, BOX_AP, samples_of, change)


class Panels(HTMLParser):
    """What each drawing of the page holds, and every element."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.panels, self.inside = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = tag
        given = dict(attributes)
        if tag == "svg" and given.get("role") == "img" and "aria-label" in given:
            self.panels.append({"label": given["aria-label"], "titles": [], "texts": [], "images": 0, "boxes": []})
        elif self.panels and tag in ("image", "use"):
            self.panels[-1]["images"] += 1
        elif self.panels and tag == "rect":
            self.panels[-1]["boxes"].append([float(given[key]) for key in ("x", "y", "width", "height")])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.inside = ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.panels and self.inside in ("title", "text"):
            self.panels[-1][self.inside + "s"].append(data)


def test_truth_stands_beside_what_each_method_found(tmp_path):
    comparison = only_comparison(write_runs(tmp_path))
    page = page_of(comparison)
    assert '<a href="#detections">Detections</a>\n<a href="#runs">Runs</a>' in page and 'href="#samples"' not in page
    panels = Panels(page).panels
    assert [panel["label"] for panel in panels] == [
        "Truth: cat, dog",
        "default, seed 0: default 0 0.90, dog 0.25",
        "balanced, seed 1: balanced 1 0.90, dog 0.25",
        "Truth: nothing",
        "default, seed 0: nothing",
        "balanced, seed 1: nothing",
    ]
    assert all(panel["images"] == 1 for panel in panels)
    assert panels[0]["titles"] == panels[0]["texts"] == ["cat", "dog"]
    assert panels[0]["boxes"] == [[2, 3, 20, 20], [30, 1, 3, 3]]
    assert page.count("data:image/jpeg;base64,") == 2, "an image is on the page once"
    section = page[page.index('<section id="detections"') : page.index('<section id="runs"')]
    assert not re.search(r'(?:src|href)="(?!#|data:image/jpeg;base64,)', section), "nothing is loaded"
    assert find_samples(comparison) == {}


def test_the_markdown_says_what_was_found(tmp_path):
    (page,) = build_report(write_runs(tmp_path), pictures=False)
    text = page.read_text("utf-8")
    assert "### Image 7: 000007.jpg\n" in text
    assert "- default, seed 0: default 0 0.90, dog 0.25\n" in text and "- truth: cat, dog\n" in text


def test_as_many_predictions_as_objects_are_drawn_but_five_at_least(tmp_path):
    many = [found(f"thing {at}", 1, 1, 20, 20, 0.9 - 0.01 * at) for at in range(9)]
    truth = [found("cat", at, 2, 5, 5) for at in range(7)]
    folder = write_runs(tmp_path, lambda r: r.update(samples=[sample(1, many), sample(2, many, truth=truth)]))
    panels = Panels(page_of(only_comparison(folder))).panels
    assert [len(panel["titles"]) for panel in panels] == [2, 5, 5, 7, 7, 7]


def test_names_that_look_like_markup_stay_text(tmp_path):
    rows = [
        sample(7, [found(EVIL, 4, 5, 15, 15, 0.9), found("dog", 20, 2, 10, 20, 0.25)], name=EVIL),
        sample(9, [], truth=[]),
    ]
    folder = write_runs(tmp_path / "evil", lambda r: r.update(samples=rows))
    (written,) = build_report(folder, pictures=False)
    evil = Panels(page_of(only_comparison(folder)))
    assert evil.tags.count("script") == 1 and not {"img", "iframe", "base"} & set(evil.tags)
    assert evil.panels[1]["titles"][0].endswith('"onload=x <U+0000><U+202E>$x^ 0.90')
    assert "<script" not in written.read_text("utf-8")


@pytest.mark.parametrize("status", ["diverged"])
def test_a_run_that_did_not_finish_shows_nothing(tmp_path, status):
    def change(record):
        if record["seed"] == 1:
            record["status"] = status

    pictures = find_pictures(only_comparison(write_runs(tmp_path, change)))
    assert list(pictures[0]["panels"]) == ["Truth", "default, seed 0", "balanced, seed 2"]


def spoiled(**changes):
    return [sample(7, []), {**sample(9, []), **changes}]


def without(key):
    return [{name: value for name, value in sample(7, []).items() if name != key}, sample(9, [])]


BROKEN = {
    **{f"no {key}": (without(key), key) for key in ("file_name", "size", "jpeg", "truth", "predictions")},
    "no image_id": (without("image_id"), "entry 0 is not"),
    "negative size": (spoiled(size=[-30, 40]), "size [-30, 40]"),
    "huge": (spoiled(size=[10**6, 10**6]), "size"),
    "not base 64": (spoiled(jpeg="javascript:alert(1)"), "base64"),
    "no score": (spoiled(predictions=[found("cat", 1, 1, 2, 2)]), "'score'"),
    "not finite": (spoiled(truth=[{**found("cat", 1, 1, 2, 2), "bbox": [0, 0, "inf", 1]}]), "a box that cannot be"),
    "number": ([sample(7, []), 3], "entry 1 is not"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_records_of_another_form_are_named(tmp_path, case):
    samples, message = BROKEN[case]
    folder = write_runs(tmp_path, lambda r: r.update(samples=samples))
    with pytest.raises(RunRecordError, match="expected 'samples' to be images") as caught:
        build_report(folder, pictures=False)
    assert message in str(caught.value) and "run.json" in str(caught.value)
    assert not list(folder.rglob("report.*"))


def test_a_broken_jpeg_is_named_before_anything_is_written(tmp_path):
    cut = base64.b64encode(base64.b64decode(jpeg())[:100]).decode()
    folder = write_runs(tmp_path, lambda r: r.update(samples=[{**sample(7, []), "jpeg": cut}]))
    with pytest.raises(RunRecordError, match="no JPEG, or not all of one"):
        build_report(folder)
    assert not list(folder.rglob("report.*"))

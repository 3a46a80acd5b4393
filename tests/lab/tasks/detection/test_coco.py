"""The source `coco`: what COCO's files may hold, and what is wrong with those that cannot be used."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from lab.tasks.detection.coco_sets import (
    CATEGORIES,
    MINI,
    SIZES,
    annotation,
    coco,
    compressed,
    disc,
    load_set,
    masks_of,
    rectangle,
    runs,
    usual_annotations,
    write_set,
)
from wellcond.errors import DataError
from wellcond.lab.data import fingerprint
from wellcond.lab.tasks.detection import samples as masks
from wellcond.lab.tasks.detection.coco import read_counts
from wellcond.lab.tasks.detection.samples import boxes_of_masks

needs_mini = pytest.mark.skipif(
    not MINI.is_dir(), reason="coco2017-mini is not beside the repository or in WELLCOND_DATA"
)


pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools' decode


def by_id(split):
    return {example["image_id"]: example for example in (split[index] for index in range(len(split)))}


def annotated_masks(content):
    """Masks by annotation id, as pycocotools reads them."""
    api = COCO()
    api.dataset = copy.deepcopy(content)
    api.createIndex()
    return {number: api.annToMask(row) for number, row in api.anns.items()}


def test_examples_have_images_boxes_labels_and_masks(tmp_path):
    bundle = load_set(write_set(tmp_path))
    assert bundle.kind == "detection" and bundle.class_names == ("bicycle", "cat", "hair drier")
    assert bundle.train.category_ids == (2, 7, 90) and bundle.train.labels is None
    example = by_id(bundle.evaluation)[11]
    assert example["image"].mode == "RGB" and example["image"].size == (60, 40) and example["size"] == (40, 60)
    boxes, labels = example["boxes"], example["labels"]
    assert boxes.tolist() == [[5, 6, 25, 21], [32, 10, 48, 26]] and boxes.dtype == torch.float32
    assert labels.tolist() == [2, 3] and labels.dtype == torch.int64
    assert masks_of(example, 40, 60).dtype == torch.uint8


def test_masks_are_those_of_pycocotools(tmp_path):
    bundle = load_set(write_set(tmp_path))
    expected = annotated_masks(coco())
    kept = {21, 22, 23, 25}  # without the crowd
    for split in (bundle.train, bundle.evaluation):
        seen = 0
        for number, example in by_id(split).items():
            rows = [row for row in usual_annotations() if row["image_id"] == number and row["id"] in kept]
            found = masks_of(example, *example["size"])
            assert found.shape == (len(rows), *SIZES[number])
            for mask, row in zip(found, rows, strict=True):
                assert np.array_equal(mask.numpy(), expected[row["id"]]) and mask.any()
                seen += 1
        assert seen == len(kept)


def test_training_leaves_out_what_cannot_be_learnt_from_and_says_so(tmp_path):
    square = [rectangle(4, 4, 9, 9)]
    train = coco(
        [
            *usual_annotations(),
            annotation(1, 11, 7, (4, 4, 9, 0), square),
            annotation(2, 11, 7, (4, 4, -3, 9), square),
            annotation(3, 11, 7, (4, 4, 9, 0.5), square),
            annotation(4, 11, 7, (70, 4, 9, 9), square),
            annotation(5, 11, 7, (4, 4, 9, 9), [[4, 4, 9, 9]]),
            annotation(6, 11, 7, (4, 4, 9, 9), []),
            annotation(7, 11, 7, (4, 4, 9, 9), [[4, 4, 9, 9], *square]),
        ]
    )
    bundle = load_set(write_set(tmp_path, train=train))
    found = by_id(bundle.train)
    assert set(found) == {11, 5, 42}
    assert found[11]["boxes"].tolist()[2:] == [[4, 4, 13, 13]]
    assert found[11]["segmentations"][2] == square
    assert len(found[5]["labels"]) == 1
    assert found[42]["boxes"].tolist() == [[30, 20, 48, 36]], "cut off at the border of the image"
    assert bundle.description.endswith(
        "3 training and 4 evaluation examples, 3 classes; left out of training: 1 crowd regions, 4 degenerate boxes, "
        "1 images without objects, 2 objects without a mask"
    )
    assert str(tmp_path) not in bundle.description
    assert len(bundle.train.ground_truth["annotations"]) == len(train["annotations"]), "for evaluation all are there"


def test_evaluation_keeps_crowds_and_images_without_objects(tmp_path):
    split = load_set(write_set(tmp_path)).evaluation
    found = by_id(split)
    assert len(found[300]["labels"]) == 0 and masks_of(found[300], 32, 32).shape == (0, 32, 32)
    rows = {row["id"]: row for row in split.ground_truth["annotations"]}
    assert rows[24]["iscrowd"] == 1 and rows[25]["bbox"] == [30, 20, 30, 30], "as annotated"


def test_ground_truth_is_that_of_the_split(tmp_path):
    root = write_set(tmp_path)
    whole = load_set(root).evaluation
    assert {key: whole.ground_truth[key] for key in ("images", "annotations")} == {
        key: coco()[key] for key in ("images", "annotations")
    }
    assert [category["id"] for category in whole.ground_truth["categories"]] == [2, 7, 90]
    part = load_set(root, limit_evaluation=2, limit_train=1)
    assert len(part.train) == 1 and len(part.evaluation) == 2
    truth = part.evaluation.ground_truth
    chosen = {image["id"] for image in truth["images"]}
    assert len(chosen) == 2 and {row["image_id"] for row in truth["annotations"]} <= chosen
    truth["annotations"].clear()
    assert part.evaluation.ground_truth["annotations"], "a copy"


def test_splits_are_picklable_and_fingerprinted_with_their_annotations(tmp_path):
    root = write_set(tmp_path)
    bundle = load_set(root)
    assert pickle.loads(pickle.dumps(bundle.train))[0]["image_id"] == bundle.train[0]["image_id"]
    before = fingerprint(bundle)
    assert fingerprint(load_set(root)) == before
    moved = coco()
    moved["annotations"][0]["bbox"][0] += 1
    after = fingerprint(load_set(write_set(tmp_path, train=moved)))
    assert before["train"] != after["train"] and before["evaluation"] == after["evaluation"]


# What cannot be used


def failure(root, **options):
    with pytest.raises(DataError) as caught:
        load_set(root, **options)
    return str(caught.value)


def rows_without(part, key):
    def spoil(content):
        content[part][1].pop(key)

    return spoil


def first(**changes):
    def spoil(content):
        content["annotations"][0].update(changes)

    return spoil


def twice(part):
    def spoil(content):
        content[part].append(dict(content[part][0]))

    return spoil


def image(**changes):
    def spoil(content):
        content["images"][0].update(changes)

    return spoil


SPOILED = {
"unknown image": (first(image_id=12), "annotations, entry 0", "image_id 12"),
"no bbox": (rows_without("annotations", "bbox"), "annotations, entry 1", "KeyError('bbox')"),
"no width": (rows_without("images", "width"), "images, entry 1", "KeyError('width')"),
"annotation twice": (twice("annotations"), "annotations, entry 5", "id 21"),
"box of three": (first(bbox=[1, 2, 3]), "annotations, entry 0", "bbox [1, 2, 3]"),
"box of text": (first(bbox=[1, 2, 3, "4"]), "annotations, entry 0", "TypeError"),
"odd polygon": (first(segmentation=[[1, 2, 3, 4, 5, 6, 7]]), "annotations, entry 0", "segmentation [[1, 2,"),
"runs of another size": (
        first(segmentation=runs(disc(60, 40, (18, 20), 8))), "annotations, entry 0", "segmentation {"),
"runs too short": (first(segmentation={"size": [40, 60], "counts": [9, 4]}), "entry 0", "'counts': [9, 4]"),
"cut text": (first(segmentation={"size": [40, 60], "counts": "P"}), "annotations, entry 0", "cut short"),
"other text": (first(segmentation={"size": [40, 60], "counts": "~"}), "entry 0", "character number 126"),
"file outside": (image(file_name="../secret.png"), "images, entry 0", "file_name '../secret.png'"),
"no pixels": (image(height=0), "images, entry 0", "height 0"),
"no images": (lambda content: content.update(images=[], annotations=[]), "images", "no entries"),
"no list": (lambda content: content.update(images=3), "images", "TypeError"),
}  # fmt: skip


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_is_named(tmp_path, case, split):
    spoil, where, found = SPOILED[case]
    write_set(tmp_path)
    file = tmp_path / f"annotations/instances_{split}2017.json"
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    message = failure(tmp_path)
    assert str(file) in message and where in message and found in message


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b'{"images": []}', b"[" * 100_000])
def test_a_file_that_is_no_coco_file(tmp_path, text):
    write_set(tmp_path)
    file = tmp_path / "annotations/instances_val2017.json"
    file.write_bytes(text)
    assert str(file) in failure(tmp_path)


@pytest.mark.parametrize("polygons", [[], [[1, 2]], [[1, 2, 3, 4]], [rectangle(5, 6, 8, 15), [1, 2, 3, 4]]])
def test_evaluation_refuses_masks_that_pycocotools_cannot_read(tmp_path, polygons):
    content = coco([*usual_annotations(), annotation(9, 11, 7, (1, 1, 5, 5), polygons)])
    message = failure(write_set(tmp_path, evaluation=content))
    assert "instances_val2017.json" in message and "annotations, entry 5 (the first is 0): segmentation" in message


def test_missing_images_are_named_before_training(tmp_path):
    write_set(tmp_path)
    (tmp_path / "val2017/000005.png").unlink()
    message = failure(tmp_path)
    assert "val2017/000005.png: no such file" in message


def test_images_that_change_after_loading_are_named(tmp_path):
    split = load_set(write_set(tmp_path)).evaluation
    Image.new("RGB", (7, 8)).save(tmp_path / "val2017/000011.png")
    with pytest.raises(DataError, match="(?s)60 x 40.*7 x 8"):
        split[0]
    (tmp_path / "val2017/000011.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="000011.png"):
        split[0]
    (tmp_path / "val2017/000011.png").unlink()
    with pytest.raises(DataError, match="000011.png"):
        split[0]


@pytest.mark.parametrize("name", ["train2017", "val2017", "annotations/instances_val2017.json"])
def test_missing_folders_and_files(tmp_path, name):
    root = write_set(tmp_path / "set")
    (root / name).rename(tmp_path / "elsewhere")
    assert f"{root / name}: no such f" in failure(root)
    assert "nowhere: no such file or folder" in failure(tmp_path / "nowhere")


def test_categories_must_agree(tmp_path):
    categories = [*CATEGORIES[:2], {"id": 90, "name": "toothbrush"}]
    message = failure(write_set(tmp_path, evaluation=coco(categories=categories)))
    assert "(90, 'hair drier'), (90, 'toothbrush')" in message


# Masks


@pytest.mark.parametrize("seed", range(20))
def test_run_lengths_survive_both_ways(seed):
    draw = np.random.default_rng(seed)
    height, width = draw.integers(1, 40, 2)
    mask = (draw.random((height, width)) < draw.random()).astype(np.uint8)
    expected = torch.from_numpy(mask)
    for rle in (runs(mask), compressed(mask), masks.to_rle(expected, height, width)):
        assert torch.equal(masks.to_mask(rle, height, width), expected)
    assert read_counts(compressed(mask)["counts"]) == runs(mask)["counts"]
    found = boxes_of_masks(expected[None])[0].tolist()
    rows, columns = mask.nonzero()
    assert found == ([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if mask.any() else [0, 0, 0, 0])


def test_no_masks_have_no_boxes():
    assert boxes_of_masks(torch.zeros(0, 4, 5, dtype=torch.uint8)).shape == (0, 4)


# The real thing


@needs_mini
def test_the_mini_set(monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", str(MINI.parent))
    bundle = load_set("coco2017-mini")
    assert (len(bundle.train), len(bundle.evaluation), len(bundle.class_names)) == (188, 164, 80)
    assert bundle.class_names[0] == "person" and bundle.train.category_ids[-1] == 90
    assert "left out of training: 4 degenerate boxes, 2 images without objects" in bundle.description
    expected = annotated_masks(json.loads((MINI / "annotations/instances_val2017.json").read_text()))
    for index in range(0, len(bundle.evaluation), 8):
        example = bundle.evaluation[index]
        found = masks_of(example, *example["size"])
        numbers = [row["id"] for row in bundle.evaluation.annotations[index] if not row["iscrowd"]]
        assert len(numbers) == len(found) > 0
        assert all(np.array_equal(mask.numpy(), expected[n]) for mask, n in zip(found, numbers, strict=True))

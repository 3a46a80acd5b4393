"""Numbers of the evaluation: those of pycocotools, run by hand on the same detections."""

import copy
import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lab.tasks.detection.coco_sets import annotation, coco, load_set, masks_of, rectangle, write_set
from wellcond.lab.tasks.detection import evaluate, to_results

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def by_hand(truth_file, results, kind, folder):
    """As COCO's documents say: a file of results of one kind, read, evaluated, accumulated, summarised."""
    key = {"bbox": "bbox", "segm": "segmentation"}[kind]
    rows = [{name: row[name] for name in ("image_id", "category_id", key, "score")} for row in results]
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(rows))
    truth = COCO(str(truth_file))
    evaluation = COCOeval(truth, truth.loadRes(str(file)), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    prefix = {"bbox": "box", "segm": "mask"}[kind]
    return {f"{prefix}_{name}": value for name, value in zip(NAMES, evaluation.stats.tolist(), strict=False)}


def perfect(split):
    """Detections that are the truth."""
    found = []
    for index in range(len(split)):
        objects, image = split[index], split.images[index]
        masks = masks_of(objects, image["height"], image["width"])[:, None]
        # As annotated, also where a box leaves its image.
        boxes = torch.tensor([row["bbox"] for row in split.annotations[index] if not row["iscrowd"]]).reshape(-1, 4)
        boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1).float()
        found.append({"boxes": boxes, "labels": objects["labels"], "scores": torch.ones(len(masks)), "masks": masks})
    return found


def spoil(detections, seed, num_classes):
    """Some moved, some missing, some of another class, some twice; scores at random."""
    draw = torch.Generator().manual_seed(seed)
    spoiled = []
    for found in detections:
        rows = torch.arange(len(found["labels"])).repeat(2)
        rows = rows[torch.rand(len(rows), generator=draw) < 0.7]
        if not len(rows):
            spoiled.append({name: values[:0] for name, values in found.items()})
            continue
        shift = int(torch.randint(0, 4, (), generator=draw))
        boxes = found["boxes"][rows] + shift * torch.rand(len(rows), 4, generator=draw)
        labels = found["labels"][rows].clone()
        wrong = torch.rand(len(rows), generator=draw) < 0.2
        labels[wrong] = torch.randint(1, num_classes + 1, (int(wrong.sum()),), generator=draw)
        soft = found["masks"][rows].roll(shift, 3) * 0.9
        scores = torch.rand(len(rows), generator=draw)
        spoiled.append({"boxes": boxes, "labels": labels, "scores": scores, "masks": soft})
    return spoiled


def results_of(split, detections):
    pairs = zip(detections, split.images, strict=True)
    return [row for found, image in pairs for row in to_results(found, image["id"], split.category_ids)]


def compare(split, file, seed, folder):
    results = results_of(split, spoil(perfect(split), seed, len(split.category_ids)))
    before = copy.deepcopy(results)
    expected = {**by_hand(file, results, "bbox", folder), **by_hand(file, results, "segm", folder)}
    assert evaluate(split.ground_truth, results) == {name: value for name, value in expected.items() if value != -1}
    assert results == before, "nothing is written into the results"
    assert 0.05 < expected["box_AP"] < 1
    return expected


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_those_of_pycocotools(tmp_path, seed):
    split = load_set(write_set(tmp_path)).evaluation
    compare(split, tmp_path / "annotations/instances_val2017.json", seed, tmp_path)


def test_the_truth_scores_one_and_nothing_is_printed(tmp_path, capsys):
    split = load_set(write_set(tmp_path)).evaluation
    values = evaluate(split.ground_truth, results_of(split, perfect(split)))
    small = ("AP", "AP50", "AP75", "APs")
    assert set(values) == {f"{kind}_{name}" for kind in ("box", "mask") for name in small}, "no object is larger"
    assert values == pytest.approx(dict.fromkeys(values, 1.0))
    assert capsys.readouterr().out == ""


def test_an_annotation_with_id_0_counts(tmp_path):
    """pycocotools itself takes a match with it for none."""
    rows = [annotation(0, 11, 7, (5, 6, 20, 15), [rectangle(5, 6, 20, 15)])]
    split = load_set(write_set(tmp_path, evaluation=coco(rows))).evaluation
    results = results_of(split, perfect(split))
    assert evaluate(split.ground_truth, results)["box_AP"] == pytest.approx(1.0)
    alone = by_hand(tmp_path / "annotations/instances_val2017.json", results, "bbox", tmp_path)
    assert alone["box_AP"] == 0, "pycocotools has mended it; numbering from 1 is no longer needed"


def test_crowd_regions_are_ignored(tmp_path):
    split = load_set(write_set(tmp_path)).evaluation
    results = results_of(split, perfect(split))
    inside = {**results[2], "bbox": [2.0, 35.0, 9.0, 9.0], "score": 2.0}
    assert (inside["image_id"], inside["category_id"]) == (5, 2)
    elsewhere = {**inside, "bbox": [2.0, 2.0, 9.0, 9.0]}
    assert evaluate(split.ground_truth, [*results, inside])["box_AP"] == pytest.approx(1.0)
    assert evaluate(split.ground_truth, [*results, elsewhere])["box_AP"] < 0.9


def test_the_size_of_a_mask_decides_for_masks(tmp_path):
    """Not that of its box: a frame of a large box has few pixels."""
    frame = np.ones((200, 200), np.uint8)
    frame[1:-1, 1:-1] = 0
    split = load_set(write_set(tmp_path)).evaluation
    found = {"boxes": torch.tensor([[0.0, 0, 200, 200]]), "labels": torch.tensor([1]), "scores": torch.ones(1)}
    found["masks"] = torch.from_numpy(frame)[None, None]
    results = to_results(found, 1, split.category_ids)
    thin = annotation(1, 1, 2, (0, 0, 200, 200), results[0]["segmentation"]) | {"area": int(frame.sum())}
    truth = {"images": [{"id": 1, "height": 200, "width": 200}], "annotations": [thin]}
    truth["categories"] = split.ground_truth["categories"]
    values = evaluate(truth, results)
    assert values["mask_APs"] == pytest.approx(1.0) and "mask_APl" not in values


def test_results_are_in_the_official_format():
    masks = torch.zeros(2, 1, 4, 6)
    masks[:, 0, 1:3, 2:5] = torch.tensor([0.5, 0.49])[:, None, None]
    found = {
        "boxes": torch.tensor([[2.0, 1.0, 5.0, 3.0], [0.25, 0.5, 1.0, 2.0]]),
        "labels": torch.tensor([2, 1]),
        "scores": torch.tensor([0.1, 0.9]),
        "masks": masks,
    }
    first, second = to_results(found, 17, (5, 90))
    assert first == {
        "image_id": 17, "category_id": 90, "bbox": [2.0, 1.0, 3.0, 2.0], "score": float(torch.tensor(0.1)),
        "segmentation": {"size": [4, 6], "counts": "9220003"},
    }  # fmt: skip
    assert second["bbox"] == [0.25, 0.5, 0.75, 1.5] and second["segmentation"]["counts"] == "h0"
    assert json.loads(json.dumps([first, second])) == [first, second]


@pytest.mark.parametrize("key", ["boxes", "scores"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_no_detections(key, value):
    found = {"boxes": torch.ones(2, 4), "labels": torch.tensor([1, 1]), "scores": torch.tensor([0.5, 0.25])}
    found["masks"] = torch.ones(2, 1, 4, 4)
    found[key][0] = value
    [kept] = to_results(found, 1, [1])
    assert kept["score"] == 0.25

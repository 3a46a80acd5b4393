"""The task `detection`, from annotations to a finished run."""

import base64
import io
import json

import pytest
import torch
import yaml
from PIL import Image
from pycocotools import mask as mask_api

from lab.small import assert_same_run, command, logs, record, run, stop_after
from lab.tasks.detection.coco_sets import annotation, coco, rectangle, write_set
from lab.tasks.detection.small_detector import HEADS, SWIN, XCIT, job, recipe
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.tasks.base import EVALUATION
from wellcond.lab.tasks.detection import evaluate
from wellcond.lab.tasks.detection.samples import targets_of
from wellcond.lab.train.evaluate import score, score_all
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import run_job

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools' decode
DEFAULT = MethodSettings.model_validate("default")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_job(job(root, folder))
    return folder


def prepared(root, **changes):
    chosen = recipe(root, **changes)
    task = prepare_task(chosen, seed=0, base=None)
    return chosen, task, prepare_model(chosen, DEFAULT, task, seed=0, base=None)


def test_sharded_weights_are_refused_before_anything_waits(root, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.Accelerator.is_fsdp2", True)
    with pytest.raises(RecipeError, match="FSDP"):
        run_job(job(root, tmp_path / "run"))


def test_a_batch_holds_the_objects_of_its_images_and_nothing_of_its_padding(root):
    task = prepared(root)[1]
    batch = task.evaluation.fetch([(0, EVALUATION), (1, EVALUATION), (2, EVALUATION)])
    assert batch["image_ids"].tolist() == [11, 5, 300] and batch["positions"].tolist() == [0, 1, 2]
    assert batch["original_sizes"].tolist() == [[40, 60], [50, 30], [32, 32]]
    assert batch["sizes"].tolist() == [[43, 64], [64, 38], [48, 48]]  # shorter side 48, longer at most 64
    assert batch["images"].shape == (3, 3, 64, 64) and batch["masks"].shape == (3, 64, 64)
    assert batch["owners"].tolist() == [0, 0, 1] and batch["labels"].tolist() == [2, 3, 1]  # without the crowd
    assert not batch["images"][1, :, :, 38:].any() and batch["images"][1, :, :, :38].any()
    targets = targets_of(batch)
    assert [len(target["boxes"]) for target in targets] == [2, 1, 0]
    for target in targets:
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = mask.nonzero().unbind(1)
            found = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert (found - box).abs().max() <= 1.5


def test_augmentation_depends_on_seed_number_and_draw_alone(root):
    task = prepared(root)[1]
    together, alone = task.train.fetch([(0, 3), (1, 3)]), task.train.fetch([(1, 3)])
    height, width = alone["sizes"][0].tolist()
    assert torch.equal(together["images"][1, :, :height, :width], alone["images"][0, :, :height, :width])
    assert torch.equal(together["boxes"][together["owners"] == 1], alone["boxes"])
    draws = {tuple(task.train.fetch([(0, draw)])["boxes"].flatten().tolist()) for draw in range(12)}
    assert len(draws) == 4  # two sizes, mirrored or not
    other = prepare_task(recipe(root), seed=1, base=None)
    assert any(
        not torch.equal(task.train.fetch([(0, d)])["boxes"], other.train.fetch([(0, d)])["boxes"]) for d in range(8)
    )


def test_the_loss_of_an_update_is_the_mean_over_its_images(root):
    _, task, model = prepared(root)
    batch = task.train.fetch([(0, EVALUATION), (1, EVALUATION)])
    model.train()
    torch.manual_seed(0)
    total = task.loss(model, batch)
    torch.manual_seed(0)
    losses = model(batch["images"], batch["sizes"], targets_of(batch))
    assert total.item() == pytest.approx(2 * sum(loss.item() for loss in losses.values()))
    assert task.num_terms(batch) == 2


class Alone:
    device, num_processes, process_index = torch.device("cpu"), 1, 0


def test_scores_are_coco_s_and_do_not_depend_on_the_batches(root):
    _, task, model = prepared(root)
    rows = []
    for size in (1, 3, 4):
        chosen = recipe(root, evaluation={"batch_size": size})
        rows.append(score_all(chosen, task, model, Alone()))
    for row in rows[1:]:
        assert row.keys() == rows[0].keys()
        # Sums of losses are rounded in another order.
        assert all(row[name] == pytest.approx(value, rel=1e-6) for name, value in rows[0].items())
    with torch.no_grad():
        records = [
            task.score(model.eval(), task.evaluation.fetch([(index, EVALUATION)]))["records"] for index in range(4)
        ]
    results = [result for [(_, found)] in records for result in found]
    assert len(results) > 20
    expected = evaluate(task.evaluation.split.ground_truth, results)
    assert expected.items() <= rows[0].items() and {"box_AP", "mask_AP75"} <= expected.keys()
    told = {f"train_{kind}_{name}" for kind in ("box", "mask") for name in ("AP", "AP50", "AP75")}
    assert {name for name in rows[0] if name.startswith("train")} == told and "loss_mask" in rows[0]


def test_a_run_records_scores_conditioning_and_detections(finished):
    told = record(finished)
    assert told["status"] == "finished" and told["metric"] == {
        "name": "box_AP", "higher_is_better": True, "percent": True,
    }  # fmt: skip
    assert told["model"]["attentions"] == 4 and told["data"]["train"] == 3 and told["data"]["evaluation"] == 4
    parts = ("objectness", "rpn_box_reg", "classifier", "box_reg", "mask")
    for row in logs(finished)["evaluations"]:
        assert row["loss"] == pytest.approx(sum(row[f"loss_{part}"] for part in parts))
        assert 0 <= row["box_AP"] <= row["box_AP50"] <= 1
    assert {row["layer"] for row in logs(finished)["conditioning"]} == {
        f"backbone.body.blocks.{block}.attn" for block in range(4)
    }
    assert all(row["grad_norm_q"] > 0 for row in logs(finished)["steps"])
    first, second, *_ = told["samples"]
    assert (first["image_id"], first["file_name"], first["size"]) == (11, "000011.png", [40, 60])
    assert Image.open(io.BytesIO(base64.b64decode(first["jpeg"]))).size == (60, 40)
    assert [(row["category"], row["bbox"]) for row in first["truth"]] == [
        ("cat", [5, 6, 20, 15]), ("hair drier", [32, 10, 16, 16]),
    ]  # fmt: skip
    assert mask_api.decode(first["truth"][0]["segmentation"]).sum() == 2 * 8 * 15
    assert [row["category"] for row in second["truth"]] == ["bicycle"]  # without the crowd
    for sample in (first, second):
        scores = [row["score"] for row in sample["predictions"]]
        assert 0 < len(scores) <= 20 and scores == sorted(scores, reverse=True) and min(scores) >= 0.05
        for row in sample["predictions"]:
            assert mask_api.decode(row["segmentation"]).shape == tuple(sample["size"])


def test_an_interrupted_run_goes_on_to_the_same_numbers(root, finished, tmp_path):
    folder = tmp_path / "run"
    assert stop_after(job(root, folder), 3)["status"] == "interrupted"
    run_job(job(root, folder))
    assert len(record(folder)["sessions"]) == 2
    assert_same_run(finished, folder)
    assert record(folder)["samples"] == record(finished)["samples"]


@pytest.mark.slow
def test_a_detector_learns_what_is_in_the_images(tmp_path):
    """A square in each of two images: the loss falls by half and they are found."""
    objects = [
        annotation(1, 11, 7, (5, 5, 20, 20), [rectangle(5, 5, 20, 20)]),
        annotation(2, 42, 2, (20, 10, 22, 22), [rectangle(20, 10, 22, 22)]),
    ]
    content = coco(objects, sizes={11: (48, 48), 42: (48, 48)})
    root = write_set(tmp_path / "coco", content, content)
    changes = {
        "task": {"name": "detection", "images": {"sides": [64]}},
        "training": {"length": {"steps": 60}, "batch_size": 2, "threads": 1, "log_every": 5},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "evaluation": {"every": {"steps": 60}, "batch_size": 2},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    }
    told = run_job(job(root, tmp_path / "run", "default", **changes))
    steps = logs(tmp_path / "run")["steps"]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert told["final"]["box_AP50"] > 0.5 and told["final"]["mask_AP50"] > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augmentation": {"flip": 0.5}}, "augmentation.flip: it moves no boxes; the augmentation of detection is"),
        ({"model": {"name": "timm:xcit_nano_12_p16_224"}}, "detection needs wellcond:mask_rcnn"),
        ({"data": {"source": "digits"}}, "detection needs detection data; digits has image"),
    ],
    ids=str,
)
def test_recipes_that_cannot_be_run(root, tmp_path, changes, message):
    with pytest.raises(RecipeError) as caught:
        run_job(job(root, tmp_path / "run", **changes))
    assert message in str(caught.value)


def test_images_without_objects_cannot_be_scored(root):
    _, task, model = prepared(root)
    chosen = recipe(root)
    only_empty = task.evaluation.split.take(torch.tensor([2]))
    task.evaluation.split, whole = only_empty, task.evaluation.split
    try:
        with pytest.raises(RecipeError, match="evaluation.samples"):
            score(chosen, task, model, Alone(), task.evaluation)
    finally:
        task.evaluation.split = whole


def train_command(root, folder, changes, *, processes=1):
    content = recipe(root, **changes).model_dump(mode="json", exclude={"method", "methods"})
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(content))))
    return command("train", file, "--method", "balanced", "-o", folder, "--cpu", "-q", processes=processes)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [XCIT, SWIN], ids=["xcit", "swin"])
def test_two_processes_score_what_one_does_and_train(root, tmp_path, backbone):
    """Regions are drawn by each process for its own images, so that training agrees only until its first update."""
    changes = {
        "model": {"name": "wellcond:mask_rcnn", "arguments": HEADS | backbone},
        "training": {"length": {"steps": 2}, "batch_size": 2, "threads": 1, "log_every": 1},
        "evaluation": {"every": {"steps": 2}, "batch_size": 2},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    }
    run_job(job(root, tmp_path / "one", "balanced", **changes))
    run(train_command(root, tmp_path / "two", changes, processes=2))
    told = record(tmp_path / "two")
    assert told["status"] == "finished" and told["sessions"][0]["processes"] == 2
    (ours, _), (theirs, last) = (logs(tmp_path / name)["evaluations"] for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert all(theirs[name] == pytest.approx(value, rel=1e-5) for name, value in ours.items() if value is not None)
    assert last["loss"] < theirs["loss"] and len(told["samples"]) == 4

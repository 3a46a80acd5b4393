"""The detection recipes, value by value."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from timm.layers import DropPath

import wellcond as wc
from lab.tasks.detection.coco_sets import MINI
from wellcond.lab.load_recipe import load_recipe, shipped_recipes
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.tasks.base import EVALUATION
from wellcond.lab.tasks.detection.samples import CROP_RANGE, CROP_SHARE, CROP_SIDES
from wellcond.lab.train.prepare import prepare_model, prepare_task


@dataclass(frozen=True)
class Column:
    """One column of the table of R-COCO."""

    backbone: str
    taps: tuple[int, ...]
    channels: tuple[int, ...]
    drop_path: float
    attentions: int
    parameters: float
    """Of the backbone, in millions, as its classifier has them."""
    pretraining: str


PAPER = {
    "coco-xcit-s12": Column("xcit_small_12_p16_224", (3, 5, 7, 11), (384,) * 4, 0.05, 12, 26.25, "xcit-small"),
    "coco-swin-b": Column("swin_base_patch4_window7_224", (0, 1, 2, 3), (128, 256, 512, 1024), 0.3, 24, 87.77, "swin"),
}
METHODS = {"default", "gaussian", "mimetic", "conditioned", "identity(lam=10)", "polar", "balanced"}


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipe(name):
    recipe, _ = load_recipe(name, scale="paper")
    column, images = PAPER[name], recipe.task.images
    assert (recipe.task.name, recipe.data.source) == ("detection", "coco")
    assert (recipe.data.limit_train, recipe.data.limit_evaluation) == (None, None)
    assert (images.flip, images.sides, images.longest) == (0.5, tuple(range(480, 801, 32)), 1333)
    assert images.crop and (CROP_SHARE, CROP_SIDES, CROP_RANGE) == (0.5, (400, 500, 600), (384, 600))
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", 1e-4, (0.9, 0.999))
    assert optimizer.weight_decay == 0.05
    assert (recipe.training.batch_size, recipe.training.length.epochs) == (16, 36)
    assert recipe.training.clip_norm is None and recipe.training.averaging is None
    assert recipe.augmentation.model_dump(exclude_defaults=True) == {}
    assert {method.label for method in recipe.methods} == METHODS and len(recipe.seeds) == 5
    pretraining, _ = load_recipe(column.pretraining, scale="paper")
    assert recipe.model.encoder == f"runs/{column.pretraining}-paper/{{method}}/seed{{seed}}"
    assert {method.slug for method in recipe.methods} <= {method.slug for method in pretraining.methods}
    assert pretraining.model.name == f"timm:{column.backbone}" and len(pretraining.seeds) == 5


@pytest.mark.parametrize("name", PAPER)
def test_paper_schedule(name):
    """Of COCO: 117,266 of the 118,287 training images have something in them."""
    recipe, _ = load_recipe(name, scale="paper")
    per_epoch = 117_266 // 16
    steps = (0, 250, 500, 27 * per_epoch - 1, 27 * per_epoch, 33 * per_epoch)
    factors = [recipe.schedule.point(t, 36 * per_epoch, per_epoch).factor for t in steps]
    assert factors == pytest.approx([1e-3, 0.5005, 1, 1, 0.1, 0.01])


@pytest.mark.parametrize("name", PAPER)
def test_paper_model(name):
    recipe, _ = load_recipe(name, scale="paper")
    column = PAPER[name]
    with torch.device("meta"):
        model = build_model(recipe.model.name, {"num_classes": 80} | recipe.model.arguments)
        classifier = build_model(f"timm:{column.backbone}", {})
    backbone, options = model.backbone, model.options
    assert (options.backbone, backbone.taps) == (column.backbone, column.taps)
    assert tuple(block[0].in_channels for block in backbone.pyramid.inner_blocks) == column.channels
    assert {block[0].out_channels for block in backbone.pyramid.inner_blocks} == {256}
    assert max(part.drop_prob for part in model.modules() if isinstance(part, DropPath)) == pytest.approx(
        column.drop_path
    )
    assert len(wc.find_attention(model)) == column.attentions
    assert sum(parameter.numel() for parameter in classifier.parameters()) / 1e6 == pytest.approx(
        column.parameters, abs=0.01
    )
    heads = model.roi_heads
    assert (heads.box_roi_pool.output_size, heads.mask_roi_pool.output_size) == ((7, 7), (14, 14))
    assert heads.box_predictor.cls_score.out_features == 81
    assert heads.mask_predictor.mask_fcn_logits.out_channels == 81


@pytest.mark.parametrize("name", ["coco", "coco-swin"])
def test_small_recipes_are_the_papers_on_fewer_images(name):
    small, paper = load_recipe(name, scale="small")[0], load_recipe("coco-xcit-s12", scale="paper")[0]
    assert small.data.limit_train == 5000 and small.model.encoder is None and "one GPU" in small.description
    assert small.task == paper.task and small.optimizer == paper.optimizer and small.training == paper.training
    assert small.schedule.milestones == paper.schedule.milestones
    # Warm-up scales with the length.
    assert small.schedule.warmup.steps == round(500 * (5000 // 16) / (117_266 // 16))
    with torch.device("meta"):
        model = build_model(small.model.name, {"num_classes": 80} | small.model.arguments)
    assert model.options.backbone in ("xcit_nano_12_p16_224", "swin_tiny_patch4_window7_224")


def test_every_recipe_of_detection_is_here():
    found = {tuple(shipped.split("/")) for shipped in shipped_recipes() if "/coco" in shipped}
    assert found == {("tiny", "coco"), ("small", "coco"), ("small", "coco-swin"), *(("paper", name) for name in PAPER)}


def test_tiny_recipe():
    recipe, _ = load_recipe("coco", scale="tiny")
    assert [method.label for method in recipe.methods] == ["default", "mimetic", "conditioned", "balanced"]
    assert recipe.seeds == (0, 1) and recipe.data.path == "coco2017-mini" and recipe.training.threads == 1
    assert recipe.task.score_train == recipe.data.limit_train


@pytest.mark.skipif(not MINI.is_dir(), reason="coco2017-mini is not beside the repository or in WELLCOND_DATA")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_tiny_recipe_takes_its_images(monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", os.environ.get("WELLCOND_DATA") or str(Path(MINI).parent))
    recipe, _ = load_recipe("coco", scale="tiny")
    task = prepare_task(recipe, seed=0, base=None)
    assert (len(task.train), len(task.evaluation), task.num_classes) == (64, 64, 80)
    model = prepare_model(recipe, MethodSettings.model_validate("balanced"), task, seed=0, base=None)
    loss = task.loss(model.train(), task.train.fetch([(0, 0), (1, 0)]))
    assert loss.isfinite()
    with torch.no_grad():
        sums = task.score(model.eval(), task.evaluation.fetch([(3, EVALUATION)]))
        [(number, _)] = sums.pop("records")
    assert number == 3 and sums["count"] == 1

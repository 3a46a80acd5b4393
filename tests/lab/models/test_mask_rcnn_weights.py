"""Weights of classification runs as the backbone of a detector."""

import itertools

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import wellcond as wc
from lab.tasks.detection.coco_sets import write_set
from lab.tasks.detection.small_detector import HEADS, SWIN, XCIT, detector, recipe
from wellcond.errors import WeightError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.models.weights import read_state_dict
from wellcond.lab.recipe import load_recipe
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import Job, run_job
from wellcond.lab.train.run_folder import last_checkpoint
from wellcond.lab.train.trained import load_encoder

DEFAULT, BALANCED = (MethodSettings.model_validate(text) for text in ("default", "conditioned+balanced"))
IMAGE = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
PREFIX = "backbone.body."


def classifier(backbone, method=DEFAULT):
    torch.manual_seed(1)
    model = build_model(f"timm:{backbone['backbone']}", {"num_classes": 7} | backbone["backbone_arguments"])
    return method.apply_(model, seed=2).eval()


@torch.no_grad()
def features(model, taps):
    """Outputs of the classifier, or of the backbone of the detector."""
    body = model.backbone.body if hasattr(model, "backbone") else model
    image = torch.nn.functional.interpolate(IMAGE, (224, 224))  # the size that the classifier was made for
    return body.forward_intermediates(image, indices=list(taps), intermediates_only=True)


def assert_same_features(model, reference):
    found, expected = (features(each, model.backbone.taps) for each in (model, reference))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backbone", [XCIT, SWIN], ids=["xcit", "swin"])
@pytest.mark.parametrize("method", [DEFAULT, BALANCED], ids=["plain", "conditioned"])
def test_a_file_of_a_classifier_gives_its_features(backbone, method, tmp_path):
    trained, model = classifier(backbone, method), detector(backbone).eval()
    keys = list(model.state_dict())
    others = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith(PREFIX)}
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    load_encoder(model, tmp_path / "trained.safetensors", DEFAULT)
    assert_same_features(model, trained)
    assert list(model.state_dict()) == keys and wc.conditioning_of(model) is None
    assert all(torch.equal(model.state_dict()[key], value) for key, value in others.items())


def test_raw_weights_stay_raw_under_the_same_correction(tmp_path):
    """Folding and correcting again would be another function."""
    trained, model = classifier(XCIT, BALANCED), detector(XCIT).eval()
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    load_encoder(model, tmp_path / "trained.safetensors", BALANCED)
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(model.state_dict()[PREFIX + name], trained.state_dict()[name])
    wc.condition_(model, "balanced")
    assert_same_features(model, trained)


def test_a_detector_hands_its_backbone_on(tmp_path):
    first, second = detector(SWIN).eval(), detector(SWIN, seed=9, pyramid_width=8).eval()
    wc.condition_(first, "polar")
    save_file(first.state_dict(), tmp_path / "first.safetensors")
    load_encoder(second, tmp_path / "first.safetensors", DEFAULT)
    assert_same_features(second, first)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        (DEFAULT, {"embed_dim": 32}, "(16,) in the file, (32,) in the model"),
        (BALANCED, {"embed_dim": 32}, "(16,) in the file, (32,) in the model"),
        (DEFAULT, {"depth": 5}, "missing blocks.4"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_change_nothing(method, change, message, tmp_path):
    model = detector(XCIT | {"backbone_arguments": XCIT["backbone_arguments"] | change})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(classifier(XCIT, method).state_dict(), tmp_path / "trained.safetensors")
    with pytest.raises(WeightError) as caught:
        load_encoder(model, tmp_path / "trained.safetensors", DEFAULT)
    assert message in str(caught.value) and "trained.safetensors" in str(caught.value)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], value) for key, value in before.items())


def pretrain(folder, method):
    for split, name in itertools.product(("train", "val"), ("cat", "dog")):
        place = folder / "pets" / split / name
        place.mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (32, 32), (40 * number, 0, 90 * (name == "cat"))).save(place / f"{number}.png")
    overrides = (
        "task={name: image_classification, image_size: 32}",
        f"data={{source: image_folder, path: '{folder / 'pets'}'}}",
        f"model={{name: 'timm:{XCIT['backbone']}', arguments: {XCIT['backbone_arguments']}}}",
        "training={length: {steps: 2}, batch_size: 8, threads: 1}",
        "evaluation={every: {steps: 2}, samples: 8, batch_size: 8}",
        "tracking={weights_every: null, jacobian_points: 0}",
    )
    chosen, _ = load_recipe("digits", overrides=overrides)
    return run_job(Job(chosen, method, 0, folder / method.slug / "seed0", cpu=True))


@pytest.mark.parametrize("method", [MethodSettings.model_validate("conditioned"), BALANCED], ids=lambda m: m.slug)
def test_a_run_of_the_same_method_is_carried_over(method, tmp_path):
    assert pretrain(tmp_path / "runs", method)["status"] == "finished"
    place = last_checkpoint(tmp_path / "runs" / method.slug / "seed0/checkpoints")
    trained = read_state_dict(place / "model.safetensors")
    model_settings = {"name": "wellcond:mask_rcnn", "arguments": HEADS | XCIT, "encoder": "runs/{method}/seed{seed}"}
    chosen = recipe(write_set(tmp_path / "coco"), model=model_settings)
    task = prepare_task(chosen, seed=0, base=tmp_path)
    model = prepare_model(chosen, method, task, seed=0, base=tmp_path)
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(model.state_dict()[PREFIX + name], trained[name])  # not initialised once more
    assert (wc.conditioning_of(model) is not None) == (method is BALANCED)
    fixed = recipe(tmp_path / "coco", model=model_settings | {"encoder": f"runs/{method.slug}/seed0"})
    again = prepare_model(fixed, MethodSettings.model_validate("mimetic"), task, seed=0, base=tmp_path)
    assert not torch.equal(again.state_dict()[PREFIX + name], trained[name])  # a fixed encoder is what methods act on

"""Real data, where a mirror is at hand: WELLCOND_DATA, or the folder shared/data beside the repository."""

import os
from pathlib import Path

import pytest
import torch

from lab.data.helpers import load
from wellcond.lab.data import as_tensor_images, fingerprint

ROOT = os.environ.get("WELLCOND_DATA") or str(Path(__file__).parents[3] / "../shared/data")


@pytest.fixture(autouse=True)
def mirror(monkeypatch, isolated):
    pytest.importorskip("datasets")
    monkeypatch.setenv("WELLCOND_DATA", ROOT)


def need(id):
    if not any((Path(root) / id).is_dir() for root in ROOT.split(os.pathsep)):
        pytest.skip(f"no mirror of {id}: set WELLCOND_DATA to a folder that holds it")


def test_cifar10():
    need("uoft-cs/cifar10")
    bundle = load(source="hub", id="uoft-cs/cifar10", limit_train=500)
    assert bundle.kind == "image" and bundle.class_names[:2] == ("airplane", "automobile")
    decoded = as_tensor_images(bundle.train, channels=3)
    assert decoded.shape == (500, 3, 32, 32) and decoded.dtype == torch.uint8
    assert bundle.train.labels.bincount().min() > 20 and 100 < float(decoded.float().mean()) < 140
    assert fingerprint(bundle) == fingerprint(load(source="hub", id="uoft-cs/cifar10", limit_train=500))


@pytest.mark.parametrize(
    ("id", "fields", "classes"),
    [
        ("stanfordnlp/imdb", {}, ("neg", "pos")),
        ("nyu-mll/glue", {"config": "cola"}, ("unacceptable", "acceptable")),
        ("nyu-mll/glue", {"config": "mrpc", "input": ["sentence1", "sentence2"]}, ("not_equivalent", "equivalent")),
        ("roneneldan/TinyStories", {}, None),
        ("Salesforce/wikitext", {"config": "wikitext-2-v1"}, None),
    ],
    ids=["imdb", "cola", "mrpc", "TinyStories", "wikitext"],
)
def test_texts(id, fields, classes):
    need(id)
    bundle = load(source="hub", id=id, **fields)
    assert bundle.kind == "text" and bundle.class_names == classes
    expected = {"text"} | ({"label"} if classes else set()) | ({"text_pair"} if "input" in fields else set())
    assert bundle.train[0].keys() == bundle.evaluation[-1].keys() == expected
    if classes:
        assert bundle.train.labels.unique().tolist() == bundle.evaluation.labels.unique().tolist() == [0, 1]

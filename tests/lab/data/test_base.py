import pickle
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from pydantic import ValidationError

from lab.data.helpers import load
from lab.helpers import make_recipe
from wellcond.errors import MissingExtraError, UnknownChoiceError
from wellcond.lab.data import (
    Data,
    SourceConfig,
    TensorDataset,
    fingerprint,
    load_data,
    register_source,
    resolve_config,
)
from wellcond.lab.data.base import SOURCES
from wellcond.lab.recipe import Recipe


def test_unknown_source_lists_the_registered_ones():
    with pytest.raises(
        UnknownChoiceError, match=r"unknown data source: got 'imagenet', expected one of .*'digits', .*'hub'"
    ):
        resolve_config({"source": "imagenet"})


def test_recipe_field_resolves_the_source_and_round_trips():
    recipe = make_recipe(data={"source": "hub", "id": "uoft-cs/cifar10", "limit_train": 5})
    assert type(recipe.data).__name__ == "HubConfig"
    dumped = recipe.model_dump(mode="json")
    assert dumped["data"]["limit_train"] == 5 and dumped["data"]["label"] == "auto"
    assert Recipe.model_validate(dumped) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_recipe_errors_say_where_the_field_is():
    with pytest.raises(ValidationError) as caught:
        make_recipe(data={"source": "image_folder", "path": "x", "trian": "y"})
    assert [error["loc"] for error in caught.value.errors()] == [("data", "trian")]
    with pytest.raises(ValidationError, match="unknown data source: got 'x', expected one of"):
        make_recipe(data={"source": "x"})


def test_a_source_registered_later_is_part_of_the_union():
    class OnesConfig(SourceConfig):
        source: Literal["ones"] = "ones"
        count: int = 3

    try:

        @register_source(OnesConfig)
        def load_ones(config: OnesConfig, base: Path) -> Data:
            split = TensorDataset("image", torch.ones(config.count, 1, 2, 2), None)
            return Data("ones", "image", split, split, None, "ones")

        bundle = load_data(make_recipe(data={"source": "ones", "count": 4}).data)
        assert len(bundle.train) == 4 and bundle.class_names is None and bundle.train[0].keys() == {"image"}
    finally:
        SOURCES.pop(OnesConfig, None)


def test_splits_work_with_workers_and_pickle():
    split = load(source="digits").evaluation
    assert pickle.loads(pickle.dumps(split))[3]["label"] == split[3]["label"]
    batches = list(torch.utils.data.DataLoader(split, batch_size=250))
    assert [batch["image"].shape for batch in batches] == [(250, 1, 8, 8)] * 2


def test_fingerprint_follows_content_and_ignores_rounding():
    bundle = load(source="digits")
    first = fingerprint(bundle)
    assert first["train"]["size"] == 1297

    def changed(images, labels):
        train = TensorDataset("image", images, labels)
        return fingerprint(Data("digits", "image", train, bundle.evaluation, bundle.class_names, ""))

    train = bundle.train
    assert changed(train.inputs * (1 + 1e-7), train.labels) == first
    assert changed(train.inputs + 0.1, train.labels) != first
    assert changed(train.inputs, train.labels.flip(0)) != first


def test_importing_the_package_imports_no_reader():
    code = (
        "import sys, wellcond.lab.data\n"
        "print([name for name in ('datasets', 'pyarrow', 'sklearn', 'PIL', 'torchvision') if name in sys.modules])\n"
        "for name in [name for name in sys.modules if name.startswith('wellcond.lab.data')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['pydantic'] = None\n"
        "try: import wellcond.lab.data\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "[]" and "needs pydantic" in second and "wellcond[train]" in second


@pytest.mark.parametrize(
    ("package", "extra", "fields"),
    [
        ("datasets", "train", {"source": "hub", "id": "a/b"}),
        ("sklearn.datasets", "train", {"source": "digits"}),
        ("PIL", "vision", {"source": "image_folder", "path": ""}),
    ],
)
def test_missing_package_names_the_install_line(monkeypatch, tmp_path, package, extra, fields):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").touch()
    with pytest.raises(MissingExtraError, match=rf"pip install 'wellcond\[{extra}\]'"):
        load(tmp_path, **fields)

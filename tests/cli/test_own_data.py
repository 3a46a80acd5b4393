"""`wellcond compare --recipe vit --data FOLDER`: the user's own pictures, and the mistakes that are made with them."""

import json

import numpy as np
import pytest
from PIL import Image

from wellcond.cli.app import data_overrides
from wellcond.cli.runs import fit_to_data
from wellcond.lab.load_recipe import load_recipe

SHORT = ["--methods", "default,gaussian", "--seeds", "1", "--jobs", "1", "--no-report", "--set",
         "training.length={steps: 2}", "--set", "tracking.jacobian_points=0"]  # fmt: skip


@pytest.fixture
def pictures(tmp_path):
    """Twelve pictures of each of three classes, without splits."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog", "owl")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for picture in range(12):
            pixels = (rng.random((20 + picture, 24, 3)) * 80 + 60 * number).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{picture}.png")
    return tmp_path / "pets"


@pytest.fixture
def compare(run, tmp_path, monkeypatch):
    """The command in an empty folder: (exit code or message, names of what it wrote)."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)

    def call(*arguments):
        code, _ = run("compare", "--recipe", "vit", *arguments, *SHORT)
        return code, sorted(path.name for path in place.iterdir())

    return call


def test_a_flat_folder_is_split_and_the_recipe_fitted_to_it(pictures, compare, tmp_path):
    assert compare("--data", pictures) == (0, ["runs"])
    written = json.loads((tmp_path / "work/runs/vit-tiny/gaussian/seed0/run.json").read_text())
    assert written["data"]["train"] == 33 and written["data"]["evaluation"] == 3 and "test" not in written
    assert written["config"]["training"]["batch_size"] == 33 and written["config"]["evaluation"]["test"] is None


def test_what_is_changed_is_said(pictures, capsys):
    recipe, base = load_recipe("vit", overrides=data_overrides(str(pictures), None, None))
    fitted = fit_to_data(recipe, base, quiet=False)
    assert fitted.evaluation.test is None and fitted.training.batch_size == 33
    told = capsys.readouterr().err
    assert "note: evaluation.test=null, since the data have no test split" in told
    assert "note: training.batch_size=33, since there are only 33 training samples" in told
    assert fit_to_data(fitted, base, quiet=False) is fitted and capsys.readouterr().err == ""


def test_a_test_split_is_used(pictures, compare, tmp_path):
    for split in ("train", "val", "test"):
        (tmp_path / "split" / split).mkdir(parents=True)
        for name in ("cat", "dog"):
            (tmp_path / "split" / split / name).symlink_to(pictures / name)
    assert compare("--data", tmp_path / "split") == (0, ["runs"])
    written = json.loads((tmp_path / "work/runs/vit-tiny/default/seed0/run.json").read_text())
    assert written["data"]["test"] == 24 and written["test"]["weights"] == "last"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "no such file or folder: nowhere"),
        (["--data", "{pets}/cat"], "the images are not sorted into classes"),
        (["--data", "{pets}", "--set", "model.name=timm:vit_smal"], "vit_small_patch16_224"),
        (["--data", "{pets}", "--set", "model.arguments.num_classes=7"], "the data need 3, found 7"),
        (["--data", "{pets}", "--set", "optimizer.lr=fast"], "optimizer.lr: Input should be a valid number"),
        (["--data", "{pets}", "--set", "logging.trackers=[none]"], "logging.trackers"),
        (["--set", "data={source: image_folder, path: nowhere}", "--set", "evaluation.test=null"], "nowhere"),
    ],
)
def test_a_mistake_found_before_training_leaves_no_folder(arguments, message, pictures, compare):
    told, written = compare(*[argument.replace("{pets}", str(pictures)) for argument in arguments])
    assert message in told and written == []

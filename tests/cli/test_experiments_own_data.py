"""`wellcond compare --recipe vit --data FOLDER`: the user's own pictures, and the mistakes that are made with them."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from wellcond.lab.plan import join_parts

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
    written = run_in(tmp_path / "work", "vit-tiny-pets-*/gaussian/seed0")
    assert written["data"]["train"] == 33 and written["data"]["evaluation"] == 3 and "test" not in written


def run_in(place, pattern):
    [path] = place.glob(f"runs/{pattern}/run.json")
    return json.loads(path.read_text())


def test_another_folder_is_another_comparison(pictures, compare, tmp_path):
    """The second `--data` met the first one's folder and was refused."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pets").symlink_to(pictures)
    assert compare("--data", pictures)[0] == 0
    assert compare("--data", tmp_path / "other" / "pets")[0] == 0
    assert compare("--data", pictures)[0] == 0
    assert len(list((tmp_path / "work/runs").iterdir())) == 1  # a link is the same folder
    shutil.copytree(pictures, tmp_path / "copy" / "pets")
    assert compare("--data", tmp_path / "copy" / "pets")[0] == 0
    assert len(list((tmp_path / "work/runs").iterdir())) == 2


def fitted(pictures, *settings):
    said = []
    parts = join_parts("vit", None, settings, None, str(pictures), {}, (), said.append)
    return parts.recipe, said


def test_a_recipe_is_fitted_to_data_and_every_change_is_said(pictures):
    recipe, said = fitted(pictures)
    assert recipe.evaluation.test is None and recipe.training.batch_size == 8
    assert recipe.task.image_size == 32  # 20 pixels, rounded up to what patches divide
    steps = recipe.training.length.in_steps(33 // 8)
    assert steps >= 300  # five epochs of the recipe are 20 updates, from which no model learns
    assert recipe.evaluation.every.in_steps(4) * 10 == steps
    fields = ("evaluation.test", "task.image_size", "training.batch_size", "training.length")
    assert len(said) == 4 and all(f"note: {field}=" in line for field, line in zip(fields, said, strict=True))


def test_what_the_user_sets_is_left(pictures):
    recipe, said = fitted(pictures, "training.length={steps: 2}", "task.image_size=32", "training.batch_size=4")
    assert recipe.training.length.steps == 2 and recipe.task.image_size == 32 and recipe.training.batch_size == 4
    assert len(said) == 1


def test_a_test_split_is_used(pictures, compare, tmp_path):
    for split in ("train", "val", "test"):
        (tmp_path / "split" / split).mkdir(parents=True)
        for name in ("cat", "dog"):
            (tmp_path / "split" / split / name).symlink_to(pictures / name)
    assert compare("--data", tmp_path / "split") == (0, ["runs"])
    written = run_in(tmp_path / "work", "vit-tiny-split-*/default/seed0")
    assert written["data"]["test"] == 24 and written["test"]["weights"] == "last"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "{pets}", "--set", "model.name=timm:vit_smal"], "vit_small_patch16_224"),
        (["--data", "{pets}", "--set", "model.arguments.num_classes=7"], "the data need 3, found 7"),
    ],
)
def test_a_mistake_found_before_training_leaves_no_folder(arguments, message, pictures, compare):
    told, written = compare(*[argument.replace("{pets}", str(pictures)) for argument in arguments])
    assert message in told and written == []


def test_a_text_without_labels_is_learned_byte_by_byte(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("It is a line of my own text.\n" * 400, "utf-8")
    recipe = join_parts(None, None, (), None, str(file), {}, (), print).recipe
    assert recipe.task.name == "language_modelling" and recipe.model.name == "wellcond:nanogpt"
    labelled = tmp_path / "reviews.csv"
    labelled.write_text("text,label\n" + "good,1\nbad,0\n" * 20, "utf-8")
    parts = join_parts(None, None, (), None, str(labelled), {"input": "text", "label": "label"}, (), print)
    assert parts.recipe.task.name == "sequence_classification"

"""What a plan takes: data by name, memory that is counted, and a probe on this machine."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from lab.small import SETTINGS
from wellcond.errors import DataError, OptionError
from wellcond.lab.data.base import load_data
from wellcond.lab.recipe import load_recipe
from wellcond.lab.reproduce.catalogue import find_entry
from wellcond.lab.reproduce.launch import (
    check_data,
    choose_gpus,
    count_memory,
    count_updates,
    data_name,
    launch_table,
    own_choices,
    place_data,
    probe_plan,
    read_probes,
)
from wellcond.lab.reproduce.plan import PlanOptions, make_plan
from wellcond.lab.settings import shipped_recipes


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def photos(tmp_path):
    """ImageNet as many have it: a folder for each class, train and val."""
    root, source = tmp_path / "photos", np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = source.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.JPEG")
    return root


def plan_of(id, folder, *overrides, scale="paper"):
    name, entry = find_entry(id)
    return make_plan(name, entry, scale, PlanOptions(folder, overrides=overrides))


def test_one_folder_of_images_serves_every_study_of_an_id(photos, tmp_path):
    plan = plan_of("C-T1", tmp_path)
    assert {data_name(study.recipe) for study in plan.studies} == {"imagenet-1k"} and len(plan.studies) == 5
    place_data([f"imagenet-1k={photos}"], plan)
    for study in plan.studies:
        data = load_data(study.recipe.data)
        assert (len(data.train), len(data.evaluation), data.class_names) == (8, 4, ("n01440764", "n01443537"))
        assert str(photos) not in data.description
    os.environ["WELLCOND_DATA"] = ""
    place_data([str(photos)], plan)  # a name is not needed where there is one set
    assert load_data(plan.studies[0].recipe.data).train[7]["label"] == 1


def test_a_name_that_the_id_does_not_need_is_refused(photos, tmp_path):
    plan = plan_of("C-T3", tmp_path)
    with pytest.raises(OptionError) as raised:
        place_data([f"cifar10={photos}"], plan)
    assert raised.value.expected == ["imagenet-1k", "coco"] and raised.value.found == "cifar10"
    with pytest.raises(OptionError):
        place_data([str(photos)], plan)
    with pytest.raises(OptionError):
        place_data(["coco=/nowhere"], plan)


@pytest.mark.parametrize("id", ["C-T3", "C-T6", "S-T2", "S-T10"])
def test_no_stage_begins_while_a_later_one_has_no_data(id, photos, tmp_path):
    plan = plan_of(id, tmp_path)
    place_data([f"imagenet-1k={photos}"], plan)
    with pytest.raises(DataError) as raised:
        check_data(plan)
    assert raised.value.expected.startswith("--data ") and "imagenet" not in raised.value.expected


def test_a_plan_of_one_stage_is_not_loaded_twice(tmp_path):
    check_data(plan_of("C-T1", tmp_path))


def test_what_is_kept_for_the_backward_pass_is_counted_without_memory():
    """Against a real forward pass of the same model, on samples with content."""
    recipe, _ = load_recipe("vit-tiny-pets", scale="paper", overrides=["precision.mixed=no", "model.arguments.depth=2"])
    needs = count_memory(recipe, None)
    import timm

    model = timm.create_model(recipe.model.name.removeprefix("timm:"), **recipe.model.arguments).train()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held = {}

    def note(tensor):
        if tensor.untyped_storage()._cdata not in own:
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.zeros(4, 3, 224, 224)).log_softmax(-1)
    assert needs.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 4 * needs.per_sample + needs.casts == pytest.approx(sum(held.values()), rel=0.02)
    del output


@pytest.mark.slow
@pytest.mark.parametrize("name", [name.removeprefix("paper/") for name in shipped_recipes() if "paper/vit" in name])
def test_a_recipe_fits_on_the_gpus_that_are_named(name):
    recipe, _ = load_recipe(name, scale="paper")
    needs = count_memory(recipe, None)
    gpus = choose_gpus(needs, recipe)
    assert gpus is not None and needs.on_each(gpus, recipe) <= 72e9
    assert gpus == 1 or needs.on_each(gpus // 2, recipe) > 72e9


def test_updates_are_those_of_the_releases():
    recipe, _ = load_recipe("vit", scale="paper")
    assert count_updates(recipe, 1_281_167) == 310 * 1251
    assert count_updates(recipe, None) is None


def test_the_dry_run_says_what_a_stranger_needs(tmp_path):
    plan = plan_of("C-T3", tmp_path)
    table = launch_table(plan, "C-T3", "paper", tmp_path, 1, ())
    text = " ".join((*table.notes, *(cell for row in table.rows for cell in row)))
    assert "wellcond reproduce C-T3 --scale paper" in text
    for part in ("--data imagenet-1k=FOLDER", "--data coco=FOLDER", "GB", "M", "--probe", "our choice"):
        assert part in text


def test_choices_of_ours_are_read_from_the_recipe_and_what_it_extends():
    found = own_choices("vit-giant", "paper")
    assert {"training", "tracking", "precision", "methods"} <= set(found)


@pytest.mark.processes
def test_a_probe_trains_the_study_itself_and_is_remembered(tmp_path):
    plan = plan_of("C-T2", tmp_path, *[part for part in SETTINGS if "methods" not in part and "seeds" not in part],
                   scale="tiny")  # fmt: skip
    [digits] = [study for study in plan.studies if study.settings.recipe == "digits"]
    probe_plan(type(plan)(plan.title, plan.entry, (digits,), ()), tmp_path, 1, 0.5, lambda text: None)
    found = read_probes(tmp_path)[digits.name]
    assert found["updates"] > 1 and 0 < found["seconds_per_update"] < 60 and found["processes"] == 1
    assert not digits.folder.exists()

"""`tuned` in a recipe: values that a search found are where methods start."""

import pytest

from lab.helpers import make_recipe, parse_recipe
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.compare import plan_comparison, settings_hash

FOUND = {
    "record": "results/evidence/digits",
    "values": {"default": {"optimizer.lr": 3e-3}, "identity(lam=10.0)": {"optimizer.lr": 5e-3, "optimizer.eps": 1e-6}},
}


def rates(recipe, methods, folder):
    jobs = plan_comparison(recipe, parse_methods(methods), [0], folder)
    return {job.method.label: job.recipe.optimizer.lr for job in jobs}


def test_methods_start_at_what_was_found_for_them(tmp_path):
    methods = "default,conditioned,identity(lam=10),default+set(optimizer.eps=1e-6)"
    found = rates(make_recipe(tuned=FOUND), methods, tmp_path)
    assert found == {
        "default": 3e-3, "conditioned": 1e-3, "identity(lam=10)": 5e-3, "default+set(optimizer.eps=1e-6)": 1e-3
    }  # fmt: skip


def test_another_label_is_still_the_same_method(tmp_path):
    recipe = make_recipe(tuned=FOUND)
    [job] = plan_comparison(recipe, [MethodSettings(label="default", condition=None)], [0], tmp_path)
    assert job.method.set == {"optimizer.lr": 3e-3} and job.method.label == "default"
    assert job.folder == tmp_path / "default/seed0"
    assert recipe.config(job.method, 0)["method"]["set"] == {"optimizer.lr": 3e-3}
    assert "tuned" not in recipe.config(job.method, 0)


def test_the_field_that_is_tuned_anew_is_left_out():
    chosen = make_recipe(tuned=FOUND).at_tuned(MethodSettings.model_validate("identity(lam=10)"), but=["optimizer.lr"])
    assert chosen.set == {"optimizer.eps": 1e-6}


def test_it_changes_no_hash():
    assert settings_hash(make_recipe(tuned=FOUND)) == settings_hash(make_recipe())


def test_what_the_user_sets_counts_for_all_methods(tmp_path):
    text = make_recipe(tuned=FOUND).model_dump_json(exclude={"methods", "method"})
    recipe = parse_recipe(text, "mine.yaml", ["optimizer.lr=0.5", "augmentation.flip=0.5"])
    assert rates(recipe, "default,identity(lam=10)", tmp_path) == {"default": 0.5, "identity(lam=10)": 0.5}
    assert recipe.tuned.values["identity(lam=10)"] == {"optimizer.eps": 1e-6}
    whole = parse_recipe(text, "mine.yaml", ["optimizer={name: muon, lr: 0.1}"])
    assert not any(whole.tuned.values.values())


def test_a_recipe_that_extends_another_has_its_own():
    assert load_recipe("vit", scale="tiny")[0].tuned is None and load_recipe("vit-patch8")[0].tuned is not None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"defalt": {"optimizer.lr": 1}}, "unknown method: got 'defalt'"),
        ({"default": {"optimizer.lr": -1}}, "greater than 0"),
        ({"default": {"seeds": [1]}}, "found 'seeds'"),
    ],
)
def test_what_no_method_could_set_is_refused(values, words):
    text = make_recipe().model_dump_json(exclude={"methods", "method", "tuned"})
    with pytest.raises(RecipeError, match=words):
        parse_recipe(text.replace("{", '{"tuned": {"record": "x"},', 1), "mine.yaml", [f"tuned.values={values}"])

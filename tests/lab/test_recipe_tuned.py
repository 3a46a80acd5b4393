"""`tuned` in a recipe: values that a search found are where methods start."""

import pytest

from lab.helpers import make_recipe, parse_recipe
from wellcond.errors import FairnessWarning, RecipeError
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.plan import plan_comparison, settle_methods
from wellcond.lab.recipe import load_recipe
from wellcond.lab.settings import shipped_recipes

FOUND = {
    "record": "results/evidence/digits",
    "values": {
        "default": {"optimizer.lr": 3e-3},
        "identity(lam=10.0)": {"optimizer.lr": 5e-3},
        "default+set(optimizer.name=muon)": {"optimizer.lr": 2e-2},
    },
}
TWO_FIELDS = FOUND | {"values": {"identity(lam=10)": {"optimizer.lr": 5e-3, "optimizer.eps": 1e-6}}}


def rates(recipe, methods, folder):
    jobs = plan_comparison(recipe, parse_methods(methods), [0], folder)
    return {job.method.label: job.recipe.optimizer.lr for job in jobs}


def text_of(**changes):
    return make_recipe(tuned=FOUND, **changes).model_dump_json(exclude={"methods", "method"})


def test_every_method_starts_at_what_was_found_for_it(tmp_path):
    methods = "default,identity(lam=10),default+set(optimizer.name=muon),gaussian+set(optimizer.lr=0.1)"
    found = rates(make_recipe(tuned=FOUND), methods, tmp_path)
    assert list(found.values()) == [3e-3, 5e-3, 2e-2, 0.1]


@pytest.mark.parametrize("other", ["conditioned", "identity(lam=2)", "default+set(optimizer.eps=1e-6)"])
def test_if_one_method_has_no_searched_value_none_has(tmp_path, other):
    with pytest.warns(FairnessWarning) as warned:
        found = rates(make_recipe(tuned=FOUND), f"default,identity(lam=10),{other}", tmp_path)
    assert set(found.values()) == {1e-3}
    [message] = [str(warning.message) for warning in warned]
    assert f"no searched value of optimizer.lr for {other}" in message
    assert message.endswith("--tune optimizer.lr=0.001,0.003,0.005")


def test_a_value_of_one_field_is_not_one_of_another(tmp_path):
    values = TWO_FIELDS["values"] | {"default": {"optimizer.lr": 3e-3}}
    with pytest.warns(FairnessWarning, match="optimizer.eps, optimizer.lr for default"):
        found = rates(make_recipe(tuned=FOUND | {"values": values}), "default,identity(lam=10)", tmp_path)
    assert set(found.values()) == {1e-3}


@pytest.mark.parametrize(
    "change",
    [
        "model.arguments.depth=1",
        "data.held_out=0.2",
        "proxy={width: 768}",
    ],
)
def test_values_of_another_model_or_other_data_are_dropped(tmp_path, change):
    recipe = parse_recipe(text_of(), "mine.yaml", [change])
    changed = ".".join(change.partition("=")[0].split(".")[:2])
    with pytest.warns(
        FairnessWarning, match=rf"are not used, since {changed}.* changed: every .*=0.000333,0.001,0.003$"
    ):
        assert set(rates(recipe, "default,identity(lam=10)", tmp_path).values()) == {1e-3}
    assert recipe.at_tuned(parse_methods("default")[0]).set == {}


@pytest.mark.parametrize(
    "change",
    [
        "seeds=[5]",
        "tracking.jacobian_points=0",
        "model.arguments.depth=2",
    ],
)
def test_what_leaves_the_problem_as_it_is_keeps_them(tmp_path, change):
    recipe = parse_recipe(text_of(), "mine.yaml", [change])
    assert list(rates(recipe, "default,identity(lam=10)", tmp_path).values()) == [3e-3, 5e-3]


def test_another_optimiser_drops_them():
    recipe = parse_recipe(text_of(), "mine.yaml", ["optimizer.name=muon"])
    assert recipe.tuned.outdated == ("optimizer.name",)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [("seeds: [7]", True), ("model: {arguments: {depth: 1}}", False), ("data: {source: image_folder, path: x}", False)],
)
def test_a_recipe_based_on_another_inherits_them_for_the_same_problem(changes, kept):
    recipe = parse_recipe(f"extends: tiny/digits\nname: mine\n{changes}", "mine.yaml")
    settled = settle_methods(recipe, recipe.methods)
    assert settled.outdated is not kept and ("since" not in settled.note) is kept
    assert {method.set.get("optimizer.lr") for method in settled.methods} == ({3e-3, 5.5e-3} if kept else {None})


def test_a_rate_in_a_recipe_based_on_another_counts_for_all_methods(tmp_path):
    recipe = parse_recipe("extends: tiny/digits\nname: mine\noptimizer: {lr: 0.02}", "mine.yaml")
    assert set(rates(recipe, "default,gaussian,small", tmp_path).values()) == {0.02}


def test_every_shipped_comparison_says_where_its_rates_are_from():
    for place in shipped_recipes():
        scale, name = place.split("/")
        recipe, _ = load_recipe(name, scale=scale)
        note = settle_methods(recipe, recipe.methods).note
        assert "trains at" in note or "were not searched" in note


def test_the_field_that_is_tuned_anew_is_left_out():
    chosen = make_recipe(tuned=TWO_FIELDS).at_tuned(
        MethodSettings.model_validate("identity(lam=10)"), but=["optimizer.lr"]
    )
    assert chosen.set == {"optimizer.eps": 1e-6}


def test_what_the_user_sets_counts_for_all_methods(tmp_path):
    text = make_recipe(tuned=TWO_FIELDS).model_dump_json(exclude={"methods", "method"})
    recipe = parse_recipe(text, "mine.yaml", ["optimizer.lr=0.5", "augmentation.flip=0.5"])
    with pytest.warns(FairnessWarning, match="optimizer.eps for default"):
        found = rates(recipe, "default,identity(lam=10)", tmp_path)
    assert found == {"default": 0.5, "identity(lam=10)": 0.5}
    assert recipe.tuned.values["identity(lam=10)"] == {"optimizer.eps": 1e-6}
    whole = parse_recipe(text, "mine.yaml", ["optimizer={name: muon, lr: 0.1}"])
    assert not any(whole.tuned.values.values())


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

import re

import pytest
import yaml

from lab.helpers import RECIPE, parse_recipe
from wellcond.errors import RecipeError
from wellcond.lab import settings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.settings import read_yaml, set_field

TEXT = yaml.safe_dump(RECIPE)


def failure(text=TEXT, overrides=()):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "some.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
("optimiser.lr=1", r"  optimiser: unknown field: got 'optimiser', .*'name', .*Did you mean 'optimizer'\?"),
("data.limit=2", r"  data.limit: unknown field: got 'limit', .*'source', 'held_out'. \(found 2\)"),
("task.name=classify", r"  task: unknown task: got 'classify', .*'image_classification', 'language_modelling'"),
("optimizer.lr=fast", r"  optimizer.lr: Input should be a valid number.* \(found 'fast'\)"),
("training.length.epochs=null", r"  training.length: give either epochs or steps"),
("seeds=[1, 1]", r"seeds: expected different numbers, found \[1, 1\]"),
("methods=[polr]", r"  methods.0: unknown method: got 'polr', .* Did you mean 'polar'\? \(found 'polr'\)"),
("schedule={name: cosine, warmup: {epochs: 1, weeks: 2}}", r"warmup.weeks: unknown field: got 'weeks'"),
],
)  # fmt: skip
def test_errors_name_the_path_the_value_and_what_is_allowed(override, message):
    found = failure(overrides=[override])
    assert "some.yaml is not a valid recipe:\n" in found and re.search(message, found), found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("a: 1\na: 2", r"is not YAML: the key 'a' appears twice\n.*line 2"),
        ("{[1]: 2}", "is not YAML: a key cannot be"),
        ("[" * 5000, "is not YAML"),
        ("- 1\n- 2", "expected a mapping of fields, found list"),
    ],
)
def test_what_is_no_recipe_is_refused(text, message):
    found = failure(text)
    assert "some.yaml" in found and re.search(message, found, flags=re.DOTALL), found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-2E+4", -20000.0),
        ("1e", "1e"),
        ("10", 10),
    ],
)
def test_numbers_with_an_exponent_are_numbers(text, value):
    found = read_yaml(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=5e-4", {"optimizer": {"lr": 0.0005}}),
        ("a.b.c=x", {"optimizer": {"lr": 1}, "a": {"b": {"c": "x"}}}),
        ("optimizer.lr=", {"optimizer": {"lr": None}}),
        ("title=a=b", {"optimizer": {"lr": 1}, "title": "a=b"}),
    ],
)
def test_an_override_sets_a_field(override, expected):
    data = {"optimizer": {"lr": 1}}
    set_field(data, override)
    assert data == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr", "--set: expected path.to.field=value, found 'optimizer.lr'"),
        ("a..b=1", "--set: expected path.to.field=value"),
        ("optimizer.lr.x=1", "--set optimizer.lr.x=1: optimizer.lr is 1, which has no fields"),
        ("optimizer.lr=[", r"--set optimizer.lr=\[: the value is not YAML"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        set_field({"optimizer": {"lr": 1}}, override)


def test_a_file_gives_its_folder(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT, encoding="utf-8")
    recipe, base = load_recipe(str(path))
    assert recipe.name == "small" and base == tmp_path


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(RecipeError, match="none.yaml"):
        load_recipe(str(tmp_path / "none.yaml"))
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="binary.yml"):
        load_recipe(str(tmp_path / "binary.yml"))


def test_a_name_at_several_scales_means_the_smallest(monkeypatch):
    shipped = {f"{scale}/small": TEXT.replace("tiny", scale) for scale in ("tiny", "paper")}
    monkeypatch.setattr(settings, "shipped_recipes", lambda: shipped)
    assert load_recipe("small")[0].scale == "tiny"
    with pytest.raises(RecipeError, match="tiny, paper"):
        load_recipe("small", scale="small")
    assert load_recipe("small", scale="paper")[0].scale == "paper"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["seeds=[0, 1]", "tracking.jacobian_points=2"], (True, True)),
        (["training.length={epochs: 2}"], (True, False)),
        (["data={source: image_folder, path: mine}"], (False, False)),
    ],
)
def test_title_and_description_are_those_of_what_runs(overrides, kept):
    recipe, _ = load_recipe("vit", scale="tiny", overrides=overrides)
    assert (bool(recipe.title), bool(recipe.description)) == kept
    named, _ = load_recipe("vit", scale="tiny", overrides=[*overrides, "title=Mine"])
    assert named.title == "Mine" and bool(named.description) == kept[1]


def test_a_recipe_of_ones_own_does_not_inherit_what_is_untrue(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tiny/vit\nname: mine\ndata: {source: image_folder, path: images}\n")
    recipe, _ = load_recipe(str(path))
    assert recipe.title == "" and recipe.description == ""
    path.write_text("extends: tiny/vit\nname: mine\nseeds: [3]\n")
    assert "CIFAR-10" in load_recipe(str(path))[0].title

"""Functions that a user brings: which arguments they get, and which processes can have them."""

import pytest
from torch import nn

from wellcond.errors import OptionError, RecipeError
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.user_code import METHODS, UserCode, choose_arguments, import_file, name_of

OFFERED = {"timm": {"num_classes": 3, "img_size": 32}, "hf": {"num_labels": 3, "image_size": 32}}


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (lambda num_classes: None, {}, {"num_classes": 3}),
        (lambda image_size, num_labels=2: None, {}, {"image_size": 32, "num_labels": 3}),
        (lambda: None, {}, {}),
        (lambda **arguments: None, {}, {"num_classes": 3, "img_size": 32}),
        (lambda num_labels, **arguments: None, {"depth": 2}, {"num_labels": 3, "depth": 2}),
        (lambda num_classes, depth: None, {"depth": 4}, {"num_classes": 3, "depth": 4}),
    ],
)
def test_a_function_gets_what_it_names(function, given, expected):
    assert choose_arguments(function, given, OFFERED) == expected


def doubled(model, *, generator, factor: float = 2.0):
    model.weight.data.mul_(factor)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(METHODS, "doubled", doubled)


def test_a_function_is_a_method_with_options(known):
    [method] = parse_methods("doubled(factor=3)")
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    assert method.apply_(model, seed=0) is model and (model.weight == 3 * before).all()
    assert method.is_same(MethodSettings(init="doubled", init_options={"factor": 3.0}))


def test_wrong_options_of_a_function_are_named(known):
    with pytest.raises(RecipeError, match="factr"):
        parse_methods("doubled(factr=3)")
    with pytest.raises(RecipeError, match="factor"):
        parse_methods("doubled(factor=many)")
    with pytest.raises(ValueError):
        MethodSettings(init="doubled", init_options={"generator": 1})


def test_an_error_of_a_method_is_one_message(known):
    with pytest.raises(RecipeError, match="AttributeError"):
        MethodSettings(init="doubled").apply_(nn.Identity(), seed=0)


def test_a_file_brings_its_functions_and_not_those_that_it_imports(tmp_path):
    path = tmp_path / "of_a_user.py"
    path.write_text("from math import sqrt\nfrom textwrap import dedent\n\n\ndef mine_alone(model):\n    pass\n")
    module = import_file(path)
    assert METHODS.pop("mine_alone") is module.mine_alone and "dedent" not in METHODS
    assert import_file(path) is module  # once a process
    with pytest.raises(OptionError) as wrong:
        import_file(tmp_path / "none.py")
    assert wrong.value.found == (tmp_path / "none.py").resolve()
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(OptionError, match="ZeroDivisionError"):
        import_file(tmp_path / "broken.py")


def test_what_cannot_be_sent_is_known_beforehand():
    assert UserCode(methods={"doubled": doubled}).find_obstacle() == ""
    assert "nameless" in UserCode(models={"nameless": lambda: None}).find_obstacle()


def test_names_of_functions_are_words_and_differ():
    assert name_of(doubled) == "doubled"
    with pytest.raises(OptionError) as wrong:
        name_of(doubled, ["doubled"])
    assert wrong.value.found == "doubled"

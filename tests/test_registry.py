"""Methods by name, and which values their options may have."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import wellcond as wc
from wellcond.init.apply import METHODS, check_options
from wellcond.registry import check_values


@pytest.mark.parametrize(
    ("method", "option", "value", "message"),
    [
        ("gaussian", "std", "abc", "std of 'gaussian': expected a finite number above 0 or None, got 'abc'"),
        ("gaussian", "std", float("nan"), "a finite number above 0 or None, got nan, which is not finite"),
        ("gaussian", "std", float("inf"), "got inf, which is not finite"),
        ("gaussian", "std", -0.02, "a finite number above 0 or None, got -0.02"),
        ("gaussian", "std", 0, "a finite number above 0"),
        ("gaussian", "std", True, "a finite number above 0"),
        ("gaussian", "std", [1.0], "a finite number above 0"),
        ("gaussian", "tokens", 1.5, "tokens of 'gaussian': expected a whole number, got 1.5"),
        ("gaussian", "value", "shared", "unknown value: got 'shared', expected one of 'gaussian', 'per_head', 'joint'"),
        ("gaussian", "projections", "qx", "unknown projection: got 'x'"),
        ("gaussian", "projections", 3, "projections of 'gaussian': expected text, got 3"),
        ("conditioned", "value_scale", "big", "expected a finite number or one of 'default', got 'big'"),
        ("conditioned", "orthogonal", "cayley", "unknown orthogonal: got 'cayley', expected one of 'svd', 'qr'"),
        ("conditioned", "match_norm", "yes", "expected True or False, got 'yes'"),
        ("conditioned", "output", "joint", "True or False or one of 'identity', 'orthogonal', got 'joint'"),
        ("mimetic", "qk_noise", float("nan"), "which is not finite"),
        ("mimetic", "qk_sign", 2, "unknown qk_sign: got 2, expected one of 1, -1"),
        ("mimetic", "position", "polar", "unknown position"),
        ("default", "rule", None, "rule of 'default': expected one of 'family', 'torch', got None"),
        ("weight_selection", "exclude", "head", "exclude of 'weight_selection': expected a list of text, got 'head'"),
        ("weight_selection", "teacher", "big", "teacher of 'weight_selection': expected a Module, got 'big'"),
    ],
)
def test_a_wrong_value_is_refused_before_the_model_is_looked_at(method, option, value, message):
    needed = {"teacher": nn.Linear(2, 2)} if method == "weight_selection" else {}
    for ask in (lambda options: check_options(method, options), lambda options: wc.init_(None, method, **options)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            ask(needed | {option: value})
        assert isinstance(caught.value, wc.WellcondError)


def test_options_that_exclude_each_other_are_refused_without_a_model():
    with pytest.raises(wc.OptionError, match="sets q and k together"):
        check_options("gaussian", {"keys": "tied", "projections": "qv"})
    with pytest.raises(wc.OptionError, match="an own_token between"):
        check_options("conditioned", {"keys": "tied", "own_token": 1.5})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_default_is_a_value_that_is_allowed(method):
    parameters = inspect.signature(METHODS[method]).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    check_options(method, options | ({"teacher": nn.Linear(2, 2)} if method == "weight_selection" else {}))


def test_the_files_of_a_package_are_the_list():
    code = (
        "import sys, wellcond, wellcond.registry as registry\n"
        "assert 'torch' not in sys.modules\n"
        "print(len(registry.INITIALISATIONS), len(registry.CORRECTIONS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10", "3"]


def test_a_name_of_ours_is_taken_and_a_users_may_be_replaced():
    for verb, name in ((wc.register_init, "gaussian"), (wc.register_init, "polar"), (wc.register_condition, "polar")):
        with pytest.raises(wc.OptionError, match=rf"'{name}' is .*, already; choose another name"):
            verb(name)(lambda context: [])
    with pytest.raises(wc.OptionError, match="expected a word such as 'my_method', got 'two words'"):
        wc.register_init("two words")(lambda context: [])
    for factor in (1.0, 2.0):
        wc.register_init("again")(
            lambda context, factor=factor: [(context.sites[0].q, context.sites[0].q.read() * factor)]
        )
    model = nn.MultiheadAttention(8, 2)
    before = model.in_proj_weight[:8].clone()
    assert torch.equal(wc.init_(model, "again").in_proj_weight[:8], 2 * before)
    del METHODS["again"]


def annotated(*, names: list[str] = [], where: "Path | None" = None, call: Callable[[int], int] | None = None):  # noqa: B006, F821
    pass


def test_annotations_that_mean_nothing_here_are_passed_over():
    check_values(annotated, "annotated", {"names": "no list", "where": 1, "call": 2})  # Path is not imported
    annotated.__annotations__.pop("where")
    check_values(annotated, "annotated", {"call": 2, "names": ["a"], "other": 1})
    with pytest.raises(wc.OptionError, match="expected a list of text, got 'no list'") as caught:
        check_values(annotated, "annotated", {"names": "no list"})
    assert caught.value.expected == "a list of text" and caught.value.found == "no list"

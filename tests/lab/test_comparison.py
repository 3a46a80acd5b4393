"""`lab.compare`: a recipe or parts of one, and what is made of the records."""

import pytest
import timm

from lab.held_runs import HELD
from lab.report.fake_runs import FakeMethod, write_comparison
from lab.small import SETTINGS
from wellcond import lab
from wellcond.errors import OptionError, RecipeError
from wellcond.lab.comparison import LineWatch, Result
from wellcond.lab.pool import Outcome
from wellcond.lab.records import COMPLETE

SHORT = [*SETTINGS, "training.length={steps: 6}", "tracking={weights_every: null, jacobian_points: 0}"]
QUIET = LineWatch(quiet=True)


def small_vit(num_classes, in_chans, img_size):
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0}
    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=num_classes, in_chans=in_chans, img_size=img_size, **sizes
    )


def halved(model, *, factor: float = 0.5):
    model.blocks[0].attn.qkv.weight.data.mul_(factor)


def compare(folder, **changes):
    given = {
        "model": small_vit,
        "methods": ["default", "gaussian", halved],
        "seeds": 1,
        "settings": SHORT[:1] + SHORT[3:],
    }
    return lab.compare("digits", folder=folder, cpu=True, watch=QUIET, **{"at_once": 1, **given, **changes})


@pytest.mark.processes
@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_functions_are_a_model_and_a_method_here_and_in_processes(tmp_path, at_once):
    result = compare(tmp_path / "runs", at_once=at_once)
    assert result.complete and [one["status"] for one in result.outcome.records] == ["finished"] * 3
    frame = result.to_frame()
    assert sorted(frame["method"]) == ["default", "gaussian", "halved"] and set(frame["status"]) == {"finished"}
    assert {one["config"]["model"]["name"] for one in result.outcome.records} == {"python:small_vit"}
    losses = frame.set_index("method")["loss"]
    assert losses["halved"] != losses["default"]
    again = compare(tmp_path / "runs")
    assert [one["sessions"] for one in again.outcome.records] == [
        one["sessions"]
        for method in ("default", "gaussian", "halved")
        for one in result.outcome.records
        if one["method"] == method
    ]  # nothing was repeated


def test_a_lambda_is_run_here_or_refused(tmp_path):
    with pytest.raises(OptionError, match="2 runs at once"):
        compare(tmp_path / "runs", model=lambda num_classes: None, at_once=2)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RecipeError, match="NoneType"):  # and here it is called
        compare(tmp_path / "runs", model=lambda num_classes: None, at_once=None)


def test_code_that_a_recipe_names_is_not_run_unless_the_call_allows_it(tmp_path):
    with pytest.raises(RecipeError, match="trust"):
        compare(tmp_path / "runs", model=None, methods=None, settings=[*SHORT, HELD])
    assert not (tmp_path / "runs").exists()


def test_neither_recipe_nor_data_is_nothing_to_compare():
    with pytest.raises(OptionError):
        lab.compare(methods="default", watch=QUIET)


def test_the_table_the_best_and_the_page_are_made_of_the_records(tmp_path):
    finals = {"default": {0: 0.90, 1: 0.91, 2: 0.92}, "gaussian": {0: 0.93, 1: 0.945, 2: 0.95}}
    write_comparison(tmp_path / "runs", [FakeMethod(label, values) for label, values in finals.items()])
    result = Result(tmp_path / "runs", Outcome())
    table = result.table()
    assert table.loc["gaussian", "difference"] == pytest.approx(0.0316667, abs=1e-6)
    assert table.loc["gaussian", "low"] < table.loc["gaussian", "difference"] < table.loc["gaussian", "high"]
    assert result.best() == "gaussian" and set(result.to_frame()["status"]) <= set(COMPLETE)
    assert result.save(tmp_path / "page.md").read_text().startswith("#")
    with pytest.raises(OptionError) as wrong:
        result.save(tmp_path / "page.pdf")
    assert wrong.value.found == tmp_path / "page.pdf"

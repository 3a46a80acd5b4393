"""The search of `compare --tune`: grids, growth, ranking, and methods at values."""

import math

import pytest

from lab.helpers import make_recipe
from wellcond.cli.app import read_tuned_fields
from wellcond.errors import OptionError, RecipeError, RunError
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.pool import Outcome
from wellcond.lab.report.tuning import TunedPoint
from wellcond.lab.tune import (
    SEEN,
    MethodSearch,
    SearchPlan,
    at_values,
    find_field,
    read_tuning,
    search,
)

ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}
PERPLEXITY = {"name": "perplexity", "higher_is_better": False, "percent": False}


def method(text):
    return MethodSettings.model_validate(text)


def plan(folder, methods, *fields, seeds=(1000, 1001), growth=3, **changes):
    grid = read_tuned_fields(fields)
    return SearchPlan(make_recipe(**changes), parse_methods(methods), (0, 1), folder, grid, seeds, growth)


def searched(made, score, metric=ACCURACY):
    """A search whose runs score by a rule: of the values that they would train with, and the seed."""
    stages = []

    def run(jobs):
        stages.append([(job.method.label, job.seed) for job in jobs])
        records = []
        for job in jobs:
            value = score(job.recipe.optimizer.lr, job.seed)
            status = "diverged" if value is None else "finished"
            scores = None if value is None else {metric["name"]: value}
            common = {"method": job.method.label, "seed": job.seed, "metric": metric}
            records.append(common | {"status": status, "final": scores, "best": scores})
        return Outcome(records)

    found, stopped = search(made, run)
    assert stopped is None
    return found, stages


def peak(at):
    return lambda rate, seed: 0.9 - 0.1 * abs(math.log10(rate / at)) + 0.001 * (seed - 1000)


def test_the_best_inside_the_grid_needs_no_growth(tmp_path):
    [found], stages = searched(plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3,1e-2"), peak(1.2e-3))
    assert found.best.values == {"optimizer.lr": 0.001} and not found.edges()
    assert len(stages) == 1 and len(stages[0]) == 6
    assert stages[0][:3] == [(f"default, optimizer.lr={rate}", 1000) for rate in (0.0001, 0.001, 0.01)]


@pytest.mark.parametrize(("at", "grown", "best"), [(1e-1, "above", 0.1), (1e-6, "below", 1e-6)])
def test_the_grid_grows_until_the_best_is_inside(tmp_path, at, grown, best):
    [found], stages = searched(plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3,1e-2"), peak(at))
    assert found.best.values["optimizer.lr"] == pytest.approx(best) and not found.edges()
    assert found.grown["optimizer.lr"] == {"below": 0, "above": 0} | {grown: len(stages) - 1}
    assert all(len(stage) == 2 for stage in stages[1:])


def test_growth_ends_at_its_limit_and_says_so(tmp_path):
    [found], stages = searched(plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3", growth=2), peak(1e3))
    assert found.grid["optimizer.lr"] == [1e-4, 1e-3, 0.01, 0.1] and len(stages) == 3
    assert found.edges() == {"optimizer.lr": "above"}


def test_growth_stays_within_the_range_of_a_field(tmp_path):
    changes = {"schedule": {"name": "one_cycle", "rise": 0.1}}
    asked = plan(tmp_path, "default", "schedule.rise=0.2,0.6", **changes)
    [found], stages = searched(asked, lambda rate, seed: 0.5)
    assert found.grid["schedule.rise"][0] < 0.2 and max(found.grid["schedule.rise"]) == 0.6  # equal: the smaller
    found.tried = [TunedPoint({"schedule.rise": rise}, {"1000": score}) for rise, score in ((0.2, 0.1), (0.6, 0.9))]
    found.grid = {"schedule.rise": [0.2, 0.6]}
    found.grow()
    assert found.missing == [] and found.edges() == {"schedule.rise": "above"}


def test_growth_of_several_methods_is_one_stage_and_each_has_its_own_grid(tmp_path):
    def score(rate, seed):
        return peak(1e-2)(rate, seed)

    methods = "default,conditioned,gaussian+set(optimizer.lr=0.5)"
    found, stages = searched(plan(tmp_path, methods, "optimizer.lr=1e-4,1e-3"), score)
    assert [len(stage) for stage in stages] == [8, 4, 4]
    assert found[2].missing == [] and found[2].tuned() == found[2].method  # it says its rate itself


def test_a_diverged_run_is_worse_than_every_score_and_keeps_its_point(tmp_path):
    def score(rate, seed):
        return None if rate > 5e-3 and seed == 1001 else 0.5 + rate

    [found], _ = searched(plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3,1e-2"), score)
    assert found.best.values == {"optimizer.lr": 1e-3}
    assert [list(point.scores) for point in found.tried] == [["1000", "1001"]] * 3
    record = read_tuning(tmp_path)
    [point] = [row for row in record["methods"][0]["points"] if row["values"] == {"optimizer.lr": 0.01}]
    assert point["diverged"] == [1001] and point["scores"]["1001"] is None and point["mean"] == pytest.approx(0.51)


def test_lower_is_better_for_perplexity_and_equal_scores_go_to_the_smaller_rate(tmp_path):
    def score(rate, seed):
        return {1e-4: 50.0, 1e-3: 30.0, 1e-2: 30.0, 1e-1: 90.0}[rate]

    [found], _ = searched(plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3,1e-2,1e-1"), score, PERPLEXITY)
    assert found.best.values == {"optimizer.lr": 1e-3}


def test_two_fields_search_their_product(tmp_path):
    asked = plan(tmp_path, "default,identity(lam=2)", "optimizer.lr=1e-4,1e-3,1e-2", "identity.lam=1,3,9")
    found, stages = searched(asked, peak(1e-3))
    assert [list(one.grid) for one in found] == [["optimizer.lr"], ["optimizer.lr", "identity.lam"]]
    assert len(stages[0]) == 2 * (3 + 9)
    tuned = found[1].tuned()  # of equals the smallest
    assert tuned.condition_options == {"lam": min(found[1].grid["identity.lam"])}
    assert (tuned.label, tuned.set) == ("identity(lam=2)", {"optimizer.lr": 1e-3})


def test_the_search_scores_no_test_split_and_measures_nothing(tmp_path):
    asked = plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3", evaluation={"test": "best"})
    job = MethodSearch(asked, method("default")).job({"optimizer.lr": 1e-4}, 1000)
    assert job.recipe.evaluation.test is None and job.recipe.tracking.jacobian_points == 0
    assert asked.scored == "best" and job.recipe.optimizer.lr == 1e-4
    assert job.folder == tmp_path / "tuning/default/optimizer.lr-0.0001/seed1000"


def test_options_of_any_part_are_set_by_their_text():
    recipe = make_recipe()
    chosen = method({"label": "mine", "init": "conditioned", "init_options": {"projections": "qk"},
                     "condition": "balanced", "set": {"optimizer.eps": 1e-6}})  # fmt: skip
    made = at_values(recipe, chosen, {"balanced.target": 1.5, "conditioned.value_scale": 0.16, "optimizer.lr": 0.1})
    assert made.init_options == {"projections": "qk", "value_scale": 0.16}
    assert (made.label, made.condition_options) == ("mine", {"target": 1.5})
    assert made.set == {"optimizer.eps": 1e-6, "optimizer.lr": 0.1}
    assert find_field(chosen, "balanced.target") and not find_field(chosen, "identity.lam")


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.lr",
        "optimizer.lr=1e-3",
        "optimizer.lr=1e-3,0.001",
        "optimizer.lr=1e-3,",
    ],
)
def test_what_is_no_grid_is_refused(text):
    with pytest.raises(OptionError, match="with two numbers or more"):
        read_tuned_fields([text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer.speed=1,2", "unknown field: got 'speed'"),
        ("optimizer.name=1,2", "unknown optimiser: got 1, expected one of 'adamw', 'muon'"),
        ("seeds.x=1,2", "PART.OPTION"),
        ("identity.lam=1,2", "none of the methods"),
        ("balanced.target=-1,2", "target"),
    ],
)
def test_fields_and_values_that_do_not_fit_are_refused(tmp_path, text, words):
    with pytest.raises(RecipeError, match=words):
        plan(tmp_path, "default,balanced", text).check()


def test_a_second_search_keeps_the_methods_of_the_first(tmp_path):
    searched(plan(tmp_path, "default,gaussian", "optimizer.lr=1e-4,1e-3,1e-2"), peak(1e-3))
    again = plan(tmp_path, "default,balanced", "optimizer.lr=1e-4,1e-3,1e-2")
    again.check()
    searched(again, peak(1e-3))
    record = read_tuning(tmp_path)
    assert [row["label"] for row in record["methods"]] == ["gaussian", "default", "balanced"]
    assert record["test_data"] == SEEN and record["test_seeds"] == [0, 1]
    with pytest.raises(RunError, match="other seeds"):
        plan(tmp_path, "default", "optimizer.lr=3e-3,1e-2", seeds=(5, 6)).check()


def test_a_search_goes_on_from_its_record_where_settings_and_seeds_are_the_same(tmp_path):
    first, stages = searched(plan(tmp_path, "default,gaussian", "optimizer.lr=1e-4,1e-3,1e-2"), peak(0.1))
    assert len(stages) == 3  # the grid grew twice
    again, stages = searched(plan(tmp_path, "default,balanced", "optimizer.lr=1e-4,1e-3,1e-2"), peak(0.1))
    assert {label.split(",")[0] for stage in stages for label, _ in stage} == {"balanced"}
    assert again[0].describe() == first[0].describe()

    other = plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3,1e-2", training={"length": {"steps": 7}, "batch_size": 4})
    _, stages = searched(other, peak(3e-2))
    assert len(stages[0]) == 6  # of other settings: nothing is taken from the record


def test_a_changed_record_is_refused(tmp_path):
    searched(plan(tmp_path, "default", "optimizer.lr=1e-4,1e-3,1e-2"), peak(1e-3))
    path = tmp_path / "tuning.json"
    path.write_text(path.read_text().replace("0.9", "0.8"))
    with pytest.raises(RunError, match="was changed"):
        read_tuning(tmp_path)

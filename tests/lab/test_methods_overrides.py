"""`set(...)`: fields of the recipe that one method changes."""

import pytest

from lab.helpers import make_recipe
from lab.small import record, small_job
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.plan import plan_comparison, settings_hash, write_comparison
from wellcond.lab.pool import run_jobs
from wellcond.lab.recipe import config_hash, override_recipe
from wellcond.lab.records import load_comparisons
from wellcond.lab.train.run import Job


def method(text):
    return MethodSettings.model_validate(text)


@pytest.mark.parametrize(
    ("text", "canonical", "fields"),
    [
        ("conditioned+set(optimizer.lr=3e-3)", "conditioned+set(optimizer.lr=0.003)", {"optimizer.lr": 0.003}),
        ("set(optimizer.lr=0.01)", "default+set(optimizer.lr=0.01)", {"optimizer.lr": 0.01}),
        ("set(schedule.warmup={steps: 5}, augmentation.flip=0.5)+identity(lam=1)",
         "identity(lam=1)+set(augmentation.flip=0.5, schedule.warmup={steps: 5})",
         {"augmentation.flip": 0.5, "schedule.warmup": {"steps": 5}}),
    ],
)  # fmt: skip
def test_text_and_mapping_give_the_same_method(text, canonical, fields):
    parsed = method(text)
    assert parsed.set == fields and parsed.canonical() == canonical
    again = method(parsed.canonical())
    assert again.model_dump(exclude={"label"}) == parsed.model_dump(exclude={"label"})
    written = MethodSettings(**again.model_dump(exclude={"label"}))
    assert written.label == canonical and written.slug == again.slug


def test_overrides_are_in_the_recipe_of_the_job_and_nowhere_else():
    recipe = make_recipe(schedule={"name": "cosine", "warmup": {"steps": 3}}, training={
        "length": {"steps": 9}, "batch_size": 4, "averaging": {"decay": 0.5}})  # fmt: skip
    asked = method("default+set(optimizer.lr=0.5, schedule.warmup={steps: 5}, training.averaging.decay=0.9)")
    changed = Job(recipe, asked, 0, None).recipe
    assert changed.optimizer.lr == 0.5 and recipe.optimizer.lr == 1e-3
    assert changed.schedule.warmup.steps == 5 and changed.training.averaging.decay == 0.9
    assert changed.training.length == recipe.training.length
    assert Job(changed, asked, 0, None).recipe == changed


def test_another_kind_of_optimiser_keeps_the_fields():
    recipe = make_recipe(optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.8, 0.9]})
    changed = override_recipe(recipe, method("default+set(optimizer.name=muon, optimizer.eps=0.5)")).optimizer
    kept = {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "qk_lr_factor": 1.0, "fused": False}
    assert changed.model_dump(exclude_none=True) == {"name": "muon", "eps": 0.5, "heads": "fused"} | kept


@pytest.mark.parametrize(
    ("text", "words"),
    [
("default+set(training.length={steps: 3})", ("training.length", "share the others")),
("default+set(data.source=digits)", ("data.source", "of optimizer, schedule")),
("default+set(model.arguments.depth=1)", ("model.arguments.depth",)),
("default+set(optimizer=muon)", ("'optimizer'",)),
("default+set(optimizer.lr=-1)", ("optimizer.lr", "greater than 0", "found -1")),
("default+set(optimizer.momentun=1)", ("optimizer.momentun", "unknown field")),
],
)  # fmt: skip
def test_what_a_method_may_not_set_is_one_clear_error(text, words):
    with pytest.raises(RecipeError) as caught:
        override_recipe(make_recipe(), method(text))
    assert all(word in str(caught.value) for word in (text, *words)), caught.value


@pytest.mark.parametrize(
    "text", ["set()", "default+set(optimizer.lr)", "set(optimizer..lr=1)", "set(a.b=1)+set(c.d=2)"]
)
def test_set_without_fields_or_twice_is_no_method(text):
    with pytest.raises(ValueError, match=r"optimizer.lr=3e-3"):
        method(text)


def test_the_hash_is_that_of_the_values_and_the_comparison_s_of_the_recipe():
    recipe, other = make_recipe(), make_recipe(optimizer={"name": "adamw", "lr": 0.003})
    job = Job(recipe, method("conditioned+set(optimizer.lr=3e-3)"), 1, None)
    asked = config_hash(job.recipe.config(job.method, 1))
    assert asked == config_hash(other.config(method("conditioned"), 1))
    assert asked != config_hash(recipe.config(method("conditioned"), 1))
    assert settings_hash(recipe) != settings_hash(other)


def test_runs_that_a_method_sets_apart_are_one_comparison(tmp_path):
    recipe = small_job(tmp_path).recipe
    methods = parse_methods("default,conditioned+set(optimizer.lr=0.01),default+set(optimizer.name=muon)")
    jobs = plan_comparison(recipe, methods, [0], tmp_path, cpu=True)
    write_comparison(tmp_path, recipe, methods, [0])
    done = run_jobs(jobs, num_workers=1, observer=lambda job, event: None)
    assert not done.failures
    stored = record(tmp_path / "conditioned-set-optimizer.lr-0.01/seed0")
    assert stored["config"]["optimizer"]["lr"] == 0.01 and stored["method_spec"]["set"] == {"optimizer.lr": 0.01}
    [comparison] = load_comparisons(tmp_path)
    assert len(comparison.runs) == 3

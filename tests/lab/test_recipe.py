import copy

import pytest

from lab.helpers import RECIPE, make_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import NEUTRAL, Recipe, config_hash
from wellcond.lab.settings import SCALES, shipped_recipes
from wellcond.lab.train.evaluate import jacobian_steps

METHOD = MethodSettings.model_validate("identity(lam=10)")


def test_shipped_recipes_are_listed_in_order():
    listed = [(SCALES.index(scale), name) for scale, name in (shipped.split("/") for shipped in shipped_recipes())]
    assert listed == sorted(listed) and (0, "digits") in listed


def test_a_recipe_rebuilt_from_a_config_is_the_same():
    first = make_recipe(
        schedule={"name": "cosine", "warmup": {"epochs": 0.5}},
        augmentation={"flip": 0.5, "resized_crop": [0.1, 1]},
        training=RECIPE["training"] | {"averaging": {"decay": 0.9}},
        tracking={"heads": [0, 1]},
    )
    config = first.config(METHOD, 3)
    seed = config["seed"]
    again = Recipe.model_validate({key: value for key, value in config.items() if key != "seed"})
    assert again.config(again.method, seed) == config
    assert config_hash(again.config(again.method, seed)) == config_hash(config)
    assert again.method == METHOD and again.optimizer == first.optimizer


def changed(config, path, value):
    copied = copy.deepcopy(config)
    *parents, last = path.split(".")
    place = copied
    for key in parents:
        place = place[key]
    assert last in place and place[last] != value
    place[last] = value
    return copied


def leaves(value, path=""):
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path


WITHOUT_EFFECT = {
    "title",
    "description",
    "checkpoint.every.epochs",
    "checkpoint.every.steps",
    "logging.trackers",
    "logging.monitor_every",
    "training.recompute",
    "training.shard",
    "training.workers",
    "tracking.budget",
    "method.label",
    "method.set",  # its values are those of the other fields
}


def test_the_hash_ignores_what_has_no_effect_and_nothing_else():
    config = make_recipe().config(METHOD, 0)
    before = config_hash(config)
    assert len(before) == 16 and int(before, 16) >= 0
    ignored = {path for path in leaves(config) if config_hash(changed(config, path, "other")) == before}
    assert ignored == WITHOUT_EFFECT


def test_fields_that_came_later_leave_the_hash_of_older_records():
    config = make_recipe(schedule={"name": "cosine"}).config(METHOD, 0)
    older = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for path in NEUTRAL:
        part, _, field = path.partition(".")
        older.get(part, {}).pop(field, None)
    older["optimizer"].pop("qk_clip")
    assert older != config and config_hash(older) == config_hash(config)
    assert config_hash(changed(config, "schedule.over_warmup", True)) != config_hash(config)


def test_whole_numbers_are_one_setting_however_they_are_written():
    config = make_recipe(optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 1.0}).config(METHOD, 0)
    read_again = copy.deepcopy(config)
    read_again["optimizer"]["weight_decay"] = 1
    assert config_hash(read_again) == config_hash(config)


def test_what_would_be_measured_has_no_effect_where_nothing_is():
    nothing = {"weights_every": None, "jacobian_points": 0}
    hashes = {
        config_hash(make_recipe(tracking=tracking).config(METHOD, 0))
        for tracking in (nothing, nothing | {"heads": [0]}, nothing | {"samples": 2}, {"heads": [0]})
    }
    assert len(hashes) == 2


@pytest.mark.parametrize("num_points", range(6))
@pytest.mark.parametrize("num_steps", [1, 2, 7, 1000])
def test_jacobian_steps_hold_both_ends_and_no_more_than_asked(num_points, num_steps):
    steps = jacobian_steps(num_points, num_steps)
    assert len(steps) <= num_points and all(0 <= step <= num_steps for step in steps)
    assert num_points == 0 or num_steps in steps
    assert num_points < 2 or 0 in steps

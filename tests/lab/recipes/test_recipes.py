"""Every shipped recipe resolves to what the snapshot has; `python tests/lab/recipes/renew.py` renews it."""

import json

import pytest

from lab.recipes.renew import SNAPSHOT, resolved
from wellcond.lab.recipe import load_recipe
from wellcond.lab.settings import shipped_recipes

SNAPSHOTS = json.loads(SNAPSHOT.read_text())


def test_the_snapshot_has_every_recipe():
    assert set(SNAPSHOTS) == set(shipped_recipes())


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_resolves_as_in_the_snapshot(name):
    assert json.loads(json.dumps(resolved(name))) == SNAPSHOTS.get(name), (
        "review, then: python tests/lab/recipes/renew.py"
    )


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if not name.startswith("tiny/")])
def test_recipes_beyond_tiny_say_which_data_and_machine_they_need(name):
    scale, _, short = name.partition("/")
    recipe, _ = load_recipe(short, scale=scale)
    assert (recipe.name, recipe.scale) == (short, scale)
    assert "GPU" in recipe.description
    if recipe.data.source == "hub" and recipe.task.name != "sequence_classification":
        assert recipe.data.id in recipe.description
    assert recipe.training.batch_size % recipe.training.accumulate == 0

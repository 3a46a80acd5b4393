"""A tiny recipe is what its committed evidence ran: the protocol stands nowhere else."""

from pathlib import Path

import pytest

from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import differences, load_recipe, with_effect
from wellcond.lab.records import load_comparisons
from wellcond.lab.settings import shipped_recipes

ROOT = Path(__file__).parents[3]
TUNED = [
    name.partition("/")[2]
    for name in shipped_recipes()
    if name.startswith("tiny/") and load_recipe(name.partition("/")[2], scale="tiny")[0].tuned is not None
]
WITHOUT_EFFECT = ("title", "description", "tracking", "checkpoint", "logging", "method")
"""Words, and what is measured, which changes no score."""


@pytest.mark.parametrize("name", TUNED)
def test_a_recipe_is_what_its_evidence_ran(name):
    recipe, _ = load_recipe(name, scale="tiny")
    [comparison] = load_comparisons(ROOT / recipe.tuned.record)
    run = comparison.runs[0]
    there, here = dict(run.record["config"]), recipe.config(MethodSettings(init="default"), run.seed)
    for config in (there, here):
        for field in WITHOUT_EFFECT:
            config.pop(field, None)
    there, here = (with_effect(config | {"method": {}}) for config in (there, here))
    found = [line for line in differences(there, here) if not line.startswith("optimizer.lr:")]  # searched
    assert found == []

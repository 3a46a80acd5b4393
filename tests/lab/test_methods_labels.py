"""Labels of methods in the committed records and in the shipped recipes: the same fields, text and folders as ever."""

import json
import re
from pathlib import Path

import pytest

from wellcond.lab.load_recipe import load_recipe, merge, shipped_recipes
from wellcond.lab.methods import MethodSettings

RESULTS = Path(__file__).parents[2] / "results"
COMPARISONS = sorted(path.parent for path in RESULTS.rglob("comparison.json"))


def recorded_methods():
    """Label, slug, folder and recorded fields of every method of every comparison."""
    for folder in COMPARISONS:
        comparison = json.loads((folder / "comparison.json").read_text("utf-8"))
        for method in comparison["methods"]:
            place = folder / method["slug"]
            run = json.loads(min(place.glob("seed*.json")).read_text("utf-8"))
            yield method, place, merge(comparison["shared"].get("method_spec", {}), run.get("method_spec", {}))


def test_labels_of_the_records_give_the_recorded_folders_and_fields():
    seen = set()
    for recorded, place, fields in recorded_methods():
        method = MethodSettings.model_validate(recorded["label"])
        assert (method.label, method.slug, method.slug) == (recorded["label"], recorded["slug"], place.name)
        again = MethodSettings.model_validate(method.canonical())
        assert again.model_dump(exclude={"label"}) == method.model_dump(exclude={"label"})
        # Tuned values are in the recorded fields and not in the label; those of tokens replace what the label says.
        tuned = {"label", "tokens"} if place.parent.name.endswith("-strong") else {"label"}
        parsed = merge(fields, method.model_dump(exclude=tuned, exclude_unset=True))
        assert parsed == fields, place
        seen.add(method.label)
    assert len(seen) > 60


@pytest.mark.parametrize("shipped", shipped_recipes())
def test_labels_of_the_recipes_are_their_text(shipped):
    scale, name = shipped.split("/")
    recipe, _ = load_recipe(name, scale=scale)
    for method in (recipe.method, *recipe.methods):
        assert MethodSettings.model_validate(method.label) == method
        assert MethodSettings.model_validate(method.canonical()).canonical() == method.canonical()
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", method.slug)

"""Labels of methods in the committed records and in the shipped recipes: the same fields, text and folders as ever."""

import json
from pathlib import Path

from wellcond.lab.load_recipe import merge
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

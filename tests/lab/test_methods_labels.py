"""Labels of methods in the committed records give the folders that were recorded, and their own text."""

import json
from pathlib import Path

from wellcond.lab.methods import MethodSettings

RESULTS = Path(__file__).parents[2] / "results"


def test_labels_of_the_records_give_the_recorded_folders_and_fields():
    seen = set()
    for path in RESULTS.rglob("*.jsonl"):
        with path.open(encoding="utf-8") as lines:
            comparison = json.loads(next(lines))
        for recorded in comparison.get("methods", []):
            method = MethodSettings.model_validate(recorded["label"])
            assert (method.label, method.slug) == (recorded["label"], recorded["slug"]), path
            again = MethodSettings.model_validate(method.canonical())
            assert again.model_dump(exclude={"label"}) == method.model_dump(exclude={"label"})
            seen.add(method.label)
    assert len(seen) > 60

"""The committed records are small, of recipes that load, and agree with what ships."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from wellcond.lab.recipe import Recipe, config_hash, load_recipe
from wellcond.lab.records import leaves_of, load_comparisons
from wellcond.lab.report.tuning import find_tuning
from wellcond.lab.settings import shipped_recipes

RESULTS = Path(__file__).parents[2] / "results"
MOST_FILES, MOST_BYTES = 150, 6_000_000


def test_records_are_few_and_small_and_hold_nothing_that_can_be_rebuilt():
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "."],
        cwd=RESULTS, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    files = [RESULTS / name for name in names if name and (RESULTS / name).is_file()]
    assert 50 < len(files) < MOST_FILES and sum(path.stat().st_size for path in files) < MOST_BYTES
    drawn = {path.name for path in files if path.suffix in (".csv", ".html", ".svg", ".png")}
    pages = [RESULTS / name / "README.md" for name in (".", "evidence", "method")]
    shown = {Path(name).name for page in pages for name in re.findall(r"!\[.*?\]\((\S+)\)", page.read_text("utf-8"))}
    assert drawn == shown and len(shown) <= 8 and not [path for path in files if "report" in path.parts]


def test_every_stored_configuration_is_a_recipe_of_today():
    configs = {}
    for comparison in load_comparisons(RESULTS):
        for run in comparison.runs:
            config = {key: value for key, value in run.part("config").items() if key != "seed"}
            configs.setdefault(json.dumps(config, sort_keys=True), (run.file, config))
    assert len(configs) > 300
    for file, config in configs.values():
        recipe = Recipe.model_validate(config)
        again = dict(leaves_of(recipe.config(recipe.method, 0)))
        assert {path: again.get(path) for path, _ in leaves_of(config)} == dict(leaves_of(config)), file
        # so that a comparison that is unpacked repeats none of its runs
        assert config_hash(recipe.config(recipe.method, 0)) == config_hash({**config, "seed": 0}), file


def test_links_of_claims_lead_to_the_records():
    links = re.findall(r"\[runs\]\(([^)]+)\)", (RESULTS / "claims.md").read_text("utf-8"))
    assert len(links) > 20 and all((RESULTS / link).is_file() for link in links)


TUNED = [name[5:] for name, text in shipped_recipes().items() if name.startswith("tiny/") and "\ntuned:" in text]
FROZEN = "calibrated(positions=0.5)"
"""`calibrated` as the records call it: the option is its default by now."""


@pytest.mark.parametrize("name", TUNED)
def test_recipes_carry_the_rates_that_their_records_found(name):
    recipe, _ = load_recipe(name, scale="tiny")
    [comparison] = load_comparisons(RESULTS.parent / recipe.tuned.record)
    names = {row["label"]: row["canonical"].replace(FROZEN, "calibrated") for row in comparison.search["methods"]}
    tuning = find_tuning(replace(comparison, methods=tuple(names)))
    found = {names[method.label]: dict(method.best.values) for method in tuning.methods}
    assert recipe.tuned.values == {name: found[name] for name in recipe.tuned.values}
    assert {"default", "conditioned"} <= set(recipe.tuned.values)


def test_the_recipe_of_the_demo_has_a_searched_rate_for_each_method():
    recipe, _ = load_recipe("digits")
    assert {method.canonical() for method in recipe.methods} <= set(recipe.tuned.values)
    assert "calibrated" in {method.canonical() for method in recipe.methods}

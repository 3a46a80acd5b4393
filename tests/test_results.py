"""The committed records make the committed tables, byte for byte, and are small."""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from wellcond.lab.load_recipe import load_recipe, shipped_recipes
from wellcond.lab.report.glue import rebuild_glue
from wellcond.lab.report.page import build_report
from wellcond.lab.reproduce.claims import judge_claims
from wellcond.lab.reproduce.claims_page import claims_markdown

RESULTS = Path(__file__).parents[1] / "results"
COMPARISONS = sorted(path.parent for path in RESULTS.rglob("comparison.json"))
GLUE = sorted(path.parent for path in RESULTS.rglob("glue.md"))
MOST_BYTES = 12_000_000


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_records_make_the_tables(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("report"))
    build_report(copy, pictures=False)
    made = (copy / "report" / "report.md").read_bytes()
    assert made == (folder / "report" / "report.md").read_bytes(), "run: wellcond report results --no-pictures"


@pytest.mark.parametrize("folder", GLUE, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_records_make_the_tables_of_glue(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("glue.*"))
    rebuild_glue(copy)
    assert (copy / "glue.md").read_bytes() == (folder / "glue.md").read_bytes()


def test_the_records_are_small_and_hold_nothing_that_can_be_rebuilt():
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "."],
        cwd=RESULTS, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    files = [RESULTS / name for name in names if name and (RESULTS / name).is_file()]
    assert len(files) > 100 and sum(path.stat().st_size for path in files) < MOST_BYTES
    rebuilt = [
        path
        for path in files
        if path.suffix in (".csv", ".jsonl", ".html", ".svg", ".png") or "report" in path.relative_to(RESULTS).parts
    ]
    pages = [RESULTS / name / "README.md" for name in (".", "evidence", "method")]
    shown = {Path(name).name for page in pages for name in re.findall(r"!\[.*?\]\((\S+)\)", page.read_text("utf-8"))}
    assert len(shown) <= 8 and {path.name for path in rebuilt} == {"report.md"} | shown


def test_records_make_the_verdicts_on_claims():
    made = claims_markdown(judge_claims(RESULTS))
    assert made == (RESULTS / "claims.md").read_text("utf-8"), "run: wellcond claims results"


def test_links_of_claims_lead_to_the_records():
    links = re.findall(r"\[table\]\(([^)]+)\)", (RESULTS / "claims.md").read_text("utf-8"))
    assert len(links) > 20 and all((RESULTS / link).is_file() for link in links)


TUNED = [name[5:] for name, text in shipped_recipes().items() if name.startswith("tiny/") and "\ntuned:" in text]
FROZEN = "calibrated(positions=0.5)"
"""`calibrated` as the records call it: the option is its default by now."""


@pytest.mark.parametrize("name", TUNED)
def test_recipes_carry_the_rates_that_their_records_found(name):
    recipe, _ = load_recipe(name, scale="tiny")
    search = json.loads((RESULTS.parent / recipe.tuned.record / "tuning.json").read_text("utf-8"))
    found = {row["canonical"].replace(FROZEN, "calibrated"): row["best"]["values"] for row in search["methods"]}
    assert recipe.tuned.values == {name: found[name] for name in recipe.tuned.values}
    assert {"default", "conditioned"} <= set(recipe.tuned.values)


def test_the_recipe_of_the_demo_ships_its_search():
    recipe, _ = load_recipe("digits")
    assert {method.canonical() for method in recipe.methods} <= set(recipe.tuned.values)
    search = json.loads((RESULTS.parent / recipe.tuned.record / "tuning.json").read_text("utf-8"))
    shipped = resources.files("wellcond.lab") / "recipes" / "tiny" / "digits.tuning.json"
    assert json.loads(shipped.read_text("utf-8")) == search

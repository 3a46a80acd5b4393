"""The committed records make the committed tables, byte for byte."""

import re
import shutil
from pathlib import Path

import pytest

from wellcond.report.build import build_report
from wellcond.report.glue import rebuild_glue
from wellcond.reproduce.claims import judge_claims
from wellcond.reproduce.claims_page import write_claims

RESULTS = Path(__file__).parents[1] / "results"
COMPARISONS = sorted(path.parent for path in RESULTS.rglob("comparison.json"))


GLUE = sorted(path.parent for path in RESULTS.rglob("glue.md"))


def records_only(folder, names):
    return [name for name in names if name in ("report", "checkpoints", "lock")]


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_records_make_the_tables(folder, tmp_path):
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=records_only)
    build_report(copy, pictures=False)
    made = [path for path in (copy / "report").rglob("*") if path.is_file()]
    assert len(made) > 4
    for path in made:
        assert path.read_bytes() == (folder / "report" / path.relative_to(copy / "report")).read_bytes(), path.name


@pytest.mark.parametrize("folder", GLUE, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_records_make_the_tables_of_glue(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("checkpoints", "glue.*"))
    rebuild_glue(copy)
    for name in ("glue.md", "glue.csv", "glue.json"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes(), name


def test_records_make_the_verdicts_on_claims(tmp_path):
    write_claims(judge_claims(RESULTS), tmp_path / "claims.md", tmp_path)
    assert (tmp_path / "claims.md").read_bytes() == (RESULTS / "claims.md").read_bytes(), "run: wellcond claims results"
    assert "<script" not in (tmp_path / "claims.html").read_text("utf-8")


def test_links_of_claims_written_elsewhere_lead_to_the_records(tmp_path):
    write_claims(judge_claims(RESULTS), tmp_path / "deep" / "claims.md", RESULTS)
    links = re.findall(r"\[table\]\(([^)]+)\)", (tmp_path / "deep" / "claims.md").read_text("utf-8"))
    assert len(links) > 20 and all((tmp_path / "deep" / link).is_file() for link in links)

"""Claims, tables and figures that are committed beside the records are what the records give."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wellcond.cli.main import load_app
from wellcond.errors import RunRecordError
from wellcond.lab.reproduce.claims import judge_claims
from wellcond.lab.reproduce.evidence import check_committed

RESULTS = Path(__file__).parents[3] / "results"


def invoke(*words):
    return CliRunner().invoke(load_app(), [str(word) for word in words])


def test_records_make_what_is_committed_byte_for_byte():
    assert check_committed(RESULTS).startswith("9 files are what the records give")


def test_a_difference_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "evidence").mkdir()
    shutil.copy(RESULTS / "evidence" / "davit.jsonl", tmp_path / "evidence")
    done = invoke("report", tmp_path, "--check")
    assert done.exit_code != 0 and not (tmp_path / "claims.md").exists()
    assert invoke("claims", tmp_path).exit_code == 0
    assert invoke("report", tmp_path, "--check").exit_code == 0
    (tmp_path / "claims.md").write_text((tmp_path / "claims.md").read_text().replace("worse", "better"))
    with pytest.raises(RunRecordError, match=r"claims\.md") as caught:
        check_committed(tmp_path)
    assert caught.value.path == tmp_path and invoke("report", tmp_path, "--check").exit_code != 0


def test_a_figure_of_another_matplotlib_is_reported_as_not_compared(tmp_path):
    (tmp_path / "evidence").mkdir()
    shutil.copy(RESULTS / "evidence" / "davit.jsonl", tmp_path / "evidence")
    shutil.copy(RESULTS / "evidence" / "causal.jsonl", tmp_path / "evidence")
    assert invoke("claims", tmp_path).exit_code == 0
    path = tmp_path / "evidence" / "causal.svg"
    path.write_text(path.read_text().replace("Matplotlib v", "Matplotlib v0.", 1))
    assert "not compared" in check_committed(tmp_path) and "causal.svg" in check_committed(tmp_path)
    path.write_text(path.read_text().replace("Matplotlib v0.", "Matplotlib v", 1).replace("#4269d0", "#000000"))
    with pytest.raises(RunRecordError, match="causal"):
        check_committed(tmp_path)


def test_a_packed_comparison_is_reported_by_its_file(tmp_path):
    shutil.copy(RESULTS / "evidence" / "davit.jsonl", tmp_path)
    done = invoke("report", tmp_path / "davit.jsonl", "--no-pictures")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "davit" / "report" / "report.md").read_text()
    assert text.startswith("# DaViT") and (tmp_path / "davit" / "report" / "tables" / "summary.csv").is_file()
    (tmp_path / "notes.txt").write_text("mine")
    assert invoke("report", tmp_path / "notes.txt").exit_code == 2


def test_no_set_of_runs_counts_under_two_claims():
    counted = [one for one in judge_claims(RESULTS) if one.counted]
    assert len({one.claim.rule.runs for one in counted}) == len(counted) > 20
    decided = [one.verdict.evidence for one in counted if one.verdict.word != "no records"]
    assert len(set(decided)) == len(decided)  # the same numbers twice would be the same runs

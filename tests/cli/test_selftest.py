"""The self-test runs on this machine's CPU, writes what it found after every check, and never shows a traceback."""

import json

import pytest

from wellcond.cli import selftest


def only(*names):
    return [part for name in names for part in ("--only", name)]


def test_the_report(run, tmp_path):
    file = tmp_path / "report.json"
    code, out = run("selftest", "--device", "cpu", "-o", file, *only("weights", "kernels", "bfloat16", "waiting"))
    assert code in (None, 0) and "all well" in out
    report = json.loads(file.read_text("utf-8"))
    assert {name: one["status"] for name, one in report["checks"].items()} == {
        "weights": "ok", "kernels": "ok", "bfloat16": "ok", "waiting": "skipped",
    }  # fmt: skip
    assert "above the exact largest logit" in report["checks"]["kernels"]["flash_attention float32"]
    assert (tmp_path / "report.txt").read_text("utf-8").splitlines()[0] in out


def test_a_check_that_fails_is_a_line_of_the_report(run, tmp_path, monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: an illegal instruction was encountered\nlong text")

    def other(device):
        raise selftest.Differs("weights: 0.5 away")

    monkeypatch.setattr(selftest, "CHECKS", {"broken": broken, "other": other})
    code, out = run("selftest", "--device", "cpu", "-o", tmp_path / "report.json")
    assert code in (None, 0) and "2 of 2 checks differ or failed" in out
    checks = json.loads((tmp_path / "report.json").read_text("utf-8"))["checks"]
    assert checks["broken"]["why"] == "RuntimeError: CUDA error: an illegal instruction was encountered"
    assert checks["other"]["status"] == "DIFFERS"


def test_mistakes(run, tmp_path):
    code, _ = run("selftest", "--device", "abacus", "-o", tmp_path / "report.json")
    assert "--device: expected one that works here" in str(code)
    code, _ = run("selftest", "--device", "cpu", "-o", tmp_path / "report.json", "--only", "luck")
    assert "--only: expected some of weights" in str(code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_check(run, tmp_path):
    code, out = run("selftest", "--device", "cpu", "-o", tmp_path / "report.json")
    assert code in (None, 0) and "all well" in out, out

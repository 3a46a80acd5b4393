"""The scripts of examples/ run, and their assertions hold."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = {"05_compare_methods.py"}  # trains twelve models: half a minute
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.name in SLOW)) for path in SCRIPTS],
)
@pytest.mark.filterwarnings("default")
def test_example(path, tmp_path, monkeypatch, capsys):
    text = path.read_text("utf-8")
    assert "assert " in text and f"Run: python examples/{path.name}" in text
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_there_are_five():
    assert len(SCRIPTS) == 5

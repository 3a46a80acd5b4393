"""The scripts of examples/ run as a user runs them, and their assertions hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = {"05_compare_methods.py"}  # trains twelve models: half a minute
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.name in SLOW)) for path in SCRIPTS],
)
def test_example(path, tmp_path):
    text = path.read_text("utf-8")
    assert "assert " in text and f"Run: python examples/{path.name}" in text
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4


def test_there_are_five():
    assert len(SCRIPTS) == 5

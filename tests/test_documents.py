"""Every Python block of the documents runs; every command of the README exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(path.read_text())
    assert blocks or path.name not in ("README.md", "layouts.md")
    namespace = {}
    for block in blocks:  # one document is one session
        exec(compile(block, str(path), "exec"), namespace)


def test_the_readme_names_only_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_relative_links_lead_somewhere():
    for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"

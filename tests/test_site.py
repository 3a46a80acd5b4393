"""The documentation builds without a warning and needs no network to be read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
for package in ("mkdocs", "material", "mkdocstrings"):
    pytest.importorskip(package, reason="the docs extra is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_it_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    loading = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?https?:|<link\b[^>]*rel=\"?(?:stylesheet|preconnect)\"?[^>]*https?:"
    )
    assert [page.name for page in pages if loading.search(page.read_text("utf-8"))] == []


def test_errata_lead_to_their_tests(site):
    page = (site / "theory.html").read_text("utf-8")
    links = re.findall(r'href="(tests/theory/test_errata_\w+\.py\.html)#(test_E\d+\w*)"', page)
    assert len(links) == 25
    for path, anchor in links:
        shown = (site / path).read_text("utf-8")
        assert f'id="{anchor}"' in shown and re.search(rf">{anchor}<", shown)


def test_the_reference_has_signatures_and_examples(site):
    page = (site / "api" / "verbs.html").read_text("utf-8")
    assert 'id="wellcond.init_"' in page and "generator" in page and "&gt;&gt;&gt;" in page

"""Every page, the doctor and the command line recommend one initialisation, and say how it did in its test."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import wellcond as wc
from wellcond.init import recommended

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md", DOCS / "start.md", *sorted((DOCS / "training").glob("*.md"))]
FRONT = [ROOT / "README.md", DOCS / "index.md", DOCS / "methods" / "calibrated.md"]
TABLES = [ROOT / "README.md", DOCS / "methods" / "calibrated.md"]
CALL = re.compile(
    r"""init_\(\s*\w+,\s*["'](\w+)["']|\binit=["'](\w+)["']|\binit=\{\s*["']method["']:\s*["'](\w+)["']"""
)


def initialisations(text):
    """Methods by which a text initialises a model, each with the paragraph around it."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\|)", text):
        for groups in CALL.findall(paragraph):
            yield next(filter(None, groups)), paragraph


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_initialises_a_model_from_scratch_by_the_recommendation(path):
    found = list(initialisations(path.read_text("utf-8")))
    assert recommended.METHOD in {method for method, _ in found}
    for method, paragraph in found:
        without_tokens = method == recommended.WITHOUT_TOKENS and "Swin" in paragraph and "XCiT" in paragraph
        assert method == recommended.METHOD or without_tokens, paragraph


def test_the_pattern_finds_what_pages_write():
    lines = [
        'wc.init_(model, "a")',
        'prepare(m, init="b")',
        'Callback(init={"method": "c", "share": 1})',
        "init_(base, 'd')",
    ]
    assert [method for method, _ in initialisations("\n\n".join(lines))] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("path", FRONT, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_where_it_is_recommended_the_failed_criterion_is_said(path):
    text = " ".join(path.read_text("utf-8").split())
    assert "preregistered" in text and "three were required" in text and "six of" in text
    assert "Muon, another optimiser, has the better mean on five of the seven" in text
    for task in ("ViT", "XCiT", "Swin", "ListOps", "IMDB", "masked language model", "GPT-2"):
        assert task in text, task


def rows_of(text):
    """Cells of a table by the task, which is the first cell without its unit."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    named = (
        (re.sub(r", (%|perplexity)$", "", cells[0]).replace("masked LM", "masked language model"), cells)
        for cells in rows
    )
    return {name: [cell.strip("*").replace("**", "").strip("()") for cell in cells[1:]] for name, cells in named}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_its_numbers_are_those_of_the_record(path):
    record = rows_of((ROOT / recommended.RECORD).read_text("utf-8").partition("- **It is no win")[0])
    shown = {name: cells for name, cells in rows_of(path.read_text("utf-8")).items() if name in record}
    tasks = [name for name in record if name.partition(",")[2] and len(record[name]) > 5]
    assert list(shown) == tasks and len(tasks) == 7
    for name, cells in shown.items():
        assert cells == record[name][: len(cells)], name


def test_the_evidence_that_is_printed_is_in_the_record():
    record = " ".join((ROOT / recommended.RECORD).read_text("utf-8").split())
    assert "no win as preregistered" in record and "on six tasks" in record
    assert "| CIFAR-10, ViT, % | 31.2 |" in record and "**36.1**" in record
    tables = (ROOT / recommended.TABLES).read_text("utf-8")
    for default, gaussian in (("30.7", "32.9"), ("25.5", "26.4")):
        assert re.search(rf"\| gaussian \| [\d.]+ \| {gaussian} ±", tables)
        assert re.search(rf"\| (scale-true default|strong default) .*\| {default} ±", tables)


def test_the_verb_and_the_command_have_it_as_default(run):
    assert inspect.signature(wc.init_).parameters["method"].default == recommended.METHOD
    assert (
        f'"{recommended.METHOD}"' in recommended.LINE and recommended.WITHOUT_TOKENS in recommended.LINE_WITHOUT_TOKENS
    )
    code, out = run("init", "--help")
    assert code == 0 and recommended.METHOD in out


def test_the_verb_without_a_batch_says_what_it_needs():
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match=r"needs batch=\.\.\."):
        wc.init_(model)

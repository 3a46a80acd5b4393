"""Every page, the doctor and the command line recommend one initialisation, and say how it did in its test."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import wellcond as wc
from wellcond.init import recommended

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STARTS = [ROOT / "README.md", DOCS / "index.md", DOCS / "start.md"]
PAGES = [*STARTS, *sorted((DOCS / "training").glob("*.md"))]
TABLE = DOCS / "methods" / "calibrated.md"
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
    text = path.read_text("utf-8")
    found = list(initialisations(text))
    assert recommended.METHOD in {method for method, _ in found} or (path not in STARTS and not found)
    for method, paragraph in found:
        without_tokens = method == recommended.WITHOUT_TOKENS and "Swin" in paragraph and "XCiT" in paragraph
        of_a_paper = method == "conditioned" and "**Paper C**" in paragraph
        assert method == recommended.METHOD or without_tokens or of_a_paper, paragraph


def rows_of(text):
    """Cells of a table by the task, which is the first cell without its unit."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    named = (
        (re.sub(r", (%|perplexity)$", "", cells[0]).replace("masked LM", "masked language model"), cells)
        for cells in rows
    )
    return {name: [cell.strip("*").replace("**", "").strip("()") for cell in cells[1:]] for name, cells in named}


def test_its_numbers_are_those_of_the_record():
    record = rows_of((ROOT / recommended.RECORD).read_text("utf-8").partition("- **It is no win")[0])
    shown = {name: cells for name, cells in rows_of(TABLE.read_text("utf-8")).items() if name in record}
    tasks = [name for name in record if name.partition(",")[2] and len(record[name]) > 5]
    assert list(shown) == tasks and len(tasks) == 7
    for name, cells in shown.items():
        assert cells == record[name][: len(cells)], name


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

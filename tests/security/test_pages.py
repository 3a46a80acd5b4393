"""Text of records, recipes and data in pages: shown as text, never read as markup or script."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import wellcond as wc
from lab.report.fake_runs import FakeMethod, only_comparison, write_comparison, write_with_samples
from lab.report.test_glue import write_score
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.draw import draw_static
from wellcond.lab.report.glue import rebuild_glue
from wellcond.lab.report.page import build_report, gather, render_markdown, render_page
from wellcond.lab.report.table import plain_markdown
from wellcond.lab.reproduce.claims import OTHERS, Claim, Judged, Verdict
from wellcond.lab.reproduce.claims_page import claims_markdown
from wellcond.pages.measurement import render_measurement

TEXTS = {
    "script": "</script><script>alert(1)</script>",
    "attribute": "\"' onmouseover='alert(1)' onerror=alert(1) x=\"",
    "image": "<img src=x onerror=alert(1)><svg/onload=alert(1)>",
    "link": '[x](javascript:alert(1)) <a href="javascript:alert(1)">x</a> ![x](http://evil/x.png)',
    "comment": "<!--<script>",
    "style": "</style></title></textarea><base href=http://evil/>",
    "frame": "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "line": "a\u2028b\u2029</SCRIPT ><sCrIpT>alert(1)</script\n>\n# heading\n<script>",
}


class Elements(HTMLParser):
    """What a browser would load or run in a page."""

    def __init__(self, page):
        super().__init__()
        self.names, self.handlers, self.targets = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.handlers += [key for key, _ in attributes if key.startswith("on")]
        self.targets += [
            value for key, value in attributes if key in ("src", "href", "xlink:href", "action", "srcdoc", "srcset")
        ]


def assert_harmless(page, *, scripts=0):
    found = Elements(page)
    assert found.names.count("script") == scripts
    assert not {"img", "iframe", "base", "object", "embed", "form", "link"} & set(found.names)
    assert not found.handlers
    assert all(target.startswith("#") for target in found.targets), found.targets
    assert "alert(1)" in page or "evil" in page or "script" in page  # it is there, as text


def assert_plain_markdown(text):
    """No element, and no link but those to the files beside it."""
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)  # blocks of code
    assert not re.search(r"<[a-zA-Z/!]", outside)
    for target in re.findall(r"(?<!\\)\]\(([^)]*)\)", outside):
        assert re.fullmatch(r"(figures|tables)/[\w.-]+|report\.html", target), target


KEPT = ("kind", "status", "higher_is_better", "percent", "started")


def poisoned(value, text, key=""):
    """Plain data with a text added to every text in it, but for the words that records are told apart by."""
    if isinstance(value, dict):
        return {name: poisoned(item, text, name) for name, item in value.items()} | {
            f"{text}": text for _ in [0] if key in ("config", "packages")
        }
    if isinstance(value, list):
        return [poisoned(item, text, key) for item in value]
    return value + text if isinstance(value, str) and key not in KEPT else value


ALL = "".join(TEXTS.values())


@pytest.fixture(
    params=[ALL, *(pytest.param(text, marks=pytest.mark.slow) for text in TEXTS.values())], ids=["all", *TEXTS]
)
def text(request):
    return request.param


@pytest.fixture
def records(text, tmp_path):
    """A comparison in whose records every text is hostile: names, labels, reasons, layers, metrics, samples."""
    methods = [
        FakeMethod("default", {0: 0.9, 1: 0.8}),
        FakeMethod("conditioned", {0: 0.8, 1: 0.7}, statuses={1: "diverged"}),
    ]
    metric = {"name": "perplexity", "higher_is_better": False, "percent": False}
    samples = [{"prompt": "", "text": "once"}, {"prompt": "a", "text": "ab"}]
    folder = write_with_samples(tmp_path / "runs", methods, metric, lambda record: samples)
    for path in folder.rglob("*.json"):
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()), text)))
    for path in folder.rglob("*.jsonl"):
        rows = [poisoned(json.loads(line), text) for line in path.read_text().splitlines()]
        renamed = [
            {name + text if name == "perplexity" else name: value for name, value in row.items()} for row in rows
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    for path in folder.rglob("run.json"):
        record = json.loads(path.read_text())
        for part in ("final", "best"):
            record[part] = {n + text if n == "perplexity" else n: v for n, v in (record[part] or {}).items()}
        path.write_text(json.dumps(record))
    return folder


def test_the_page_of_a_comparison(records, text):
    comparison = only_comparison(records)
    assert text in comparison.title and any(text in method for method in comparison.methods)
    content = gather(analyse(comparison))
    page = render_page(content)
    assert_harmless(page, scripts=1)
    assert_plain_markdown(render_markdown(content))
    [path] = build_report(records, pictures=False)
    assert path.is_file()


def test_a_figure_in_a_file(tmp_path):
    label = "".join(TEXTS.values()) + "$\\frac{1}{0}$"
    folder = write_comparison(tmp_path, [FakeMethod(label, {0: 0.9, 1: 0.8}, slug="x")], points=2, layers=1, heads=1)
    figure = next(figure for figure in gather(analyse(only_comparison(folder))).figures if not figure.bars)
    drawn = draw_static(figure).decode()
    found = Elements(drawn)
    assert "script" not in found.names and "img" not in found.names and not found.handlers


def test_the_page_of_a_measurement(text):
    report = wc.measure(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 4, 8))
    data = poisoned(report.to_dict(), text)
    data["run"] = {"model": text, "input": text, "version": text}
    data["conditioning"] = {"method": text, text: text, "sites": [text]}
    assert_harmless(render_measurement(data))


def test_the_table_of_claims(text):
    verdict = Verdict(word="better", evidence=text, as_claimed=True)
    claims = [
        Claim(paper=paper, claim=text, setup=text, table="C-T1", rule={"kind": kind})
        for paper in "CS"
        for kind in ("gain", *OTHERS)
    ]
    judged = [Judged(claim=claim, ran=text, verdict=verdict) for claim in claims]
    judged += [
        Judged(claim=claim, ran=text, verdict=verdict, stand_in=True, same_runs=other)
        for claim in claims
        for other in (None, claim)
    ]
    rows = [line for line in claims_markdown(judged).splitlines() if line.startswith("|")]
    assert_plain_markdown("\n".join(rows))


def test_the_tables_of_glue(text, tmp_path):
    methods = [FakeMethod(label + text, {0: 0.9}, slug=label) for label in ("default", "other")]
    folder = write_comparison(tmp_path / "words", methods, title=text, points=2, layers=1, heads=1)
    for label in ("default", "other"):
        write_score(folder / label / "seed0", "cola", 0, 0.3, accuracy=0.7)
    rebuild_glue(folder)
    assert_plain_markdown((folder / "glue.md").read_text())


def test_a_spreadsheet_computes_no_record(tmp_path):
    labels = ("default", "=HYPERLINK(1)", "@SUM(1)", "+cmd|x", "-cmd|x")
    methods = [FakeMethod(label, {0: 0.9, 1: 0.8}, slug=f"m{at}") for at, label in enumerate(labels)]
    folder = write_comparison(tmp_path / "words", methods, title="words", points=2, layers=1, heads=1)
    build_report(folder, pictures=False)
    texts = [path.read_text("utf-8") for path in (folder / "report").rglob("*.csv")]
    cells = [cell for text in texts for row in csv.reader(io.StringIO(text)) for cell in row]
    assert "'=HYPERLINK(1)" in cells and "'+cmd|x" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "@", "+c", "-c"))]


def test_markdown_is_escaped(text):
    shown = plain_markdown(text)
    assert "\n" not in shown and not re.search(r"<[a-zA-Z/!]", shown)
    assert not re.search(r"(?<!\\)[\[\]`*_|#]", shown)

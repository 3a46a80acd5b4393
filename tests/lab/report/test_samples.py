"""Text of language models and metrics beside the main one: shown where records hold them, whatever they hold."""

import csv
import re
from html.parser import HTMLParser

import pytest

from lab.report.fake_runs import (
    PERPLEXITY,
    FakeMethod,
    only_comparison,
    page_of,
    usual_methods,
    write_comparison,
    write_with_samples,
)
from wellcond.errors import RunRecordError
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.page import build_report, gather, render_markdown
from wellcond.lab.report.samples import find_samples
from wellcond.lab.report.table import visible
from wellcond.lab.report.tables import build_tables

pytest.importorskip("matplotlib")
PROMPT = "Once upon"
EVIL = (
    "</pre></section><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&lt;b&gt;\n"
    "```\n# no heading\n~~~\n" + "x" * 400 + "\n\x00\x1b[31m\u202etxet\u2028\ud800 é 日本 \ufffd\t|end"
)


def lm_methods():
    return [
        FakeMethod("default", {0: 30.0, 1: 31.0}),
        FakeMethod("polar", {1: 28.0, 2: 29.5}),
        FakeMethod("balanced", {0: 40.0}),
    ]


def write_lm(folder, change=None):
    """Runs with samples; `change` edits a record."""

    def samples_of(record):
        name = f"{record['method']} {record['seed']}"
        return [{"prompt": PROMPT, "text": f"{PROMPT} by {name}"}, {"prompt": "", "text": f"Free, by {name}"}]

    return write_with_samples(folder, lm_methods(), PERPLEXITY, samples_of, change)


def markdown(comparison):
    analysis = analyse(comparison)
    return render_markdown(gather(analysis))


class Reader(HTMLParser):
    """Texts of the samples, and every element on the page."""

    def __init__(self, page):
        super().__init__()
        self.samples, self.tags, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "pre":
            self.inside = True
            self.samples.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data):
        if self.inside:
            self.samples[-1] += data


def test_each_method_shows_the_samples_of_its_first_seed(tmp_path):
    comparison = only_comparison(write_lm(tmp_path))
    found = find_samples(comparison)
    assert list(found) == [PROMPT, ""]
    assert [sample["title"] for sample in found[""]] == ["default, seed 0", "polar, seed 1", "balanced, seed 0"]
    page, text = page_of(comparison), markdown(comparison)
    assert '<a href="#samples">Samples</a>\n<a href="#runs">Runs</a>' in page
    shown = [sample.lstrip("\n") for sample in Reader(page).samples]
    assert shown == [
        *(f"{PROMPT} by {name}" for name in ("default 0", "polar 1", "balanced 0")),
        *(f"Free, by {name}" for name in ("default 0", "polar 1", "balanced 0")),
    ]
    assert f"<b>{PROMPT}</b> by default 0" in page
    assert f"### With a beginning: {PROMPT}\n\ndefault, seed 0:\n\n```text\n{PROMPT} by default 0\n```\n" in text
    assert text.index("## Samples") < text.index("## Figures") and "default 1" not in text


@pytest.mark.parametrize("status", ["diverged", "interrupted"])
def test_a_run_that_did_not_finish_shows_none(tmp_path, status):
    def change(record):
        if record["seed"] == 1:
            record["status"] = status

    found = find_samples(only_comparison(write_lm(tmp_path, change)))
    assert [sample["title"] for sample in found[PROMPT]] == ["default, seed 0", "polar, seed 2", "balanced, seed 0"]


def test_text_that_looks_like_markup_stays_text(tmp_path):
    folder = write_lm(tmp_path / "evil", lambda r: r.update(samples=[{"prompt": "", "text": EVIL}]))
    evil = Reader(page_of(only_comparison(folder)).encode().decode())
    expected = visible(EVIL)
    assert [sample.removeprefix("\n") for sample in evil.samples] == [expected] * 3
    assert "img" not in evil.tags and evil.tags.count("script") == 1
    assert "<U+0000><U+001B>[31m<U+202E>txet<U+2028><U+D800> é 日本 \ufffd\t|end" in expected
    (written,) = build_report(folder, pictures=False)
    lines = written.read_text("utf-8").split("\n")
    start = lines.index("````text")
    block = lines[start + 1 : lines.index("````", start + 1)]
    assert "# no heading" in block and "".join(block).count("x") == EVIL.count("x")
    assert max(map(len, block)) <= 100 and "```" in block and "x" * 100 in block
    assert sum(line == "````" for line in lines) == 3


def test_a_text_that_begins_with_a_line_break_keeps_it(tmp_path):
    comparison = only_comparison(write_lm(tmp_path, lambda r: r.update(samples=[{"prompt": "", "text": "\n\nx"}])))
    assert '<pre class="sample">\n\n\nx</pre>' in page_of(comparison)
    assert "```text\n\n\nx\n```" in markdown(comparison)


def test_why_nothing_was_written_is_said(tmp_path):
    samples = [{"prompt": "", "problem": "ValueError: <b> 8 tokens"}]
    comparison = only_comparison(write_lm(tmp_path, lambda r: r.update(samples=samples)))
    assert "Nothing was written: ValueError: &lt;b&gt; 8 tokens" in page_of(comparison)
    assert "nothing was written (ValueError: &lt;b&gt; 8 tokens)" in markdown(comparison)


@pytest.mark.parametrize("samples", ["text", [1], [{"prompt": 3, "text": "x"}], [{"prompt": ""}], {"a": 1}], ids=repr)
def test_samples_of_another_form_are_named(tmp_path, samples):
    folder = write_lm(tmp_path, lambda r: r.update(samples=samples))
    with pytest.raises(RunRecordError, match="expected 'samples' to be a list of"):
        build_report(folder)
    assert not list(folder.rglob("report.*"))


def test_records_without_samples_make_the_same_files_as_ever(tmp_path):
    plain = write_comparison(tmp_path / "plain", lm_methods(), metric=PERPLEXITY, points=2, layers=1, heads=1)
    other = write_lm(tmp_path / "other", lambda r: r.update(samples=[]))
    texts = [(page_of(only_comparison(folder)), markdown(only_comparison(folder))) for folder in (plain, other)]
    assert texts[0] == texts[1]
    assert "ample" not in texts[0][1].replace("samples per second", "") and "<pre" not in texts[0][0]


# Other metrics


def with_metrics(record):
    record["final"] |= {"bits_per_byte": 1.0 + 0.5 * record["seed"], "perplexity_per_word": 100.0 + record["seed"]}


def other_table(comparison):
    return next((table for table in build_tables(analyse(comparison)) if table.name == "other_metrics"), None)


def test_other_metrics_have_a_table(tmp_path):
    folder = write_lm(tmp_path, with_metrics)
    table = other_table(only_comparison(folder))
    assert table.header == ("method", "bits per byte", "perplexity per word")
    assert table.rows[0] == ("default", "1.25 ± 0.3536", "100.5 ± 0.7071")
    assert table.rows[2] == ("balanced", "1", "100")
    assert "At the last evaluation" in table.notes[0]
    (written,) = build_report(folder, pictures=False)
    with open(written.parent / "tables/other_metrics.csv", newline="") as file:
        assert next(csv.DictReader(file)) == {
            "method": "default", "bits_per_byte_mean": "1.25", "bits_per_byte_sd": "0.3535533905932738",
            "bits_per_byte_n": "2", "perplexity_per_word_mean": "100.5",
            "perplexity_per_word_sd": "0.7071067811865476", "perplexity_per_word_n": "2",
        }  # fmt: skip
    summary = re.search(r'<section id="summary".*?<section id="learning"', page_of(only_comparison(folder)), re.S)[0]
    assert "Other metrics" in summary and "## Other metrics" in written.read_text("utf-8")


def test_a_value_that_is_missing_or_not_finite_is_in_no_mean(tmp_path):
    def change(record):
        with_metrics(record)
        if record["method"] == "default" and record["seed"] == 0:
            record["final"]["bits_per_byte"] = "inf"
        if record["method"] == "balanced":
            del record["final"]["bits_per_byte"]

    table = other_table(only_comparison(write_lm(tmp_path, change)))
    column = table.header.index("bits per byte")
    assert [row[column] for row in table.rows] == ["1.5", "1.75 ± 0.3536", "–"]


def test_on_a_test_split_they_are_those_of_the_test(tmp_path):
    def change(record):
        with_metrics(record)
        scores = {"loss": 3.0, "perplexity": 20.0, "bits_per_byte": 2.0}
        record["test"] = {"step": 3, "epoch": 1.0, "weights": "last", **scores}

    table = other_table(only_comparison(write_lm(tmp_path, change)))
    assert table.header == ("method", "bits per byte") and table.rows[0] == ("default", "2 ± 0")
    assert table.notes[0].startswith("On the test split, with the last weights")


def test_the_metric_itself_and_the_loss_make_no_table(tmp_path):
    assert other_table(only_comparison(write_comparison(tmp_path, usual_methods(), points=2))) is None


# The page as a reader meets it

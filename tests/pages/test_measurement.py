import copy
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import wellcond as wc
from wellcond.errors import ReportDataError
from wellcond.pages.measurement import render_measurement

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Every element is closed in its order; what could load or run something is collected."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.handlers, self.names = [], [], [], []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.loads += [value for key, value in attributes if key in ("src", "href", "xlink:href", "srcset", "action")]
        self.handlers += [key for key, _ in attributes if key.startswith("on")]
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.handle_starttag(name, attributes)
        self.open.pop()

    def handle_endtag(self, name):
        assert self.open.pop() == name


def check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )  # fmt: skip
    return wc.measure(model, torch.randn(2, 5, 8), samples=2)


@pytest.fixture
def data(report):
    return copy.deepcopy(report.to_dict())


def kill(head, kappa=1.5):
    """A head that collapsed, and whose condition number looks excellent."""
    head.update(dead=True, verdict="dead head", mean_kappa=kappa, samples=[kappa])
    head["diagnosis"].update(dead=True, verdict="dead head", explanation="attention has collapsed")
    head["diagnosis"]["attention"].update(entropy=0.0, normalised_entropy=float("nan"))


def row(page, layer, head):
    """Of the table of heads: condition number with its colour, and the other columns."""
    found = re.search(rf'<th scope="row">{re.escape(layer)}, head {head}.*?</tr>', page, re.S).group()
    return re.findall(r"<td class=\"\w\"(.*?)</td>", found, re.S)


def test_the_page_is_whole_and_loads_nothing(data):
    page = render_measurement(data)
    found = check(page)
    assert page.startswith("<!DOCTYPE html>") and '<html lang="en">' in page and "prefers-color-scheme:dark" in page
    assert not found.loads and not found.handlers and "script" not in found.names
    assert "http://" not in page and "https://" not in page and "@import" not in page and "nan" not in page
    pictures = re.findall(r"<svg .*?>", page)
    assert pictures and all('role="img"' in p or 'aria-hidden="true"' in p for p in pictures)


def test_every_layer_and_head_is_in_the_table(data):
    page = render_measurement(data)
    for layer in data["layers"]:
        for head in layer["heads"]:
            shown = row(page, layer["name"], head["index"])
            assert shown[0].endswith(f">{head['mean_kappa']:.4g}") and "style=" in shown[0]
            assert head["diagnosis"]["explanation"] in shown[5]
    assert page.count('<th scope="row">') == 2 * 2 * 2  # heads and weights
    assert page.count("curve c0") == 2  # one line per layer


def test_the_page_says_which_model_which_input_and_which_version(data):
    page = render_measurement(data)
    for said in (data["run"]["model"], data["run"]["input"], f"wellcond {wc.__version__}"):
        assert f"<dd>{said}</dd>" in page
    assert data["run"]["model"].startswith("TransformerEncoder, ") and "float32 (2, 5, 8)" in data["run"]["input"]
    assert render_measurement(data | {"run": {}}).count("<dd>not recorded</dd>") == 3


def test_weights_without_full_rank_and_grouped_heads_show_it(data):
    head = data["layers"][0]["heads"][0]
    head["query_heads"] = [0, 1, 2, 3]
    head["weights"]["k"].update(rank=3, nullity=1, condition_number="inf", pseudo_condition_number=2.5)
    page = render_measurement(data)
    assert "∞ (rank 3 of 4, pseudo 2.5)" in page and "head 0 (query heads 0 to 3)" in page


def test_dead_heads_are_marked_and_off_the_scale(data):
    name = data["layers"][1]["name"]
    others = [row(render_measurement(data), name, 1)[0]]
    kill(data["layers"][1]["heads"][0], kappa=1.0001)
    page = render_measurement(data)
    others.append(row(page, name, 1)[0])
    assert "background:#26282b" in row(page, name, 0)[0] and "1 dead head:" in page and "curve c0 dashed" in page
    assert "background:rgb(" in others[0] and "background:rgb(11,47,98)" not in others[1]


def test_infinite_singular_and_estimated_heads_differ_from_exact_ones(data):
    first, second = data["layers"][0]["heads"]
    third, fourth = data["layers"][1]["heads"]
    first.update(mean_kappa="inf", mean_pseudo_kappa=1e5, why_not_finite="rank 9 of 20, null space: gauge: 11")
    second.update(mean_kappa="inf", mean_pseudo_kappa="inf", why_not_finite="zero to float64 rounding")
    second["jacobian"].update(
        status="numerically singular", sigma_max_bounds=[10.0, 11.0], sigma_rank_bounds=[0.0, 1e-6]
    )  # fmt: skip
    third["jacobian"]["status"] = "estimate"
    fourth["mean_kappa"] = "nan"
    page = render_measurement(data)
    names = [layer["name"] for layer in data["layers"]]
    rank, singular, estimate, unknown = (row(page, names[at // 2], at % 2) for at in range(4))
    assert rank[0].endswith(">∞") and "style=" in rank[0] and rank[1] == ">1e+05" and "exact; rank 9 of 20" in rank[3]
    assert singular[0] == ">~∞" and singular[2] == ">1e+07 to ∞"
    assert re.search(r">~\d", estimate[0]) and unknown[0] == ">–"
    assert "1 numerically singular, 1 estimate of 4 heads" in page


def test_notes_are_honest(data):
    page = render_measurement(data)
    assert "It is not a bound" in page and "Certified interval" in page and "status 'exact'" in page
    for layer in data["layers"]:
        for head in layer["heads"]:
            head["papers_bound_log10"] = -1.0
    assert "exceeds it in 4 of 4 heads." in render_measurement(data)
    assert "is not the Jacobian of the head" in render_measurement(data | {"convention": "stack"})


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>&'"


def test_hostile_strings_are_escaped(data):
    layer, other = data["layers"]
    layer["name"], other["problem"] = HOSTILE, HOSTILE
    data["run"] = dict.fromkeys(("model", "input", "version"), HOSTILE)
    data["conditioning"] = {"method": HOSTILE, HOSTILE: HOSTILE, "sites": [HOSTILE]}
    data["convention"], data["combine"] = HOSTILE, HOSTILE
    head = layer["heads"][0]
    head.update(verdict=HOSTILE, how=HOSTILE, diagnosis=None)
    head["jacobian"].update(status=HOSTILE, method=HOSTILE, reason=HOSTILE, null_space=HOSTILE, rank=HOSTILE)
    layer["heads"][1]["diagnosis"].update(explanation=HOSTILE, norm_q=HOSTILE)
    page = render_measurement(data)
    found = check(page)
    assert "script" not in found.names and "img" not in found.names and not found.handlers and not found.loads
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_heads_without_diagnosis_or_spectrum(data):
    for layer in data["layers"]:
        for head in layer["heads"]:
            head.update(diagnosis=None, verdict="unknown", how="generic derivatives: rotary", papers_bound_log10=None)
            head["jacobian"]["singular_values"] = None
    page = render_measurement(data)
    check(page)
    assert "All heads are too large for a full spectrum" in page
    assert "not plain softmax attention" in page and "generic derivatives: rotary" in page
    assert "surrogate is the expression" not in page


def test_layers_that_were_not_measured_are_listed(data):
    data["layers"][0].update(heads=[], problem="it is broken")
    page = render_measurement(data)
    check(page)
    assert "not measured: it is broken" in page
    data["layers"][1].update(heads=[], problem="so is this")
    assert "No head was measured" in render_measurement(data)
    assert "No head was measured" in render_measurement(data | {"layers": []})


@pytest.mark.parametrize("bad", [[], {}, {"schema": 1, "layers": 3}, {"schema": 1, "layers": [{}]}, None])
def test_data_that_is_no_measurement(bad):
    with pytest.raises(ReportDataError, match="expected"):
        render_measurement(bad)

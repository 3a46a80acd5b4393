"""Tables, frames and one-line representations of reports."""

import dataclasses
import math

import pandas
import pytest
import timm
import torch

import wellcond as wc

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


@pytest.fixture(scope="module")
def report(model):
    return wc.measure(model, X, samples=2)


@pytest.fixture(scope="module")
def infinite(model):
    """The stacked matrix of five tokens in 24 dimensions has no full rank."""
    return wc.measure(model, X[:1], convention="stack")


# -- infinite condition numbers


def test_tables_show_why_a_condition_number_is_infinite_and_the_pseudo_one(infinite, report):
    header, *lines = infinite.to_table().splitlines()
    assert "pseudo" in header and header.endswith("why not finite")
    heads = [head for layer in infinite.layers for head in layer.heads]
    for line, head in zip(lines, heads, strict=True):
        jacobian = head.jacobian
        assert line.split()[2:4] == ["inf", f"{jacobian.pseudo_condition_number:.4g}"]
        assert line.endswith(f"rank {jacobian.rank} of {min(jacobian.shape)}, null space: {jacobian.null_space}")
    assert "pseudo" not in report.to_table() and "why" not in report.to_table()
    row = infinite.to_dict()["layers"][0]["heads"][0]
    assert row["why_not_finite"] == heads[0].why_not_finite and row["mean_pseudo_kappa"] == heads[0].mean_kappa(
        "pseudo"
    )


def test_numerically_singular_shows_the_certified_lower_bound(infinite):
    head = infinite.layers[0].heads[0]
    fields = {"sigma_min": 0.0, "sigma_rank": 0.0, "nullity": 0, "status": "numerically singular"}
    bounds = {"sigma_max_bounds": (10.0, 11.0), "sigma_rank_bounds": (0.0, 1e-6)}
    singular = dataclasses.replace(head.jacobian, **fields, **bounds)
    both = {"strict": (math.inf,), "pseudo": (math.inf,)}
    head = dataclasses.replace(head, jacobian=singular, samples=(math.inf,), both_samples=both)
    assert head.show_pseudo() == ">=1e+07" and "float64 rounding" in head.why_not_finite
    table = dataclasses.replace(infinite, layers=(dataclasses.replace(infinite.layers[0], heads=(head,)),)).to_table()
    header, line = table.splitlines()
    assert line.index("numerically singular") + 20 == header.index("status") + 6, "columns stay in line"


def test_why_a_number_is_not_finite(report, infinite):
    head = report.layers[0].heads[0]
    assert head.why_not_finite == ""
    assert "1 of 2 samples" in dataclasses.replace(head, samples=(head.samples[0], math.inf)).why_not_finite
    zero = dataclasses.replace(infinite.layers[0].heads[0].jacobian, rank=0)
    assert "zero" in zero.why_not_finite and math.isnan(zero.condition_number)
    assert "zero" in wc.spectrum(torch.zeros(3, 4)).why_not_finite
    assert wc.spectrum(torch.diag(torch.tensor([2.0, 1.0, 0.0]))).why_not_finite == "rank 2 of 3"


# -- frames


def test_a_frame_has_a_row_per_head(report, infinite):
    frame = report.to_frame()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 6
    heads = [head for layer in report.layers for head in layer.heads]
    assert list(frame["kappa"]) == [head.mean_kappa() for head in heads]
    assert list(frame["kappa_q"]) == [head.weights["q"].condition_number for head in heads]
    assert list(frame["rank"]) == [head.jacobian.rank for head in heads] and frame["rank"].dtype == "Int64"
    assert list(frame["entropy"]) == [head.attention.entropy for head in heads]
    assert frame.attrs == {"convention": "wide", "kappa": "strict", "combine": "mean", **report.run}
    best = infinite.to_frame()
    assert (best["condition_number"] == math.inf).all() and (best["pseudo_condition_number"] < math.inf).all()
    assert best["why_not_finite"].str.startswith("rank ").all()


def test_a_frame_keeps_layers_that_were_not_measured(model, report):
    broken = dataclasses.replace(report.layers[1], heads=(), problem="it is broken")
    frame = dataclasses.replace(report, layers=(report.layers[0], broken)).to_frame()
    assert len(frame) == 4 and frame["problem"].iloc[-1] == "it is broken" and pandas.isna(frame["head"].iloc[-1])
    cheap = wc.measure(model, X[:1], jacobian=False).to_frame()
    assert cheap["rank"].isna().all() and cheap["kappa"].isna().all() and (cheap["kappa_v"] >= 1).all()
    assert dataclasses.replace(report, layers=()).to_frame().empty


def test_trackers_and_diagnoses_have_frames_too(model):
    tracker = wc.ConditionTracker(model, X[:1], weights_every=1, every=[0], budget=None)
    tracker.step()
    frame = tracker.to_frame()
    assert list(frame["kappa_q"]) == [point.kappa_q for point in tracker.points] and set(frame["step"]) == {0, 1}
    assert frame[frame["step"] == 1]["rank"].isna().all() and frame["rank"].dtype == "Int64"
    assert frame.attrs == tracker.run
    found = wc.diagnose(model, X)
    frame = found.to_frame()
    assert list(frame["name"]) == [layer.name for layer in found.layers]
    assert list(frame["kappa_tokens"]) == [layer.kappa_tokens for layer in found.layers]
    broken = dataclasses.replace(found.layers[1], finite=False)
    finding = wc.Finding(kind="not-finite", severity="fault", verdict="", layers=(broken.name,), value=math.nan,
                      threshold=math.inf, remedy="", evidence="")  # fmt: skip
    frame = dataclasses.replace(found, findings=(finding,)).to_frame()
    assert list(frame["findings"]) == ["", "not-finite"]


# -- one line each


def test_every_record_prints_as_one_short_line(model, report, infinite):
    site, head = wc.find_attention(model)[0], infinite.layers[0].heads[0]
    pseudo = f"kappa inf, pseudo {head.mean_kappa('pseudo'):.4g}"
    assert pseudo in repr(head) and pseudo in repr(head.jacobian) and "singular_values" not in repr(head.jacobian)
    assert "kappa of 3 heads not finite" in repr(infinite.layers[0])
    assert "not measured: broken" in repr(dataclasses.replace(report.layers[0], heads=(), problem="broken"))
    kappas = [head.mean_kappa() for layer in report.layers for head in layer.heads]
    assert f"kappa {min(kappas):.4g} to {max(kappas):.4g}" in repr(report)
    records = [site, *site.slots.values(), report, *report.layers, head, head.jacobian, head.weights["q"], infinite]
    records += [wc.measure(model, X[:1], jacobian=False), dataclasses.replace(report, layers=())]
    assert all("\n" not in repr(record) and len(repr(record)) < 180 for record in records)


def test_a_site_tells_what_makes_it_special():
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}
    site = wc.find_attention(LlamaModel(LlamaConfig(vocab_size=9, num_hidden_layers=1, **sizes)))[0]
    for words in ("'layers.0.self_attn'", "4 heads (2 of keys and values) x 4", "width 16", "causal, rotary"):
        assert words in repr(site)

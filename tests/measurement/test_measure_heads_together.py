"""Small heads of a layer are measured together, and have the numbers of each by itself."""

import bisect
import dataclasses
import gc
import json
import weakref

import pytest
import timm
import torch
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import wellcond as wc
import wellcond.measurement.measure as measurement
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.diagnosis import block_norms
from wellcond.jacobian.factors import FactorStack, JacobianFactors, build_all_factors, build_factors, stack_factors
from wellcond.jacobian.head import Head, can_stack, stack_heads
from wellcond.jacobian.softmax import SoftmaxJacobian, softmax_jacobians, stack_size
from wellcond.jacobian.solve import operator_spectra, operator_spectrum
from wellcond.measurement.records import NUMERICAL

F64 = torch.float64


def vit():
    return timm.models.VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5)


def gpt2():
    return GPT2Model(GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=32, n_positions=16))


def llama():
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaModel(LlamaConfig(**sizes, intermediate_size=32, vocab_size=32))


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(18).view(2, 9) % 32


OPTIONS = ({}, {"samples": 2, "combine": "stack"}, {"biases": True}, {"jacobian": False})
TOGETHER = [(vit, options) for options in OPTIONS] + [(gpt2, {"samples": 2}), (llama, {"heads": [1, 0]})]


@pytest.mark.parametrize("build, options", TOGETHER, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_report_is_that_of_heads_measured_one_by_one(build, options, monkeypatch):
    batch = IMAGES if build is vit else TOKENS
    torch.manual_seed(0)
    model = build()
    together = wc.measure(model, batch, **options).to_dict()
    monkeypatch.setattr(measurement, "GROUP_BYTES", 0)
    assert_same(together, wc.measure(model, batch, **options).to_dict())


def assert_same(found, expected, where=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for at, value in enumerate(expected):
            assert_same(found[at], value, f"{where}[{at}]")
    elif isinstance(expected, float):  # zeros of a singular matrix are rounding
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12, nan_ok=True), where
    elif "explanation" not in where:
        assert found == expected, where


def heads_of(stds, tokens=6, **kwargs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 8, generator=generator, dtype=F64)
    return [Head(x, *torch.randn(3, 4, 8, generator=generator, dtype=F64) * std, 0.5, **kwargs) for std in stds]


def test_only_those_whose_squares_lose_are_decomposed_without_them():
    heads = heads_of([0.3, 1e-7, 0.5, 1e-7])
    found = operator_spectra(softmax_jacobians(heads))
    assert ["SVD" in one.reason for one in found] == [False, True, False, True]
    for one, head in zip(found, heads, strict=True):
        alone = operator_spectrum(SoftmaxJacobian(head))
        assert (one.reason, one.rank, one.status) == (alone.reason, alone.rank, alone.status)
        assert one.condition_number == pytest.approx(alone.condition_number, rel=1e-6)


def test_heads_that_surely_lose_are_not_squared_at_all(monkeypatch):
    monkeypatch.setattr("wellcond.jacobian.softmax.output_gram", None)
    assert all("SVD" in one.reason for one in operator_spectra(softmax_jacobians(heads_of([1e-7, 1e-7]))))
    with pytest.raises(TypeError):
        operator_spectra(softmax_jacobians(heads_of([0.3, 1e-7])))


def test_a_condition_number_that_is_sure_is_one():
    for head in heads_of([1.0, 0.3, 1e-3, 1e-7]):
        form = SoftmaxJacobian(head)
        sigma = torch.linalg.svdvals(form.as_matrix())
        assert 0 < form.lower_kappa() <= float(sigma[0] / sigma[-1]) * (1 + 1e-9)


def test_heads_that_see_different_tokens_are_measured_one_by_one():
    torch.manual_seed(0)
    captured = capture_attention(vit().double(), IMAGES[:1].double())[0]
    bias = torch.zeros(1, 4, 5, 5, dtype=F64)
    bias[0, 1, 2] = -torch.inf  # the second head leaves out a token
    captured = dataclasses.replace(captured, logit_bias=bias)
    pace = measurement._Pace(None, measurement.log_slow)
    groups = measurement._group_heads(
        captured, measurement.parts_of(captured, "joint"), measurement.MeasureSettings(), pace
    )
    assert [len(group.parts) for group in groups] == [1] * 4
    rows = [measurement._measure_head(group, group.parts[0]).jacobian.shape[0] for group in groups]
    assert rows == [30, 24, 30, 30]


def with_overflow(*heads):
    """A ViT in whose second layer the Jacobians of some heads overflow when they are squared."""
    torch.manual_seed(0)
    model = vit().double()
    weight = model.blocks[1].attn.qkv.weight.data.view(3, 4, 6, 24)
    weight[0, heads] *= 1e100
    weight[1, heads] *= 1e-100
    return model


def test_a_head_that_fails_takes_no_other_with_it():
    report = wc.measure(with_overflow(1, 2), IMAGES[:1].double())
    first, second = report.layers
    assert [head.index for head in first.heads] == [0, 1, 2, 3] and not first.problem and not first.failed
    assert [head.index for head in second.heads] == [0, 3] and not second.problem
    assert [failed.index for failed in second.failed] == [1, 2] and all(failed.problem for failed in second.failed)
    alone = wc.measure(with_overflow(), IMAGES[:1].double(), layers=[1], heads=[0, 3]).layers[0]
    assert [head.mean_kappa() for head in second.heads] == pytest.approx([head.mean_kappa() for head in alone.heads])


def test_every_form_of_the_report_names_the_heads_that_failed():
    report = wc.measure(with_overflow(2), IMAGES[:1].double())
    why = report.layers[1].failed[0].problem
    assert f"blocks.1.attn                   2 not measured: {why}" in report.to_table()
    assert "1 heads not measured" in repr(report) and "1 not measured" in repr(report.layers[1])
    assert "blocks.1.attn, head 2</b>, not measured" in report.to_html()
    assert json.loads(report.to_json())["layers"][1]["failed"] == [{"index": 2, "problem": why}]
    assert wc.MeasurementReport.from_json(report.to_json()).layers[1].failed == report.layers[1].failed
    frame = report.to_frame()
    assert len(frame) == 8 and frame[frame["problem"] == why][["layer", "head"]].values.tolist() == [
        ["blocks.1.attn", 2]
    ]


def test_an_error_is_raised_if_and_only_if_nothing_was_measured():
    model = with_overflow(1, 2)
    with pytest.raises(NUMERICAL) as error:
        wc.measure(model, IMAGES[:1].double(), layers=[1], heads=[1, 2])
    assert "none of the 2 heads" in error.value.__notes__[0]
    layers = wc.measure(model, IMAGES[:1].double(), heads=[1, 2]).layers
    assert len(layers[0].heads) == 2 and not layers[1].heads
    assert layers[1].problem == layers[1].failed[0].problem


def test_the_tracker_says_which_head_failed_and_why():
    model = with_overflow()
    tracker = wc.ConditionTracker(model, IMAGES[:1].double(), every=1, budget=None, heads="all")
    model.load_state_dict(with_overflow(2).state_dict())
    points = {(point.layer, point.head): point for point in tracker.step()}
    failed = points.pop(("blocks.1.attn", 2))
    assert failed.status == "failed" and failed.problem
    assert len(points) == 7 and all(point.status == "exact" and not point.problem for point in points.values())


def test_heads_of_one_shape_stack_and_share_their_tokens():
    first, second = heads = heads_of([1.0, 0.5])
    assert can_stack(heads)
    for other in (heads_of([1.0], tokens=5)[0], heads_of([1.0], mask=torch.zeros(6, 6))[0]):
        assert not can_stack([first, other])
    assert not can_stack([first, dataclasses.replace(second, scale=0.25)])
    stack = stack_heads(heads)
    assert stack.x.stride(0) == 0 and stack.w_q.stride(0) > 0


def test_as_many_heads_as_there_is_room_for():
    heads = heads_of([1.0] * 4)
    two = bisect.bisect_left(range(10**6), 2, key=lambda room: stack_size(heads, room))
    assert [stack_size(heads, factor * (two // 2) + factor) for factor in (0, 1, 3)] == [1, 1, 3]
    form = SoftmaxJacobian(heads[0])
    assert two // 2 > 16 * form.shape[0] * form.as_matrix().shape[1]


def test_norms_of_a_nearly_dead_head_do_not_underflow():
    head = heads_of([0.5])[0]
    small = dataclasses.replace(head, w_v=head.w_v * 2.0**-1030)
    norms, expected = block_norms(build_factors(small)), block_norms(build_factors(head))
    assert norms[0] == pytest.approx(expected[0] * 2.0**-1030, rel=1e-2)


def test_blocks_that_were_built_together_are_not_copied_and_any_selection_is():
    blocks = build_all_factors(heads_of([1.0, 0.5, 0.2]))
    stack = stack_factors(blocks)
    assert stack.m.data_ptr() == blocks[0].m.data_ptr() and isinstance(stack, FactorStack)
    for chosen in ([2, 0], [0, 1], [1]):
        some = stack_factors([blocks[at] for at in chosen])
        assert all(torch.equal(some.b[at], blocks[one].b) for at, one in enumerate(chosen))


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_are_those_of_each_head(groups):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, 8, generator=generator, dtype=F64) for count in (5, 7))
    weights = torch.randn(3, groups, 4, 8, generator=generator, dtype=F64)
    bias = torch.randn(3, groups, 4, generator=generator, dtype=F64)
    heads = [Head(x, w, w[0] + 1, w[0] - 1, 0.5, y=y, b_q=b, b_v=b[0]) for w, b in zip(weights, bias, strict=True)]
    for together, head in zip(build_all_factors(heads, biases=True), heads, strict=True):
        alone = build_factors(head, biases=True)
        for name in ("x", "q", "py", "m", "b", "p", "k", "v"):
            torch.testing.assert_close(getattr(together, name), getattr(alone, name), rtol=1e-12, atol=1e-12)


def test_large_heads_are_measured_one_after_the_other_and_forgotten(monkeypatch):
    """Factors of a large head take most of the memory of its measurement."""
    monkeypatch.setattr("wellcond.jacobian.softmax.SMALLEST_ON_DEVICE", 1)
    alive, most = weakref.WeakSet(), []
    build = JacobianFactors.__init__

    def watched(self, *args, **kwargs):
        build(self, *args, **kwargs)
        alive.add(self)
        if len(alive) > 2:
            gc.collect()
        most.append(sum(type(one) is JacobianFactors for one in alive))

    monkeypatch.setattr(JacobianFactors, "__init__", watched)
    torch.manual_seed(0)
    wc.measure(vit(), IMAGES[:1])
    assert max(most) <= 2

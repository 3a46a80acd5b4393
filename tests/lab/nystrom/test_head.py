"""Nystrom attention: the structured Jacobian against automatic differentiation of the module itself."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import wellcond as wc
import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)
from wellcond.jacobian import problem
from wellcond.jacobian.capture import CapturedAttention, capture_attention
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.select import select_operator
from wellcond.jacobian.solve import operator_spectrum
from wellcond.lab.models.build import build_model
from wellcond.lab.models.long_range import MaskedNystromAttention
from wellcond.lab.nystrom.head import Inverse
from wellcond.lab.nystrom.operator import NystromJacobian, make_triangle, nystrom_head

TOKENS, WIDTH, HEADS = 24, 8, 2
RTOL = 1e-12
HIDDEN = torch.zeros(1, 1, 1, TOKENS, dtype=torch.float64).index_fill(3, torch.arange(20, 24), -1e9)


def attention(
    landmarks: int = 6, kernel: int | None = 5, option: str = "original", bias: float = 1.0, masked: bool = False
) -> nn.Module:
    """Hugging Face's module, or ours with the masks of the release, with random weights, in float64."""
    config = NystromformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_landmarks=landmarks, segment_means_seq_len=TOKENS,
        conv_kernel_size=kernel or 1,
    )  # fmt: skip
    torch.manual_seed(3)
    module = (MaskedNystromAttention if masked else NystromformerSelfAttention)(config).double().eval()
    module.init_option = option
    if kernel is None:
        module.conv_kernel_size = None
        del module.conv
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=bias if name.endswith("bias") else 0.6)
    return module


def tokens(samples: int = 1) -> Tensor:
    return torch.randn(samples, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def captured_from(module: nn.Module, samples: int = 1, mask: Tensor | None = None) -> CapturedAttention:
    [captured] = capture_attention(module, (tokens(samples), mask))
    return captured


def by_autograd(module: nn.Module, index: int, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """J_Q, J_K, J_V of one head by jacrev of the module's forward."""
    d = WIDTH // HEADS
    rows = slice(index * d, (index + 1) * d)
    names = [f"{name}.weight" for name in ("query", "key", "value")]
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def output(*own: Tensor) -> Tensor:
        changed = {
            name: weights[name].slice_scatter(w, 0, rows.start, rows.stop) for name, w in zip(names, own, strict=True)
        }
        return torch.func.functional_call(module, weights | changed, (x, mask))[0][..., rows]

    found = torch.func.jacrev(output, argnums=(0, 1, 2))(*(weights[name][rows] for name in names))
    return {role: block.mT.flatten(0, 2).flatten(1) for role, block in zip("qkv", found, strict=True)}


def padding(visible: int) -> Tensor:
    """The release's marks."""
    return (torch.arange(TOKENS) < visible)[None].double()


CASES = {
    "without convolution": ({"kernel": None}, None),
    "with convolution": ({}, None),
    "as many landmarks as width": ({"landmarks": 4, "option": "exact"}, None),
    "own scale of each head": ({"option": "exact"}, None),
    "mask": ({}, HIDDEN),
    "no biases": ({"bias": 0.0, "landmarks": 3}, None),
    "few landmarks": ({"landmarks": 3}, None),
    "few landmarks, mask": ({"landmarks": 3}, HIDDEN),
    "few landmarks without convolution": ({"landmarks": 2, "kernel": None}, None),
    "padding": ({"masked": True}, padding(14)),
    "padding from a segment on": ({"masked": True, "landmarks": 8, "option": "exact"}, padding(15)),
    "padding of most tokens": ({"masked": True, "landmarks": 8}, padding(9)),
    "padding, as many landmarks as width": ({"masked": True, "landmarks": 4}, padding(13)),
    "padding, few landmarks": ({"masked": True, "landmarks": 3}, padding(14)),
    "padding, few landmarks, no biases": ({"masked": True, "landmarks": 3, "bias": 0.0}, padding(14)),
    "no padding": ({"masked": True, "landmarks": 3}, padding(TOKENS)),
}


USUAL = ("with convolution", "as many landmarks as width", "few landmarks, mask", "few landmarks without convolution",
         "padding from a segment on", "padding, few landmarks, no biases", "no biases")  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in USUAL else pytest.mark.slow) for c in CASES])
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_jacobian_is_that_of_the_module(case, index):
    options, mask = CASES[case]
    module = attention(**options)
    captured = captured_from(module, mask=mask)
    chosen = select_operator(captured, index)
    assert chosen.how == "structured: Nystrom attention"
    form, blocks = chosen.operator, by_autograd(module, index, tokens(), mask)
    assert isinstance(form, NystromJacobian)
    dense = torch.cat(list(blocks.values()), dim=1)
    torch.testing.assert_close(ModuleJacobian(captured, index).as_matrix(), dense, rtol=1e-9, atol=1e-9)
    j_q, j_k = form.head.query_key_jacobian(form.head.seen, form.head.seen)
    scale = float(dense.abs().max())
    torch.testing.assert_close(j_q.flatten(0, 1).flatten(1), blocks["q"], rtol=0, atol=1e-8 * scale)
    torch.testing.assert_close(j_k.flatten(0, 1).flatten(1), blocks["k"], rtol=0, atol=1e-8 * scale)
    values = torch.kron(form.head.linear_in_values(form.head.x), torch.eye(WIDTH // HEADS, dtype=torch.float64))
    torch.testing.assert_close(values, blocks["v"], rtol=1e-10, atol=1e-10)
    generator = torch.Generator().manual_seed(3)
    u, v = (torch.randn(size, dtype=torch.float64, generator=generator) for size in dense.shape)
    close = {"rtol": 0, "atol": 1e-6 * float(dense.norm())}
    torch.testing.assert_close(form.matvec(v), dense @ v, **close)
    torch.testing.assert_close(form.rmatvec(u), dense.T @ u, **close)
    sigma = torch.linalg.svdvals(dense)
    rank = int((sigma > RTOL * sigma[0]).sum())
    assert form.rank_bound().rank == rank
    assert rank == len(sigma) or sigma[rank] < 1e-2 * RTOL * sigma[0]  # nothing near the tolerance
    for mine in (form.as_matrix(), form.hints.triangle.build(RTOL * float(sigma[0]))[0]):
        torch.testing.assert_close(torch.linalg.svdvals(mine)[:rank], sigma[:rank], rtol=1e-5, atol=0)
    found = operator_spectrum(form, rtol=RTOL)
    assert found.status == "exact" and found.rank == rank and found.shape == tuple(dense.shape)
    assert found.sigma_max == pytest.approx(float(sigma[0]), rel=1e-9)
    assert found.sigma_rank == pytest.approx(float(sigma[rank - 1]), rel=1e-5)


@pytest.mark.parametrize("column_sum", [None, 0.1, 4.0])
def test_inverse_and_its_derivative(column_sum):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 5, dtype=torch.float64, generator=generator).softmax(-1)
    u = torch.randn(5, 3, dtype=torch.float64, generator=generator)

    def steps(a: Tensor) -> Tensor:
        c = a.sum(0).max()
        z, eye = a.T / (c if column_sum is None else c.clamp_min(column_sum)), torch.eye(5, dtype=torch.float64)
        for _ in range(6):
            z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
        return z @ u

    inverse = Inverse(a, column_sum)
    torch.testing.assert_close(inverse.z @ u, steps(a), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(inverse.pull_back(u), torch.func.jacrev(steps)(a), rtol=1e-6, atol=1e-6)


def test_another_head_may_decide_the_scale_of_the_inverse():
    """With the option `original`, c is shared: exact for the head that decides it and for the one that does not."""
    heads = [nystrom_head(captured_from(attention()), index, 0) for index in range(HEADS)]
    decides = [bool(head.inverse.c_gradient.any()) for head in heads]
    assert sorted(decides) == [False, True]  # both cases are in test_jacobian_is_that_of_the_module


def test_samples_are_measured_one_by_one():
    module = attention()
    report = wc.measure(module, (tokens(3), None), samples=2, heads=[1])
    [head] = report.layers[0].heads
    alone = [wc.measure(module, (tokens(3)[s : s + 1], None), heads=[1]).layers[0].heads[0] for s in range(2)]
    assert head.both_samples["pseudo"] == pytest.approx([one.jacobian.pseudo_condition_number for one in alone])
    assert report.layers[0].kind == "nystrom" and "Nystrom" in head.how


def test_as_many_landmarks_as_tokens_is_softmax_and_a_convolution():
    module = attention(landmarks=TOKENS)
    captured = captured_from(module)
    chosen = select_operator(captured, 1)
    assert chosen.how.startswith("generic")
    dense = torch.cat(list(by_autograd(module, 1, tokens()).values()), dim=1)
    found, sigma = operator_spectrum(chosen.operator), torch.linalg.svdvals(dense)
    assert found.sigma_max == pytest.approx(float(sigma[0]))
    [head] = wc.measure(module, (tokens(), None), heads=[0]).layers[0].heads
    assert head.attention is not None and head.approximation_error is None


@pytest.mark.parametrize("landmarks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_measure_reads_the_masks_of_the_long_range_model(landmarks):
    sizes = {"length": TOKENS, "landmarks": landmarks, "width": WIDTH, "heads": HEADS, "convolution": 5}
    torch.manual_seed(5)
    model = build_model("wellcond:long_range", {"vocab_size": 9, "num_labels": 2, **sizes}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    marks = padding(14).long()
    ids = torch.randint(1, 9, (1, TOKENS), generator=torch.Generator().manual_seed(2)) * marks
    report = wc.measure(model, {"input_ids": ids, "attention_mask": marks}, kappa="pseudo")
    module, seen = model.blocks[1].attention.self, []
    hook = module.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    model(ids, marks)
    hook.remove()
    [(x, mask)] = seen
    assert mask.shape == (1, TOKENS)
    for index, head in enumerate(report.layers[1].heads):
        dense = torch.cat(list(by_autograd(module, index, x.detach(), mask).values()), dim=1)
        sigma = torch.linalg.svdvals(dense)
        assert head.how == "structured: Nystrom attention" and head.jacobian.status == "exact"
        assert head.jacobian.sigma_max == pytest.approx(float(sigma[0]), rel=1e-9)
        assert head.jacobian.sigma_rank == pytest.approx(float(sigma[head.jacobian.rank - 1]), rel=1e-4)
        assert sigma[head.jacobian.rank] < 1e-12 * sigma[0]


def test_both_ends_come_from_the_triangle_of_large_heads(monkeypatch):
    """What `auto` does beyond 2,500 outputs, on a head that is small enough to know all singular values."""
    monkeypatch.setattr(problem, "LARGEST_FULL_SVD", 10)
    form = select_operator(captured_from(attention(landmarks=3)), 0).operator
    ends, all_values = operator_spectrum(form), operator_spectrum(form, method="gram")
    assert ends.status == all_values.status == "exact" and ends.rank == all_values.rank
    assert ends.singular_values is None and "triangular" in ends.reason
    assert ends.sigma_max == pytest.approx(all_values.sigma_max) and ends.condition_number == np.inf
    assert ends.sigma_rank == pytest.approx(all_values.sigma_rank, rel=1e-6)


class Reversed(NystromformerSelfAttention):
    """Something else under the same attributes."""

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        return super().forward(hidden_states.flip(1).cumsum(1), attention_mask, output_attentions)


def test_a_class_with_another_forward_is_differentiated_as_it_is():
    module = attention()
    module.__class__ = Reversed
    [site] = wc.find_attention(module)
    assert site.kind == "nystrom" and site.evidence == "structure"
    captured = captured_from(module)
    chosen = select_operator(captured, 0)
    assert isinstance(chosen.operator, NystromJacobian | ModuleJacobian)
    expected = torch.linalg.svdvals(torch.cat(list(by_autograd(module, 0, tokens()).values()), dim=1))
    assert operator_spectrum(chosen.operator).sigma_max == pytest.approx(float(expected[0]))


@cache
def exact_map(mask: bool) -> Tensor:
    module = attention()
    q, k = ((linear(tokens())[0, :, :4] * 4**-0.25) for linear in (module.query, module.key))
    logits = q @ k.T
    return ((logits + HIDDEN[0, 0]) if mask else logits).softmax(-1).detach()


@pytest.mark.parametrize("mask, jacobian", [(None, True), (HIDDEN, False)])
def test_attention_map_is_the_softmax_that_is_approximated(mask, jacobian):
    report = wc.measure(attention(), (tokens(), mask), heads=[0], jacobian=jacobian)
    [head] = report.layers[0].heads
    p = exact_map(mask is not None)[: TOKENS if mask is None else 20]
    assert head.attention.entropy == pytest.approx(float(-torch.xlogy(p, p).sum(-1).mean()))
    assert head.attention.diagonal_mass == pytest.approx(float(p.diagonal().mean()))
    assert head.attention.max_probability == pytest.approx(float(p.amax(-1).mean()))
    one = nystrom_head(captured_from(attention(), mask=mask), 0, 0)
    off = ((one.mixing @ one.from_landmarks)[: len(p)] - p).norm() / p.norm()
    assert head.approximation_error == pytest.approx(float(off))
    assert report.to_dict()["layers"][0]["heads"][0]["approximation_error"] == head.approximation_error


@pytest.mark.parametrize("rows, columns, rank", [(9, 5, 5), (9, 5, 3), (5, 5, 5), (4, 7, 4), (4, 7, 2), (0, 3, 0)])
def test_triangle_finds_the_rank(rows, columns, rank):
    generator = torch.Generator().manual_seed(rows + rank)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    values, above, below = normal(4).abs() + 1, normal(4, columns), normal(rows, rank) @ normal(rank, columns)
    top = torch.cat([torch.diag(values), above], dim=1)
    whole = torch.cat([top, torch.cat([torch.zeros(rows, 4, dtype=torch.float64), below], dim=1)])
    found = make_triangle(values, above, below, 1e-12)[0]
    assert found.shape == (4 + rank, 4 + rank) and not bool(found.tril(-1).any())
    torch.testing.assert_close(torch.linalg.svdvals(found), torch.linalg.svdvals(whole)[: 4 + rank])

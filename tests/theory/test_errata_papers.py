"""Errata E13 to E25: E13 to E19 of paper C, E20 to E25 of paper S. E26 is a naming slip in tables and has no test."""

import inspect
import math

import pytest
import torch
from torch import nn

import wellcond as wc
from theory import cases
from theory.papers import proposition32_printed, theorem35, theorem38, theorem38_printed
from theory.reference import F64, causal_mask, kappa, sigma, tensor, wide
from theory.test_initialisation import causal_ratio
from wellcond.linalg.orthogonal import polar
from wellcond.theory import Head


def near(value, rel=1e-9):
    return pytest.approx(value, rel=rel, abs=0.0)


def diag(*entries):
    return torch.diag(tensor(entries))


def test_E13_proposition_32_is_false():
    conditioned, drawn = (cases.two_tokens(wq, 1, 1, x=(1, -1)) for wq in (1, 2))
    claim = proposition32_printed(conditioned, drawn)
    assert claim.applies and claim.contradicted
    assert (10**claim.observed, 10**claim.value) == (near(3.3130, 1e-4), near(3.0373, 1e-4))
    assert not proposition32_printed(conditioned, cases.two_tokens(0.5, 1, 1, x=(1, -1))).contradicted
    # Equally conditioned weights at twice the scale: 216.6 > 12.96.
    claim = proposition32_printed(cases.two_tokens(2, 2, 2), cases.two_tokens(1, 1, 1))
    assert claim.contradicted and 10**claim.observed == near(216.6, 1e-3) and 10**claim.value == near(12.96, 1e-3)
    # The text says `strictly`: a conditioned draw against itself.
    same = proposition32_printed(conditioned, conditioned)
    assert same.value == same.observed and not same.contradicted
    assert not proposition32_printed(cases.g1(), cases.g1()).applies


def test_E14_a_tall_semi_orthogonal_matrix_has_orthonormal_columns():
    m = torch.eye(3, 2, dtype=F64)
    assert torch.equal(m.T @ m, torch.eye(2, dtype=F64)) and not torch.equal(m @ m.T, torch.eye(3, dtype=F64))
    w = torch.randn(5, 3, dtype=F64)
    eigenvalues = torch.linalg.eigvalsh(w.T @ w).flip(0)
    torch.testing.assert_close(sigma(w), eigenvalues.sqrt())


def test_E15_the_rectangular_identity_selects_the_first_coordinates():
    x = cases.g1().x
    assert torch.equal(x @ torch.eye(4, 2, dtype=F64), x[:, :2]) and torch.equal(x @ torch.eye(4, dtype=F64), x)


def test_E16_the_polar_factor_needs_V_of_size_d_by_r():
    w = torch.randn(5, 3, dtype=F64)
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    v = vh.T[:, :2]  # d x r
    assert (u[:, :2] @ v.T).shape == w.shape
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        u[:, :2] @ v.T.T  # V of size r x d as printed: (D x r)(d x r)
    # The remark is about W_Q and W_K: the identity on V leaves P as it was, on Q it does not.
    h = cases.g1()
    eye = torch.eye(2, 4, dtype=F64)
    on_v = Head(h.x, h.w_q, h.w_k, eye, h.scale)
    on_q = Head(h.x, eye, h.w_k, h.w_v, h.scale)
    assert torch.equal(on_v.probabilities(), h.probabilities()) and not torch.equal(
        on_q.probabilities(), h.probabilities()
    )


def test_E17_the_scale_does_not_drop_out():
    scales = (1.0, 1 / math.sqrt(2), 0.5, 0.125)
    expected = (29.62, 26.02, 24.30, 39.77)
    assert [kappa(wide(cases.g1(s=s))) for s in scales] == [near(value, 2e-4) for value in expected]


def test_E18_deit_b_has_no_qk_norm():
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    assert inspect.signature(VisionTransformer).parameters["qk_norm"].default is False
    with torch.device("meta"):
        model = timm.create_model("deit_base_patch16_224")
    assert all(isinstance(block.attn.q_norm, nn.Identity) for block in model.blocks)
    assert all(site.qk_norm is None for site in wc.find_attention(model))


def test_E19_under_a_causal_mask_conditioning_worsens_kappa():
    assert causal_ratio(16, 48, 12, seed=0, mask=causal_mask(16)) > 10
    assert causal_ratio(16, 48, 12, seed=0, mask=None) < 1


def test_E20_theorem_38_is_false_as_stated():
    a = diag(-9.5, -1)
    printed = theorem38_printed(a, 10.0)
    assert printed.ratio == near(13 / 6) and printed.applies
    assert (printed.value, printed.observed) == (near(9.5), near(18)) and printed.contradicted
    singular = theorem38_printed(diag(-10, -1), 10.0)
    assert singular.observed == math.inf and singular.contradicted
    assert not theorem38(a, 10.0).applies and not theorem38(diag(-10, -1), 10.0).applies


def test_E21_two_is_attained():
    assert theorem35(diag(1, 0)).value == 2.0 and not theorem35(diag(1, 0)).strictly_less
    assert kappa(diag(1, 0) + theorem35(diag(1, 0)).correction) == near(2)
    assert theorem35(diag(3, 1)).strictly_less


def test_E22_the_definition_and_the_experiments_use_different_corrections():
    w = diag(3, 1)
    torch.testing.assert_close(theorem35(w).correction, 3 * torch.eye(2, dtype=F64))
    torch.testing.assert_close(3 * polar(w[None])[0], 3 * torch.eye(2, dtype=F64))
    assert not torch.allclose(theorem35(w).correction, 10 * torch.eye(2, dtype=F64))


def test_E23_the_correction_keeps_only_the_first_columns():
    x, c = cases.g1().x, 10 * torch.eye(4, 2, dtype=F64)
    assert torch.equal(x @ c, 10 * x[:, :2])
    # Cost: XC is N d products, and adding it N d sums (2Nd); adding C to W touches min(D, d) entries.
    assert int((c != 0).sum()) == 2 == min(c.shape)
    w = torch.randn(4, 2, dtype=F64)
    assert int(((w + c) != w).sum()) == min(c.shape)
    torch.testing.assert_close(x @ (w + c), x @ w + x @ c)


def test_E24_the_correction_does_not_accumulate():
    model = nn.MultiheadAttention(4, 2, bias=False).double()
    before = model.in_proj_weight.detach().clone()
    wc.condition_(model, "identity", lam=0.5)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimiser.zero_grad()
        (0 * model(*[torch.randn(3, 4, dtype=F64)] * 3)[0]).sum().backward()
        optimiser.step()
    wc.fold_(model)
    correction = model.in_proj_weight.detach() - before
    torch.testing.assert_close(correction, 0.5 * torch.eye(4, dtype=F64).repeat(3, 1))


def test_E25_only_the_largest_singular_value_matters():
    a = diag(-9.5, -0.9)
    printed = theorem38_printed(a, 10.0)
    assert printed.ratio == near(2.143, 1e-4) and printed.applies
    assert (printed.value, printed.observed) == (near(10.56, 1e-3), near(18.2, 1e-3)) and printed.contradicted
    assert not theorem38(a, 10.0).applies

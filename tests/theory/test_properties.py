"""Random search for violations of the bounds that hold: shapes, scales, masks, ranks; kappa(J) below 1e11."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from theory.papers import sigma_min_upper_bound
from theory.reference import F64, causal_mask, head, row_form, sigma
from wellcond.theory import Head, exact_case, kappa_bound, lower_bound, norm_upper_bound, papers_bound, upper_bound

SLACK = 1 + 1e-9
MAX_KAPPA = 1e11


@st.composite
def heads(draw, max_size=6, full_rank_tokens=False):
    """Heads of every shape; weights and tokens of any scale, perhaps rank-deficient tokens, perhaps a mask."""
    n, width, d = (draw(st.integers(1, max_size)) for _ in range(3))
    value_dim = draw(st.sampled_from([d, d, max(1, d - 1), d + 1]))
    if full_rank_tokens:
        width = max(width, n)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**9)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    x = 10 ** draw(st.floats(-0.5, 0.7)) * normal(n, width)
    if not full_rank_tokens and draw(st.booleans()):
        x = x - x.mean(-1, keepdim=True) if width > 1 else x
    weights = [10 ** draw(st.floats(-1.7, 0.4)) * normal(width, k) for k in (d, d, value_dim)]
    mask = draw(st.sampled_from(["none", "none", "causal", "random"]))
    blocked = (torch.rand(n, n, generator=generator) < 0.4) & ~torch.eye(n, dtype=torch.bool)
    holes = torch.zeros(n, n, dtype=F64).masked_fill(blocked, -torch.inf)
    return head(x, *weights, draw(st.floats(0.1, 2)), {"none": None, "causal": causal_mask(n), "random": holes}[mask])


def spectra(h: Head) -> dict[str, torch.Tensor]:
    parts = row_form(h)
    found = {"wide": sigma(torch.cat(parts, 1))}
    if h.head_dim == h.value_dim:
        found["stack"] = sigma(torch.cat(parts, 0))
    return found


@given(heads())
def test_upper_bounds_have_no_counterexample(h):
    for convention, s in spectra(h).items():
        first = upper_bound(h, convention=convention).value
        second = norm_upper_bound(h, convention=convention).value
        half = norm_upper_bound(h, convention=convention, lambda_norm="half").value
        assert float(s[0]) ** 2 <= first * SLACK <= second * SLACK**2 <= half * SLACK**3
    assert float(spectra(h)["wide"][-1]) <= sigma_min_upper_bound(h) * SLACK + 1e-13 * float(s[0])


@given(heads(full_rank_tokens=True))
def test_lower_and_kappa_bounds_of_wide_have_no_counterexample(h):
    s = spectra(h)["wide"]
    low = lower_bound(h, strict=False)
    assume(low.applies and float(s[0]) < MAX_KAPPA * float(s[-1]))
    # The computed singular values are exact up to eps sigma_1.
    assert float(s[-1]) + 1e-14 * float(s[0]) >= low.value**0.5 / SLACK
    bound = kappa_bound(h, strict=False)
    if bound.applies and bound.value < MAX_KAPPA:
        assert float(s[0] / s[-1]) <= bound.value * (1 + 1e-4)


@given(heads())
def test_lower_and_kappa_bounds_of_stack_have_no_counterexample(h):
    assume(h.head_dim == h.value_dim)
    s = spectra(h)["stack"]
    low = lower_bound(h, convention="stack", strict=False)
    assume(low.applies)
    smallest = s[h.head_dim * int(torch.linalg.matrix_rank(h.x)) - 1]
    assume(float(s[0]) < MAX_KAPPA * float(smallest))
    assert float(smallest) + 1e-14 * float(s[0]) >= low.value**0.5 / SLACK
    bound = kappa_bound(h, convention="stack", strict=False)
    if bound.applies and bound.value < MAX_KAPPA:
        assert float(s[0] / smallest) <= bound.value * (1 + 1e-4)


@given(heads(max_size=5, full_rank_tokens=True))
def test_exact_case_has_no_counterexample(h):
    s = spectra(h)["wide"]
    found = exact_case(h, strict=False)
    assume(found.applies and float(s[0]) < MAX_KAPPA * float(s[-1]))
    assert float(s[-1]) == pytest.approx(found.value, rel=1e-6, abs=1e-13 * float(s[0]))


def test_random_search_contradicts_the_papers_bound():
    above = 0
    for _ in range(60):
        q, k, v = torch.randn(3, 2, 1, dtype=F64)
        t = 10 ** float(torch.empty(()).uniform_(0, 4))  # P and B do not see it
        h = head(torch.randn(2, 2, dtype=F64), t * q, k / t, v, 1.0)
        s = spectra(h)["wide"]
        above += float(s[0] / s[-1]) > papers_bound(h).value
        assert float(s[0] / s[-1]) <= kappa_bound(h).value * SLACK
    assert above > 8

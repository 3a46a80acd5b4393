"""Polar factors out of matrix products: how exact they are, for any condition of the weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.linalg.polar import best_quintic, largest_eigenvalue, mix_with_polar, schedule
from wellcond.linalg.spectrum import spectra

SHAPES = [(8, 24), (64, 128), (32, 48), (16, 16), (48, 48), (24, 8)]


def heads(shape, values, count=6):
    """Matrices with these singular values."""
    rows, columns = shape
    short = min(shape)
    u = torch.linalg.qr(torch.randn(count, rows, short, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(count, columns, short, dtype=torch.float64))[0]
    return 0.3 * (u * values) @ v.mT


def condition_numbers(matrices):
    sigma = torch.linalg.svdvals(matrices.double())
    return (sigma[:, 0] / sigma[:, -1]).max().item()


def spread(shape, kappa):
    return torch.logspace(0, -math.log10(kappa), min(shape), dtype=torch.float64)


ROUNDING = {torch.float32: 0.0, torch.bfloat16: 0.001, torch.float64: 0.0}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        ((8, 24), torch.bfloat16),
        ((16, 16), torch.bfloat16),
        ((24, 8), torch.float64),
        pytest.param((64, 384), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((64, 64), torch.float64, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_condition_numbers_up_to_ten_thousand_are_bounded_by_the_target(shape, dtype):
    rounding = ROUNDING[dtype]
    for kappa in (1, 3, 1e2, 1e3, 1e4):
        weights = heads(shape, spread(shape, kappa)).to(dtype)
        for target in (2.0, 1.25, 5.0):
            mixed = mix_with_polar(weights, keep=1 - 1 / target, share=1 / target)
            assert condition_numbers(mixed) <= target * (1.001 + rounding * target / 2)
        assert condition_numbers(mix_with_polar(weights, keep=1.0, share=1.0)) <= 2 * (1.001 + rounding)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_matrices_are_lifted(shape):
    short = min(shape)
    values = torch.linspace(1, 0.3, short, dtype=torch.float64)
    cases = {f"kappa {kappa:g}": heads(shape, spread(shape, kappa)) for kappa in (1e5, 1e6, 1e8)}
    for name, kept in (("one missing", short - 1), ("half missing", short // 2), ("rank one", 1)):
        cases[name] = heads(shape, values * (torch.arange(short) < kept))
    cases["three columns"] = torch.randn(6, *shape).double() * (torch.arange(shape[1]) < 3)
    cases["a row twice"] = heads(shape, values)
    cases["a row twice"][:, 1] = cases["a row twice"][:, 0]
    for name, weights in cases.items():
        mixed = mix_with_polar(weights.float(), keep=0.5, share=0.5)
        assert condition_numbers(mixed) <= 2 * 1.05, name


def test_the_mixture_is_that_of_the_singular_value_decomposition():
    weights = heads((16, 64), spread((16, 64), 10)).float()
    u, s, vh = torch.linalg.svd(weights.double(), full_matrices=False)
    expected = 0.25 * weights + 0.75 * s[:, :1, None] * (u @ vh)
    mixed = mix_with_polar(weights, keep=0.25, share=0.75)
    assert (mixed - expected).norm() / expected.norm() < 2e-4


def test_a_zero_matrix_stays_zero_and_nan_stays_in_its_own_matrix():
    weights = torch.randn(3, 4, 8)
    weights[0], weights[1, 2, 3] = 0, float("nan")
    mixed = mix_with_polar(weights, keep=0.5, share=0.5)
    assert torch.equal(mixed[0], torch.zeros(4, 8))
    assert mixed[1].isnan().any() and mixed[2].isfinite().all()


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6, 1e12])
def test_the_size_of_the_weights_does_not_matter(size):
    weights = heads((8, 24), spread((8, 24), 100)).float()
    expected = mix_with_polar(weights, keep=0.5, share=0.5)
    torch.testing.assert_close(
        mix_with_polar(weights * size, keep=0.5, share=0.5) / size, expected, rtol=1e-3, atol=1e-6
    )


def test_the_largest_eigenvalue_is_found_among_close_ones():
    for gap in (0.5, 0.1, 1e-2, 2e-3, 1e-4, 0.0):
        values = torch.ones(32, dtype=torch.float64) - gap
        values[0] = 1
        u = torch.linalg.qr(torch.randn(4, 32, 32, dtype=torch.float64))[0]
        found = largest_eigenvalue(7.0 * (u * values) @ u.mT).flatten() / 7.0
        assert ((found > 0.997) & (found < 1 + 1e-5)).all(), gap


@pytest.mark.parametrize("low, high", [(1e-5, 1.0), (0.01, 1.99), (0.5, 1.5), (0.9, 1.1)])
def test_no_other_quintic_is_closer_to_one(low, high):
    a, b, c = best_quintic(low, high)
    x = torch.linspace(low, high, 20001, dtype=torch.float64)
    error = (a * x + b * x**3 + c * x**5 - 1).abs()
    # Chebyshev: the best one is unique, and its error is extreme at four points with alternating signs.
    signed = a * x + b * x**3 + c * x**5 - 1
    extremes = [signed[0].item(), signed.max().item(), signed.min().item(), signed[-1].item()]
    assert max(map(abs, extremes)) == pytest.approx(min(map(abs, extremes)), rel=1e-3)
    assert error.max().item() == pytest.approx(abs(extremes[0]), rel=1e-6)


def test_the_schedule_takes_its_whole_interval_to_one():
    for smallest in (1e-3, 1e-5, 1e-7):
        x = torch.logspace(math.log10(smallest), 0, 5000, dtype=torch.float64)
        for a, b, c in schedule(smallest):
            x = a * x + b * x**3 + c * x**5
        assert (x - 1).abs().max() < 2e-6


@given(st.integers(2, 8), st.integers(2, 8), st.floats(1.0, 10.0), st.integers(0, 10_000))
def test_balanced_keeps_the_norm_and_meets_the_target(rows, columns, target, seed):
    weights = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = spectra(weights)[0]
    after = spectra(mix_with_polar(weights, keep=1 - 1 / target, share=1 / target))[0]
    assert after.sigma_max == pytest.approx(before.sigma_max, rel=1e-3)
    assert after.condition_number <= target * 1.001
    # Exactly: sigma_i becomes (1 - 1/t) sigma_i + sigma_1 / t.
    assert after.sigma_min == pytest.approx((1 - 1 / target) * before.sigma_min + before.sigma_max / target, rel=1e-3)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_only_products_and_elementwise_operations_are_used():
    weights = torch.randn(4, 8, 24)
    mix_with_polar(weights, keep=0.5, share=0.5)  # the constants of this shape
    with Names() as seen:
        mix_with_polar(weights, keep=0.5, share=0.5)
    products, elementwise = {"baddbmm", "bmm"}, {"_to_copy", "add", "addcmul", "div", "mul", "linalg_vector_norm"}
    assert set(seen.names) <= products | elementwise | {"transpose"}


def test_without_float64_the_bound_is_weaker_but_holds(monkeypatch):
    monkeypatch.setattr("wellcond.linalg.polar.has_float64", lambda device: False)
    for kappa in (3, 1e2, 1e3, 1e5):
        weights = heads((16, 64), spread((16, 64), kappa)).float()
        with Names() as seen:
            mixed = mix_with_polar(weights, keep=0.5, share=0.5)
        assert condition_numbers(mixed) <= 2 * 1.2 and mixed.dtype == torch.float32
        assert seen.names

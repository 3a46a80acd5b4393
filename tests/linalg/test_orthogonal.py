import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.errors import UnknownChoiceError, WeightError
from wellcond.linalg.orthogonal import polar, random_semi_orthogonal
from wellcond.linalg.spectrum import singular_values, spectrum

F64 = torch.float64


def svd_polar(w):
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    return u @ vh


def with_singular_values(s, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, len(s), generator=generator, dtype=F64)).Q
    v = torch.linalg.qr(torch.randn(columns, len(s), generator=generator, dtype=F64)).Q
    return (u * torch.tensor(s, dtype=F64)) @ v.T


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 12), st.sampled_from([torch.float32, F64]))
def test_polar_is_the_svd_one_at_any_condition_number(rows, columns, log_kappa, dtype):
    k = min(rows, columns)
    log_kappa = min(log_kappa, 5.0) if dtype is torch.float32 else log_kappa
    s = torch.logspace(0, -log_kappa if k > 1 else 0, k, dtype=F64).tolist()
    w = with_singular_values(s, rows, columns).to(dtype)
    factor, found = svd_polar(w), polar(w[None])[0]
    eps = torch.finfo(dtype).eps
    # The factor is semi-orthogonal whatever kappa; its distance to the SVD's grows like kappa * eps by nature.
    torch.testing.assert_close(singular_values(found), torch.ones(k, dtype=F64), rtol=0, atol=300 * eps)
    assert (found.double() - factor).norm() <= 300 * 10**log_kappa * 2.3e-16 + 300 * eps


def test_a_batch_mixes_all_routes():
    rows = [torch.eye(3, dtype=F64), with_singular_values([1, 1e-3, 1e-6], 3, 3), torch.zeros(3, 3, dtype=F64)]
    factors = polar(torch.stack(rows))
    torch.testing.assert_close(factors[2] @ factors[2].T, torch.eye(3, dtype=F64))  # one of many
    torch.testing.assert_close(factors[1], svd_polar(rows[1]), atol=1e-9, rtol=0)
    torch.testing.assert_close(factors[0], torch.eye(3, dtype=F64))


@pytest.mark.parametrize("source, rows, columns", [("svd", 4, 9), ("qr", 9, 4), ("svd", 6, 6)])
def test_random_semi_orthogonal_has_unit_singular_values(source, rows, columns):
    drawn = random_semi_orthogonal(7, rows, columns, source=source)
    ones = torch.ones(7, min(rows, columns), dtype=F64)
    torch.testing.assert_close(singular_values(drawn), ones, rtol=0, atol=5e-6)


@pytest.mark.parametrize("source", ["svd", "qr"])
def test_random_semi_orthogonal_is_haar(source):
    # Under the Haar measure every entry has mean 0, variance 1/D and fourth moment 3 / (D (D + 2)).
    D = 8
    drawn = random_semi_orthogonal(20_000, 3, D, source=source, generator=torch.Generator().manual_seed(0))
    assert drawn.mean(0).abs().max() < 0.01
    torch.testing.assert_close(drawn.square().mean(0), torch.full((3, D), 1 / D), rtol=0.03, atol=0)
    torch.testing.assert_close(drawn.pow(4).mean(0), torch.full((3, D), 3 / (D * (D + 2))), rtol=0.06, atol=0)


def test_spectrum_of_degenerate_matrices():
    zero = spectrum(torch.zeros(2, 3))
    assert (zero.rank, zero.nullity) == (0, 2) and zero.condition_number != zero.condition_number
    deficient = spectrum(torch.diag(torch.tensor([2.0, 1.0, 0.0])))
    assert deficient.condition_number == float("inf") and deficient.pseudo_condition_number == 2.0
    with pytest.raises(WeightError):
        spectrum(torch.tensor([[float("nan")]]))
    with pytest.raises(ValueError, match="matrix"):
        spectrum(torch.zeros(3))
    with pytest.raises(UnknownChoiceError, match="'svd', 'qr'"):
        random_semi_orthogonal(1, 2, 2, source="cayley")
    assert deficient.to_dict()["nullity"] == 1

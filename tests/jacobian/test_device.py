"""A large head is measured on its device, and nothing is mixed with the CPU; a small one on the CPU."""

import pytest
import torch

import wellcond.head as head_module
from far_device import FAR, Far, FarDevice
from wellcond.head import Head, softmax_spectrum
from wellcond.jacobian import select
from wellcond.jacobian.diagnosis import diagnose_head
from wellcond.jacobian.plain import StackForm, WideForm
from wellcond.jacobian.spectrum import form_spectrum, jacobian_spectrum
from wellcond.theory import kappa_bound, papers_bound

F64 = torch.float64


def tensors(tokens, width, head_dim, std=1.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=F64)
    w = torch.randn(3, head_dim, width, generator=generator, dtype=F64) * std * width**-0.5
    return [x, *w]


@pytest.fixture
def far():
    with FarDevice() as mode:
        yield mode


def far_head(*args, **kwargs):
    return Head(*[t.as_subclass(Far) for t in tensors(*args)], 0.25, **kwargs)


def test_the_harness_refuses_what_cuda_refuses(far):
    x = torch.ones(2, 2).as_subclass(Far)
    assert x.device == FAR and (x @ x).device == FAR and x.cpu().device.type == "cpu"
    assert torch.eye(2, device=x.device).device == FAR and torch.ones(2).to(FAR).device == FAR
    with pytest.raises(RuntimeError, match="same device"):
        x @ torch.ones(2, 2)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(head_module, "SMALLEST_ON_DEVICE", 1)


def agrees(found, expected):
    assert (found.method, found.status, found.rank) == (expected.method, expected.status, expected.rank)
    assert found.sigma_max == pytest.approx(expected.sigma_max, rel=1e-8)
    assert found.sigma_rank == pytest.approx(expected.sigma_rank, rel=1e-6)


@pytest.mark.parametrize("method", ["gram", "cholesky", "implicit"])
@pytest.mark.parametrize("size", [(10, 12, 4), (10, 12, 4, 1e-6)], ids=["usual", "squaring loses"])
def test_every_method_runs_on_the_device(size, method, everything_is_large, far):
    head = far_head(*size)
    assert head.x.device == FAR
    found = form_spectrum(WideForm(head), method=method, memory_limit=2**30)
    agrees(found, form_spectrum(WideForm(Head(*tensors(*size), 0.25)), method=method))
    assert far.calls["matmul"] + far.calls["__matmul__"] + far.calls["addmm_"] > 0


@pytest.mark.parametrize("size", [(20, 24, 8), (40, 12, 8)], ids=["outputs", "parameters"])
def test_ends_proved_by_a_float32_factor_are_computed_on_the_device(size, everything_is_large, far, monkeypatch):
    for limit in ("LARGEST_FULL_SVD", "SPECTRUM_LIMIT"):
        monkeypatch.setattr(select, limit, 10)
    monkeypatch.setattr("wellcond.jacobian.spectrum.LARGEST_FULL_SVD", 10)
    found = form_spectrum(WideForm(far_head(*size)), memory_limit=2**30)
    assert "float32 factor" in found.reason and far.calls["linalg_cholesky_ex"] >= 2
    agrees(found, form_spectrum(WideForm(Head(*tensors(*size), 0.25))))


@pytest.mark.parametrize("method", ["gram", "implicit"])
def test_the_stack_and_a_mask_and_biases(method, everything_is_large, far):
    mask = torch.full((8, 8), -torch.inf, dtype=F64).triu(1)
    agrees(
        form_spectrum(StackForm(far_head(8, 12, 4, mask=mask.as_subclass(Far))), method=method, memory_limit=2**30),
        form_spectrum(StackForm(Head(*tensors(8, 12, 4), 0.25, mask=mask)), method=method),
    )
    biases = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    usual = tensors(8, 12, 4)
    agrees(
        jacobian_spectrum(*[t.as_subclass(Far) for t in usual], biases=tuple(biases.as_subclass(Far)),
                          mask=(mask == 0).as_subclass(Far), method=method, memory_limit=2**30),
        jacobian_spectrum(*usual, biases=tuple(biases), mask=mask == 0, method=method),
    )  # fmt: skip


def test_what_explains_a_condition_number_and_the_theory(everything_is_large, far):
    head, near = far_head(8, 12, 4), Head(*tensors(8, 12, 4), 0.25)
    mine, theirs = diagnose_head(head), diagnose_head(near)
    assert (mine.verdict, mine.dead) == (theirs.verdict, theirs.dead)
    assert [mine.norm_q, mine.norm_k, mine.kappa_p] == pytest.approx([theirs.norm_q, theirs.norm_k, theirs.kappa_p])
    assert softmax_spectrum(head).log10_kappa == pytest.approx(softmax_spectrum(near).log10_kappa)
    for statement in (papers_bound, kappa_bound):
        assert statement(head).value == pytest.approx(statement(near).value)


def test_a_small_head_is_taken_to_the_cpu(far):
    assert far_head(8, 12, 4).x.device.type == "cpu"
    assert far_head(head_module.SMALLEST_ON_DEVICE, 12, 1).x.device == FAR
    assert far_head(head_module.SMALLEST_ON_DEVICE, 12, 1).cpu().x.device.type == "cpu"

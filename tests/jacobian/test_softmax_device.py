"""Heads are measured on their device, those of one shape together; only small decompositions run on the CPU."""

import pytest
import torch

from far_device import FAR, Far, FarDevice
from wellcond.jacobian import problem
from wellcond.jacobian.diagnosis import all_attention_statistics, diagnose_head, log10_kappa_bound, softmax_spectra
from wellcond.jacobian.head import Head, can_stack
from wellcond.jacobian.softmax import SoftmaxJacobian, StackedJacobian, softmax_jacobians, stacked_jacobian
from wellcond.jacobian.solve import operator_spectra, operator_spectrum
from wellcond.jacobian.spectrum import jacobian_spectrum
from wellcond.linalg.spectrum import where_decomposed
from wellcond.theory import kappa_bound, papers_bound, softmax_spectrum

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
    monkeypatch.setattr("wellcond.linalg.spectrum.SMALLEST_ON_DEVICE", 1)


def agrees(found, expected):
    assert (found.method, found.status, found.rank) == (expected.method, expected.status, expected.rank)
    assert found.sigma_max == pytest.approx(expected.sigma_max, rel=1e-8)
    assert found.sigma_rank == pytest.approx(expected.sigma_rank, rel=1e-6, nan_ok=True)


SIZES = {"usual": (10, 12, 4), "squaring loses": (10, 12, 4, 1e-6)}


@pytest.mark.parametrize(
    ("method", "size"), [("gram", "squaring loses"), *((m, "usual") for m in ("gram", "cholesky", "implicit"))]
)
def test_every_method_runs_on_the_device(method, size, everything_is_large, far):
    size = SIZES[size]
    head = far_head(*size)
    assert head.x.device == FAR
    found = operator_spectrum(SoftmaxJacobian(head), method=method, memory_limit=2**30)
    agrees(found, operator_spectrum(SoftmaxJacobian(Head(*tensors(*size), 0.25)), method=method))
    assert far.calls["matmul"] + far.calls["__matmul__"] + far.calls["addmm_"] > 0


@pytest.mark.parametrize("size", [(20, 24, 8), (40, 12, 8)], ids=["outputs", "parameters"])
def test_ends_proved_by_a_float32_factor_are_computed_on_the_device(size, everything_is_large, far, monkeypatch):
    for limit in ("LARGEST_FULL_SVD", "SPECTRUM_LIMIT"):
        monkeypatch.setattr(problem, limit, 10)
    found = operator_spectrum(SoftmaxJacobian(far_head(*size)), memory_limit=2**30)
    assert "float32 factor" in found.reason and far.calls["linalg_cholesky_ex"] >= 2
    agrees(found, operator_spectrum(SoftmaxJacobian(Head(*tensors(*size), 0.25))))


@pytest.mark.parametrize("method", ["gram", "implicit"])
def test_the_stack_and_a_mask_and_biases(method, everything_is_large, far):
    mask = torch.full((8, 8), -torch.inf, dtype=F64).triu(1)
    agrees(
        operator_spectrum(
            StackedJacobian(far_head(8, 12, 4, mask=mask.as_subclass(Far))), method=method, memory_limit=2**30
        ),
        operator_spectrum(StackedJacobian(Head(*tensors(8, 12, 4), 0.25, mask=mask)), method=method),
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


def layer(count, std=1.0, far=True, **kwargs):
    """Heads on the same tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator, dtype=F64)
    w = torch.randn(count, 3, 4, 8, generator=generator, dtype=F64) * std
    if far:
        x, w = x.as_subclass(Far), w.as_subclass(Far)
    return [Head(x, *w[at % 3], 0.5, **kwargs) for at in range(count)]


def measured(heads, method="auto", stacked=False):
    """Everything that `measure` computes of the heads of a layer."""
    forms = softmax_jacobians(heads)
    chosen = [stacked_jacobian(form) for form in forms] if stacked else forms
    spectra = operator_spectra(chosen, convention="stack" if stacked else "wide", method=method, memory_limit=2**30)
    statistics, lambdas = all_attention_statistics(heads), softmax_spectra(heads)
    numbers = []
    for head, form, seen, softmax in zip(heads, forms, statistics, lambdas, strict=True):
        found = diagnose_head(head, form.factors, seen)
        numbers.append([found.norm_q, found.norm_k, found.norm_v, found.kappa_p, found.kappa_x, seen.entropy,
                        softmax.log10_kappa, log10_kappa_bound(head, form.factors)])  # fmt: skip
    return spectra, numbers


@pytest.mark.parametrize(("std", "stacked"), [(1.0, False), (1e-6, False), (1.0, True)])
def test_heads_of_a_layer_have_the_numbers_of_each_by_itself(std, stacked, far):
    spectra, numbers = measured(layer(3, std), stacked=stacked)
    for at, head in enumerate(layer(3, std, far=False)):
        [alone], [expected] = measured([head], stacked=stacked)
        agrees(spectra[at], alone)
        assert numbers[at] == pytest.approx(expected, rel=1e-9)


def count_steps(count, std, **options):
    """Calls on the device, by name."""
    heads = layer(count, std)
    with FarDevice() as mode:
        measured(heads, **options)
    moved = {"__getitem__", "stack", "unbind", "cpu", "detach", "data_ptr", "stride", "size", "dim", "__len__"}
    return {name: calls for name, calls in mode.calls.items() if name not in moved and not name.startswith("__get")}


@pytest.mark.parametrize(("std", "stacked"), [(1.0, False), (1e-6, False), (1.0, True)])
def test_twice_as_many_heads_take_no_more_steps_on_the_device(std, stacked):
    """A GPU gets the same number of kernels for a layer, however many heads it has; the heads repeat each other."""
    few, many = (count_steps(count, std, stacked=stacked) for count in (3, 6))
    assert few == many and few["matmul"] > 10


def test_heads_on_two_devices_do_not_stack(far):
    assert can_stack(layer(2)) and not can_stack([*layer(1), *layer(1, far=False)])


@pytest.mark.parametrize("near", [0, 2])
def test_every_tensor_goes_to_the_device_of_the_tokens(near, far):
    given = [t if at == near else t.as_subclass(Far) for at, t in enumerate(tensors(8, 12, 4))]
    mask = torch.zeros(8, 8, dtype=F64)
    agrees(jacobian_spectrum(*given, mask=mask, memory_limit=2**30), jacobian_spectrum(*tensors(8, 12, 4), mask=mask))


def test_small_matrices_are_decomposed_on_the_cpu_and_large_ones_where_they_are(far, monkeypatch):
    operator_spectrum(SoftmaxJacobian(far_head(10, 12, 4)), method="gram", memory_limit=2**30)
    assert not far.calls["linalg_eigvalsh"] and not far.calls["linalg_svdvals"]
    monkeypatch.setattr("wellcond.linalg.spectrum.SMALLEST_ON_DEVICE", 40)
    operator_spectrum(SoftmaxJacobian(far_head(10, 12, 4)), method="gram", memory_limit=2**30)
    assert far.calls["linalg_eigvalsh"] + far.calls["linalg_svdvals"] == 1
    tall, wide = (torch.ones(shape, dtype=F64).as_subclass(Far) for shape in ((50, 39), (39, 50)))
    assert {where_decomposed(matrix).device.type for matrix in (tall, wide)} == {"cpu"}

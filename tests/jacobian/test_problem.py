"""A method needs no more memory than it says."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jacobian.operators import head_spectrum
from wellcond.jacobian import factors, problem, softmax
from wellcond.jacobian.head import Head
from wellcond.jacobian.problem import Problem
from wellcond.jacobian.softmax import SoftmaxJacobian, StackedJacobian
from wellcond.jacobian.solve import operator_spectrum


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made under this mode held at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor.untyped_storage())
        return result

    def hold(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key, size):
        self.seen.discard(key)
        self.now -= size


def some_head(tokens=16, width=24, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    w = torch.randn(3, head_dim, width, generator=generator, dtype=torch.float64) * width**-0.5
    return Head(x, *w, head_dim**-0.5)


@pytest.fixture
def explicit_jacobians(monkeypatch):
    """How often the matrix itself is built."""
    built = []
    build = softmax.explicit_jacobian
    monkeypatch.setattr(softmax, "explicit_jacobian", lambda blocks: built.append(1) or build(blocks))
    return built


@pytest.mark.parametrize("tokens", [16, 30])  # fewer and more than the width
def test_every_method_of_the_stacked_convention_is_about_the_same_matrix(tokens):
    dense = head_spectrum(some_head(tokens), convention="stack", method="dense")
    for method in ("gram", "cholesky", "implicit"):
        found = head_spectrum(some_head(tokens), convention="stack", method=method)
        assert (found.shape, found.rank, found.nullity) == (dense.shape, dense.rank, dense.nullity)
        assert found.sigma_max == pytest.approx(dense.sigma_max, rel=1e-8)
        assert found.sigma_min == pytest.approx(dense.sigma_min, rel=1e-6, abs=1e-12)
        assert found.sigma_rank == pytest.approx(dense.sigma_rank, rel=1e-6)
        assert found.pseudo_condition_number == pytest.approx(dense.pseudo_condition_number, rel=1e-6)


@pytest.mark.parametrize("limit, method", [(None, "cholesky"), (10_000_000, "implicit")])
def test_a_stack_too_large_for_its_eigenvalues_is_never_built(limit, method, explicit_jacobians, monkeypatch):
    monkeypatch.setattr(problem, "GRAM_LIMIT", 50)
    found = head_spectrum(some_head(48, 64, 32), convention="stack", memory_limit=limit or 2**30)
    assert found.method == method and not explicit_jacobians
    assert found.pseudo_condition_number > 1


@pytest.mark.parametrize(
    "form", [StackedJacobian(some_head()), StackedJacobian(some_head(40, 12)), SoftmaxJacobian(some_head())]
)
@pytest.mark.parametrize("method", ["gram", "cholesky", "implicit"])
def test_a_method_needs_no_more_memory_than_it_says(form, method, monkeypatch):
    monkeypatch.setattr(factors, "CHUNK_BYTES", 2**14)
    for cached in ("factors", "wide"):  # by an earlier case
        form.__dict__.pop(cached, None)
    said = Problem(form).needed_bytes(method)
    with PeakBytes() as held:
        operator_spectrum(form, method=method, memory_limit=2**40)
    assert held.peak <= said + 2**17, f"{held.peak:,} bytes held, {said:,} said"

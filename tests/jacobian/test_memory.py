"""How much memory may be taken, and that a method needs no more than it says."""

import os
import sys
import types
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wellcond.jacobian import head, plain, select
from wellcond.jacobian.head import Head
from wellcond.jacobian.plain import StackForm, WideForm
from wellcond.jacobian.spectrum import form_spectrum, head_spectrum

MEMINFO = """MemTotal:       16000000 kB
MemFree:          100000 kB
MemAvailable:   12000000 kB
Cached:         11000000 kB
"""


@pytest.fixture
def no_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)  # importing it raises ImportError


@pytest.fixture
def no_sysconf(monkeypatch):
    """As on macOS, which does not know the number of free pages; the memory of the machine is known."""
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def sysconf(name):
        if name not in pages:
            raise ValueError("unrecognized configuration name")
        return pages[name]

    monkeypatch.setattr(os, "sysconf", sysconf, raising=False)


def test_page_cache_counts_as_available(no_psutil, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(select, "MEMINFO", tmp_path / "meminfo")
    assert select.available_bytes() == 12_000_000 * 1024


def test_psutil_is_asked_first(no_sysconf, monkeypatch):
    memory = types.SimpleNamespace(available=123_456)
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace(virtual_memory=lambda: memory))
    assert select.available_bytes() == 123_456


@pytest.mark.parametrize("content", [None, "", "MemFree: 7 kB\n"])
def test_without_either_half_of_the_machine(content, no_psutil, no_sysconf, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    monkeypatch.setattr(select, "MEMINFO", tmp_path / "meminfo")
    assert select.available_bytes() == 1000 * 4096 // 2


def test_where_nothing_is_known_a_few_gigabytes_are_assumed(no_psutil, tmp_path, monkeypatch):
    monkeypatch.setattr(select, "MEMINFO", tmp_path / "none")
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert select.available_bytes() == select.FALLBACK_BYTES


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


def some_head(tokens=24, width=32, head_dim=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    w = torch.randn(3, head_dim, width, generator=generator, dtype=torch.float64) * width**-0.5
    return Head(x, *w, head_dim**-0.5)


@pytest.fixture
def explicit_jacobians(monkeypatch):
    """How often the matrix itself is built."""
    built = []
    build = plain.explicit_jacobian
    monkeypatch.setattr(plain, "explicit_jacobian", lambda blocks: built.append(1) or build(blocks))
    return built


@pytest.mark.parametrize("tokens", [24, 40])  # fewer and more than the width
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
    monkeypatch.setattr(select, "GRAM_LIMIT", 50)
    found = head_spectrum(some_head(48, 64, 32), convention="stack", memory_limit=limit or 2**30)
    assert found.method == method and not explicit_jacobians
    assert found.pseudo_condition_number > 1


@pytest.mark.parametrize("form", [StackForm(some_head()), StackForm(some_head(60, 20)), WideForm(some_head())])
@pytest.mark.parametrize("method", ["gram", "cholesky", "implicit"])
def test_a_method_needs_no_more_memory_than_it_says(form, method, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 2**14)
    monkeypatch.setattr("wellcond.jacobian.gram.CHUNK_BYTES", 2**14)
    form.__dict__.pop("blocks", None)  # cached by an earlier case
    form.__dict__.pop("operator", None)
    said = select.needed_bytes(form, method, form.structure())
    with PeakBytes() as held:
        form_spectrum(form, method=method, memory_limit=2**40)
    assert held.peak <= said + 2**17, f"{held.peak:,} bytes held, {said:,} said"

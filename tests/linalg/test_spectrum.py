"""Devices without float64: nothing is cast on them, and everything is still measured in float64."""

import os
import sys
import types

import pytest
import torch
from torch.utils._pytree import tree_map

import wellcond as wc
from far_device import FAR, Far, FarDevice
from wellcond.linalg import spectrum as memory
from wellcond.linalg.orthogonal import polar
from wellcond.linalg.spectrum import has_float64, singular_values, spectra, spectrum, to_float64


class WithoutDouble(torch.Tensor):
    """A tensor that is on another device by its own account, computes on the CPU, and refuses float64 as MPS does.

    The device is "meta", since torch itself is asked for a guard of any other, and has none of MPS here.
    """

    @staticmethod
    def __new__(cls, inner):
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="meta"
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        where = torch.device(kwargs.get("device") or "meta").type
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if where == "cpu" and kwargs.get("dtype") not in (None, args[0].dtype):
            raise TypeError(f"{kwargs['dtype']}: MPS casts before it moves")
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, WithoutDouble) else t, (args, kwargs))
        result = func(*args, **kwargs)
        if where == "cpu" or func is torch.ops.aten._local_scalar_dense.default:
            return result
        return tree_map(lambda t: WithoutDouble(t) if isinstance(t, torch.Tensor) else t, result)


@pytest.fixture(autouse=True)
def device_without_float64(monkeypatch):
    monkeypatch.setattr("wellcond.linalg.spectrum.has_float64", lambda device: device.type != "meta")


def test_the_stand_in_refuses_what_mps_refuses():
    matrix = WithoutDouble(torch.randn(2, 2))
    assert not has_float64(torch.device("mps")) and has_float64(torch.device("cpu"))
    with pytest.raises(TypeError, match="float64"):
        matrix.double()
    with pytest.raises(TypeError, match="casts before it moves"):
        matrix.to("cpu", torch.float64)
    assert type(matrix @ matrix) is WithoutDouble and type((matrix @ matrix).cpu()) is torch.Tensor


def test_singular_values_are_computed_where_there_is_float64():
    matrix = torch.randn(3, 5)
    assert torch.equal(singular_values(WithoutDouble(matrix)), singular_values(matrix))
    assert spectrum(WithoutDouble(matrix)) == spectrum(matrix)
    assert spectra(WithoutDouble(matrix[None])) == spectra(matrix[None])
    assert to_float64(WithoutDouble(matrix)).device.type == "cpu"
    with pytest.raises(wc.WeightError, match="NaN or infinity"):
        spectrum(WithoutDouble(matrix * torch.nan))


def test_tensors_on_such_a_device_are_taken_as_arguments():
    x, w, mask = torch.randn(4, 6), torch.randn(3, 2, 6), torch.ones(4, 4).tril().bool()
    found = wc.jacobian_spectrum(WithoutDouble(x), *map(WithoutDouble, w), mask=WithoutDouble(mask))
    assert found == wc.jacobian_spectrum(x, *w, mask=mask)


@pytest.mark.parametrize("matrix", [[[1.0, 1.0], [1.0, 1.0 + 1e-4]], [[3.0, 0.0], [0.0, 0.0]]])
def test_polar_factors_are_computed_where_there_is_float64(matrix, monkeypatch):
    matrices = torch.tensor([matrix, [[1.0, 2.0], [3.0, 4.0]]])
    expected = polar(matrices)
    monkeypatch.setattr("wellcond.linalg.orthogonal.has_float64", lambda device: device.type != "cuda")
    with FarDevice() as device:
        found = polar(matrices.to(FAR))
        assert isinstance(found, Far) and torch.equal(found.cpu(), expected)
        assert not device.calls["double"]


# -- how much memory there is


@pytest.fixture
def no_psutil(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)  # importing it raises ImportError


def test_page_cache_counts_as_available(no_psutil, tmp_path, monkeypatch):
    lines = "MemTotal: 16000000 kB\nMemFree: 100000 kB\nMemAvailable:   12000000 kB\nCached: 11000000 kB\n"
    (tmp_path / "meminfo").write_text(lines)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.available_bytes() == 12_000_000 * 1024


def test_psutil_is_asked_first(monkeypatch):
    found = types.SimpleNamespace(available=123_456)
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace(virtual_memory=lambda: found))
    assert memory.available_bytes() == 123_456


@pytest.mark.parametrize("content", [None, "MemFree: 7 kB\n"])
def test_elsewhere_it_is_half_of_the_machine_or_a_few_gigabytes(content, no_psutil, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    # As on macOS, which does not know the number of free pages; the memory of the machine is known.
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__, raising=False)
    assert memory.available_bytes() == 1000 * 4096 // 2
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert memory.available_bytes() == memory.FALLBACK_BYTES

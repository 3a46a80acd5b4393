"""How much memory may be taken."""

import os
import sys
import types

import pytest

from wellcond.linalg import memory

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
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.available_bytes() == 12_000_000 * 1024


def test_psutil_is_asked_first(no_sysconf, monkeypatch):
    found = types.SimpleNamespace(available=123_456)
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace(virtual_memory=lambda: found))
    assert memory.available_bytes() == 123_456


@pytest.mark.parametrize("content", [None, "", "MemFree: 7 kB\n"])
def test_without_either_half_of_the_machine(content, no_psutil, no_sysconf, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.available_bytes() == 1000 * 4096 // 2

"""How much memory can be taken."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
FALLBACK_BYTES = 4 * 2**30


def available_bytes(device: torch.device | None = None) -> int:
    """Memory that is free on a GPU; or that can be taken without swapping, page cache that can be dropped included.

    From psutil where it is installed, else from the kernel (Linux). Elsewhere half of the memory of the machine is
    assumed to be free, or `FALLBACK_BYTES` where that is not known either; `memory_limit` says it better.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        import psutil
    except ImportError:
        return _kernel_available() or _physical_bytes() // 2 or FALLBACK_BYTES
    return int(psutil.virtual_memory().available)


def _kernel_available() -> int:
    """MemAvailable of the Linux kernel; 0 where there is none."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    kibibytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(kibibytes, 0))


def _physical_bytes() -> int:
    """Memory of the machine; 0 where it cannot be asked for (Windows)."""
    try:
        return max(0, os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0

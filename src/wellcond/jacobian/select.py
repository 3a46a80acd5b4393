"""Which method computes a Jacobian's spectrum: a table that can be asked.

| method | what it does | all singular values | wants |
|---|---|---|---|
| dense | automatic differentiation (or J itself), then SVD | yes | n x p entries; tests and tiny heads |
| gram | J J^T or J^T J from blocks, eigenvalues; SVD of J where squaring loses them | yes | smaller side <= 6200 |
| cholesky | J J^T from blocks, a float32 factor (or a float64 one), iterations | no | full row rank, n <= 20000 |
| implicit | Lanczos on products with J J^T | no | nothing but products; sigma_min is only bounded |

`auto` takes the first of gram, cholesky and implicit that fits. For more than 768 outputs it first tries the closed
form sigma_min(J) = sigma_min(PY), which holds when the values span a constant (N <= d suffices), and then needs
products only: the record says ``implicit``, ``exact``, and why. Beyond a smaller side of 2500, `auto` gives both ends
only, proved to be the ends. Ask for ``gram`` to have all singular values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from wellcond.errors import WellcondError, check_choice
from wellcond.jacobian.forms import Form, gram_side
from wellcond.jacobian.mixed_ends import SMALLEST_SIDE
from wellcond.jacobian.records import MethodName
from wellcond.jacobian.structure import Structure
from wellcond.linalg.davidson import BLOCK, MAX_STEPS

GRAM_LIMIT = 6200
CHOLESKY_LIMIT = 20_000
EXHAUSTIVE_LIMIT = 1500  # up to here products alone go through the whole space
ASKED = "asked for"
METHODS = ("dense", "gram", "cholesky", "implicit")
MEMINFO = Path("/proc/meminfo")
FALLBACK_BYTES = 4 * 2**30


class MemoryLimitError(WellcondError, MemoryError):
    """A method would need more memory than there is."""


@dataclass(frozen=True)
class Choice:
    """A method, why it was chosen, and the bytes it needs at its peak."""

    method: MethodName
    reason: str
    num_bytes: int


def needed_bytes(method: str, form: Form, structure: Structure) -> int:
    """Peak memory of a method, roughly, in bytes of float64."""
    n, side, tables = form.num_outputs, gram_side(form), getattr(form, "table_entries", 0)
    # Covariance blocks hold an entry of every output for every key dimension; Lanczos keeps up to 300 vectors, or all.
    rows = getattr(form, "block_rows", n)
    blocks, vectors = rows * (min(structure.memory_rank, rows) + 64), (n if n <= EXHAUSTIVE_LIMIT else 300) * n
    steps = 2 * MAX_STEPS * BLOCK * n if n >= SMALLEST_SIDE else 0  # beside a factor of half the size
    entries = {
        "dense": 3 * structure.num_outputs * structure.num_parameters,
        "gram": 3 * side**2 + 2 * blocks + tables,
        "cholesky": max(n * n + vectors, n * n // 2 + steps) + 2 * blocks + (tables if n == side else 0),
        "implicit": 2 * blocks + vectors,
    }
    return 8 * entries[method]


def choose_method(form: Form, structure: Structure, *, asked: str = "auto", memory_limit: int | None = None) -> Choice:
    """The method for a form, with the reason.

    Raises:
        UnknownChoiceError: no such method.
        MemoryLimitError: the method asked for does not fit; says what would.
    """
    check_choice("Jacobian method", asked, ("auto", *METHODS))
    limit = available_bytes() if memory_limit is None else memory_limit
    needed = {name: needed_bytes(name, form, structure) for name in METHODS}
    fitting = [name for name in METHODS if needed[name] <= limit]
    if asked != "auto":
        if asked not in fitting:
            raise MemoryLimitError(
                f"method {asked!r} needs about {needed[asked]:,} bytes for {form.num_outputs} outputs, and {limit:,} "
                f"are available; would fit: {', '.join(fitting) or 'none, use fewer tokens'}"
            )
        return Choice(asked, ASKED, needed[asked])  # type: ignore[arg-type]
    n, side = form.num_outputs, gram_side(form)
    full_row_rank = structure.max_rank == n
    if side <= GRAM_LIMIT and "gram" in fitting:
        return Choice("gram", f"the smaller side has {side} <= {GRAM_LIMIT}", needed["gram"])
    if full_row_rank and n <= CHOLESKY_LIMIT and "cholesky" in fitting:
        return Choice("cholesky", f"full row rank and {GRAM_LIMIT} < n = {n} <= {CHOLESKY_LIMIT}", needed["cholesky"])
    if "implicit" in fitting:
        why = "too large to factorise" if full_row_rank else "rank-deficient and too large for all eigenvalues"
        return Choice("implicit", f"n = {n} is {why}", needed["implicit"])
    raise MemoryLimitError(
        f"even matrix-free products need about {needed['implicit']:,} bytes, and {limit:,} are available; "
        "use fewer tokens"
    )


def available_bytes() -> int:
    """Memory that can be taken without swapping: what psutil calls available, page cache that can be dropped included.

    From psutil where it is installed, else from the kernel (Linux). Elsewhere half of the memory of the machine is
    assumed to be free, or `FALLBACK_BYTES` where that is not known either; `memory_limit` says it better.
    """
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

"""Which method computes a Jacobian's spectrum, and every number at which one is taken, believed or left.

`choose_method` can be asked, and what it answers is what runs:

| method | route | what it does | all singular values | taken by `auto` if |
|---|---|---|---|---|
| dense | dense | automatic differentiation (or J itself), then SVD | yes | never: tests and tiny heads |
| implicit | closed form | sigma_min(J) = sigma_min(PY); sigma_max by Lanczos | no | n > 768, values span a constant |
| gram | triangle | J made triangular, both ends by Lanczos on it and its inverse | no | the form has one, side > 2500 |
| gram | proved ends | float32 factor of the smaller Gram matrix, float64 products, a proof | no | side > 2500 |
| gram | gram | J J^T or J^T J from blocks, eigenvalues; SVD of J where squaring loses them | yes | side <= 6200 |
| cholesky | cholesky | J J^T from blocks, float32 or float64 factor, iterations | no | full row rank, n <= 20000 |
| implicit | exhaustive products | Lanczos through the whole space of outputs | no | full row rank, n <= 1500 |
| implicit | products | Lanczos on products with J J^T; sigma_min is only bounded | no | otherwise |

The method is what a user asks for and what the record names, the route what runs. `auto` takes the first that fits into
memory. Ask for ``gram`` to have all singular values. The limits follow, each with its reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from wellcond.errors import MemoryLimitError, TooLongError, check_choice
from wellcond.jacobian.form import AbstractForm
from wellcond.linalg.records import Convention, JacobianSpectrum, MethodName, Status
from wellcond.linalg.spectrum import BLOCK, MAX_STEPS, Estimate, default_rtol, largest_eigenvalue, resolve_rank
from wellcond.theory.ranks import Structure

Route = Literal[
    "dense", "closed form", "triangle", "proved ends", "gram", "cholesky", "exhaustive products", "products"
]
ASKED = "asked for"
EPSILON = torch.finfo(torch.float64).eps
METHODS = ("dense", "gram", "cholesky", "implicit")
MEMINFO = Path("/proc/meminfo")
FALLBACK_BYTES = 4 * 2**30

# --- sizes: which method is taken ------------------------------------------------------------------------------------

GRAM_LIMIT: Final = 6200
"""Side of the smaller Gram matrix up to which all its eigenvalues are computed: beyond, they take minutes."""
CHOLESKY_LIMIT: Final = 20_000
"""Outputs up to which J J^T is factorised: 3.2 GB, and about half a minute."""
SPECTRUM_LIMIT: Final = 768
"""Outputs up to which `auto` computes all singular values even where both ends are known in closed form."""
LARGEST_FULL_SVD: Final = 2500
"""Side beyond which an SVD takes longer than everything else, and `auto` gives both ends only."""
LARGEST_SVD: Final = 2e13
"""Rows x columns x smaller side up to which J itself is decomposed: about an hour."""
SMALLEST_FLOAT32: Final = 1024
"""Outputs below which a factorisation in float64 takes no longer than the steps that a float32 one steers."""
EXHAUSTIVE_LIMIT: Final = 1500
"""Outputs up to which products alone go through the whole space, and so are exact."""
LANCZOS_STEPS: Final = 300
"""Vectors that Lanczos keeps otherwise; both ends of a head converge within a tenth of that, or not at all."""
POWER_STEPS: Final = 4
"""Of G and of its inverse, to tell whether squaring loses: a bound from below, which one step already gives."""
LOWEST: Final = 40
"""How many of the smallest singular values are computed where a rank must be counted from a triangular form."""

# --- accuracy: what is believed --------------------------------------------------------------------------------------

LARGEST_SQUARED_KAPPA: Final = 1e5
"""Squaring keeps about 1e-16 kappa^2 of relative accuracy: 1e-6 at kappa = 1e5."""
LARGEST_SHIFTED_KAPPA: Final = 1e4
"""Likewise for lambda_max I - J J^T, where the shift rounds once more."""
CLOSED: Final = 1e-8
"""Relative width at which the interval of the closed form for sigma_min counts as a number."""
CLOSED_ROUNDING: Final = 1e-6
"""Rounding of sigma_min, relative to it, beyond which the closed form is left to a method that does not square."""
SURE: Final = 10
"""A smallest singular value counts as exact at this many times its error: the error is an estimate."""
AGREEMENT_OF_OUTPUT: Final = 1e-9
"""Relative difference up to which a structured form has the output of the module's own float64 copy."""
AGREEMENT_OF_PRODUCT: Final = 1e-6
"""The same of J J^T u: iterations inside a module (Nystrom) amplify rounding, in automatic differentiation most."""

# --- time: what is announced, or not begun ---------------------------------------------------------------------------
# One thread of a common processor, in the worse of the cases that a route can end in: an SVD of J, where squaring loses
# the small singular values, takes ten times as long as the eigenvalues of its Gram matrix.

SLOW_SECONDS: Final = 10.0
"""Whatever is expected to take longer is announced before it begins."""
DECOMPOSED_PER_SECOND: Final = 1.2e9
"""Cubes of the smaller side: 0.8 s at 1024, 25 s at 3072."""
FACTORISED_PER_SECOND: Final = 4e10
"""Cubes of the number of outputs: 6 s at 6200, 110 s at 16384 if the factor has to be in float64, half of it if not."""
OPERATIONS_PER_SECOND: Final = 1e9
"""Of everything that is not a large product of matrices."""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Both ends where sigma_min is known in closed form: its interval, its rounding, and the largest eigenvalue."""

    interval: tuple[float, float]
    error: float
    top: Estimate


@dataclass(frozen=True)
class Choice:
    """A method, the route by which it runs, why it was chosen, and the bytes it needs at its peak."""

    method: MethodName
    route: Route
    reason: str
    num_bytes: int
    closed_form: ClosedForm | None = None


def choose_method(
    form: AbstractForm,
    structure: Structure,
    *,
    asked: str = "auto",
    memory_limit: int | None = None,
    rtol: float | None = None,
) -> Choice:
    """The method for a form, with the reason; arguments as in `jacobian_spectrum`.

    Raises:
        UnknownChoiceError: no such method.
        MemoryLimitError: the method asked for does not fit; says what would.
    """
    check_choice("Jacobian method", asked, ("auto", *METHODS))
    limit = available_bytes(form.device) if memory_limit is None else memory_limit
    needed = {name: needed_bytes(form, name, structure) for name in METHODS}
    fitting = [name for name in METHODS if needed[name] <= limit]
    n, side = form.num_outputs, form.gram_side
    full_row_rank = structure.max_rank == n
    products: Route = "exhaustive products" if full_row_rank and n <= EXHAUSTIVE_LIMIT else "products"
    if asked != "auto":
        if asked not in fitting:
            raise MemoryLimitError(
                f"method {asked!r} needs about {needed[asked]:,} bytes for {n} outputs, and {limit:,} "
                f"are available; would fit: {', '.join(fitting) or 'none, use fewer tokens'}"
            )
        return Choice(asked, products if asked == "implicit" else asked, ASKED, needed[asked])  # type: ignore[arg-type]
    if side <= GRAM_LIMIT and "gram" in fitting:
        of_ends: Route = "triangle" if form.has_triangle else "proved ends" if form.has_sides else "gram"
        route: Route = of_ends if side > LARGEST_FULL_SVD else "gram"
        choice = Choice("gram", route, f"the smaller side has {side} <= {GRAM_LIMIT}", needed["gram"])
    elif full_row_rank and n <= CHOLESKY_LIMIT and "cholesky" in fitting:
        why = f"full row rank and {GRAM_LIMIT} < n = {n} <= {CHOLESKY_LIMIT}"
        choice = Choice("cholesky", "cholesky", why, needed["cholesky"])
    elif "implicit" in fitting:
        why = "too large to factorise" if full_row_rank else "rank-deficient and too large for all eigenvalues"
        choice = Choice("implicit", products, f"n = {n} is {why}", needed["implicit"])
    else:
        raise MemoryLimitError(
            f"even matrix-free products need about {needed['implicit']:,} bytes, and {limit:,} are available; "
            "use fewer tokens"
        )
    closed = _closed_form(form, structure, rtol) if full_row_rank and n > SPECTRUM_LIMIT else None
    if closed is None:
        return choice
    reason = f"n = {n} > {SPECTRUM_LIMIT} and the values span a constant: sigma_min(J) = sigma_min(PY)"
    return replace(choice, method="implicit", route="closed form", reason=reason, closed_form=closed)


def _closed_form(form: AbstractForm, structure: Structure, rtol: float | None) -> ClosedForm | None:
    """Both ends in milliseconds; None unless the interval of the closed form closes, well above rounding."""
    interval = form.closed_minimum()
    if interval is None or interval[0] == 0 or interval[1] > interval[0] * (1 + CLOSED):
        return None
    top = largest_eigenvalue(form.product, form.num_outputs)
    largest = math.sqrt(top.value)
    # Both ends of the interval come from one rounded SVD of PY: each is sure only up to its rounding.
    rounding = default_rtol((structure.num_outputs, structure.num_parameters))
    error, zero = rounding * largest, (rounding if rtol is None else rtol) * largest
    if not top.converged or error > CLOSED_ROUNDING * interval[0] or interval[0] <= zero:
        return None
    return ClosedForm(interval, error, top)


def needed_bytes(form: AbstractForm, method: str, structure: Structure) -> int:
    """Peak memory of a method, roughly, in bytes of float64."""
    n, side, rows = form.num_outputs, form.gram_side, form.block_rows
    # Covariance blocks hold an entry of every output for every key dimension; Lanczos keeps its vectors, or all.
    blocks = rows * (min(structure.memory_rank, rows) + 64)
    vectors = (n if n <= EXHAUSTIVE_LIMIT else LANCZOS_STEPS) * n
    steps = 2 * MAX_STEPS * BLOCK * n if n >= SMALLEST_FLOAT32 else 0  # beside a factor of half the size
    entries = {
        "dense": 3 * structure.num_outputs * structure.num_parameters,
        "gram": 3 * side**2 + 2 * blocks + form.table_entries,
        "cholesky": max(n * n + vectors, n * n // 2 + steps) + 2 * blocks + (form.table_entries if n == side else 0),
        "implicit": 2 * blocks + vectors,
    }
    return 8 * entries[method]


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


@dataclass(frozen=True, eq=False)
class Task:
    """One spectrum to compute: of which form, how, and within which memory."""

    form: AbstractForm
    structure: Structure
    choice: Choice
    convention: Convention
    rtol: float
    limit: int


def expected_seconds(task: Task) -> float:
    """Seconds that a spectrum may take after its route was chosen; next to none where both ends are known by then."""
    route, n, parameters = task.choice.route, task.structure.num_outputs, task.structure.num_parameters
    if route == "closed form":
        return 0.0
    if route == "dense":
        return n * parameters * min(n, parameters) / DECOMPOSED_PER_SECOND
    built = task.form.table_entries / OPERATIONS_PER_SECOND
    if route == "cholesky":
        return built + n**3 / FACTORISED_PER_SECOND
    if route in ("products", "exhaustive products"):
        steps = n if route == "exhaustive products" else LANCZOS_STEPS
        return 2 * steps * n * (steps + 1000) / OPERATIONS_PER_SECOND
    return built + task.form.gram_side**3 / DECOMPOSED_PER_SECOND


def check_admitted(tasks: Sequence[Task], admit: Callable[[float], bool] | None) -> None:
    """Raise TooLongError unless tasks that are about to begin may."""
    if admit is None:
        return
    seconds = sum(expected_seconds(task) for task in tasks)
    if not admit(seconds):
        raise TooLongError(seconds, show_seconds(seconds))


def show_seconds(seconds: float) -> str:
    """A duration in the unit that suits it.

    Example:
        >>> show_seconds(0.25), show_seconds(42.0), show_seconds(5400.0)
        ('0.25 s', '42 s', '1.5 h')
    """
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


def from_singular_values(task: Task, sigma: Tensor, reason: str | None = None) -> JacobianSpectrum:
    """Record of singular values that were not squared; missing ones (compressed away) are zero."""
    full = torch.zeros(task.structure.smaller_side, dtype=torch.float64)
    full[: min(len(sigma), len(full))] = sigma[: len(full)].cpu()
    shape = (task.structure.num_outputs, task.structure.num_parameters)
    rank = int(resolve_rank(full, shape, rtol=task.rtol))
    # Autograd's softmax cancels where our centred blocks do not: what `dense` says is sure to half the digits only.
    rounding = EPSILON**0.5 if task.choice.method == "dense" else default_rtol(shape)
    sigma_rank, error = float(full[rank - 1]) if rank else 0.0, rounding * float(full[0])
    return make_record(
        task, float(full[0]), float(full[-1]), sigma_rank, rank, "exact", values=full, reason=reason,
        max_bounds=(float(full[0]) - error, float(full[0]) + error),
        rank_bounds=(max(0.0, sigma_rank - error), sigma_rank + error),
    )  # fmt: skip


def make_record(
    task: Task,
    sigma_max: float,
    sigma_min: float,
    sigma_rank: float,
    rank: int,
    status: Status,
    *,
    max_bounds: tuple[float, float],
    rank_bounds: tuple[float, float],
    values: Tensor | None = None,
    reason: str | None = None,
    num_products: int = 0,
) -> JacobianSpectrum:
    """What was found, with what the structure says about it."""
    structure = task.structure
    return JacobianSpectrum(
        convention=task.convention,
        shape=(structure.num_outputs, structure.num_parameters),
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        sigma_rank=sigma_rank,
        rank=rank,
        nullity=structure.smaller_side - rank,
        null_space=structure.null_space,
        sigma_max_bounds=max_bounds,
        sigma_rank_bounds=rank_bounds,
        rtol=task.rtol,
        method=task.choice.method,
        reason=task.choice.reason if reason is None else f"{task.choice.reason}; {reason}",
        status=status,
        num_products=num_products,
        singular_values=None if values is None else tuple(values.tolist()),
    )

"""One spectrum to compute, the limits at which a solver is taken and believed, and the record of what it found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import torch
from torch import Tensor

from wellcond.jacobian.operator import GramOperator, Hints, JacobianOperator, RankBound
from wellcond.linalg.lanczos import BLOCK, MAX_STEPS, Estimate, largest_eigenvalue
from wellcond.linalg.spectrum import ConditionNumbers, available_bytes, default_rtol, resolve_rank, show_kappas

Convention = Literal["wide", "stack"]
MethodName = Literal["dense", "gram", "cholesky", "implicit"]
Status = Literal["exact", "estimate", "numerically singular"]

EPSILON = torch.finfo(torch.float64).eps
METHODS: Final[tuple[MethodName, ...]] = ("dense", "gram", "cholesky", "implicit")

# --- sizes: which solver is taken ------------------------------------------------------------------------------------

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
"""The same limit for lambda_max I - J J^T, where the shift rounds once more."""
CLOSED: Final = 1e-8
"""Relative width at which the interval of the closed form for sigma_min counts as a number."""
CLOSED_ROUNDING: Final = 1e-6
"""Rounding of sigma_min, relative to it, beyond which the closed form is left to a method that does not square."""
SURE: Final = 10
"""A smallest singular value counts as exact at this many times its error: the error is an estimate."""

# --- time: what is announced, or not begun ---------------------------------------------------------------------------
# One thread of a common processor, in the worse of the cases that a solver can end in: an SVD of J, where squaring
# loses the small singular values, takes ten times as long as the eigenvalues of its Gram matrix.

SLOW_SECONDS: Final = 10.0
"""Whatever is expected to take longer is announced before it begins."""
DECOMPOSED_PER_SECOND: Final = 1.2e9
"""Cubes of the smaller side: 0.8 s at 1024, 25 s at 3072."""
FACTORISED_PER_SECOND: Final = 4e10
"""Cubes of the number of outputs: 6 s at 6200, 110 s at 16384 if the factor has to be in float64, half of it if not."""
OPERATIONS_PER_SECOND: Final = 1e9
"""Of everything that is not a large product of matrices."""


def show_seconds(seconds: float) -> str:
    """A duration in the unit that suits it.

    Example:
        >>> show_seconds(0.25), show_seconds(42.0), show_seconds(5400.0)
        ('0.25 s', '42 s', '1.5 h')
    """
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


@dataclass(frozen=True)
class JacobianSpectrum(ConditionNumbers):
    """Extreme singular values of an attention head's parameter Jacobian, and how they are known.

    `status` is ``exact`` (to rounding), ``estimate`` (only the certified interval is sure) or ``numerically singular``
    (the smallest singular value could not be distinguished from zero). A condition number is infinite only where the
    rank is deficient; where its size was not resolved it is NaN, and `smallest_kappa` and `largest_kappa` enclose it.
    """

    convention: Convention
    shape: tuple[int, int]
    sigma_max: float
    sigma_min: float
    """The last of the min(shape) singular values; NaN where only its interval is known."""
    sigma_rank: float
    """The last one that is not zero; NaN where only its interval is known."""
    rank: int
    nullity: int
    """min(shape) - rank."""
    null_space: str
    """Names of structural null directions, empty if there are none that matter."""
    sigma_max_bounds: tuple[float, float]
    sigma_rank_bounds: tuple[float, float]
    rtol: float
    method: MethodName
    reason: str
    status: Status
    num_products: int = 0
    singular_values: tuple[float, ...] | None = None
    dtype: str = "float64"

    def __repr__(self) -> str:
        kappas = show_kappas(self.condition_number, self.pseudo_condition_number)
        shape, rank = f"{self.shape[0]} x {self.shape[1]}", f"rank {self.rank} of {min(self.shape)}"
        return f"JacobianSpectrum({self.convention}, {shape}, {kappas}, {rank}, {self.status} by {self.method})"

    @property
    def smallest_kappa(self) -> float:
        """Certified lower bound on the condition number over the non-zero singular values; NaN where none is known."""
        low, high = self.sigma_max_bounds[0], self.sigma_rank_bounds[1]
        return low / high if high > 0 else float("nan")

    @property
    def largest_kappa(self) -> float:
        """Certified upper bound on the condition number over the non-zero singular values; infinite where none is."""
        high, low = self.sigma_max_bounds[1], self.sigma_rank_bounds[0]
        return high / low if low > 0 else float("inf")

    @property
    def why_not_finite(self) -> str:
        """Why the strict condition number is infinite or not known; empty where it is finite."""
        if self.rank == 0:
            return "the Jacobian is zero"
        if self.nullity:
            named = f", null space: {self.null_space}" if self.null_space else ""
            return f"rank {self.rank} of {min(self.shape)}{named}"
        if math.isnan(self.sigma_min):
            above = f" and at most {self.largest_kappa:.3g}" if math.isfinite(self.largest_kappa) else ""
            return f"not resolved: at least {self.smallest_kappa:.3g}{above}"
        return "the smallest singular value is zero to float64 rounding" if self.sigma_min == 0 else ""

    def kappa(self, kind: Literal["strict", "pseudo"] = "strict") -> float:
        """One of the two condition numbers by name."""
        return self.condition_number if kind == "strict" else self.pseudo_condition_number


def union_condition_number(spectra: Sequence[JacobianSpectrum], kind: Literal["strict", "pseudo"] = "strict") -> float:
    """Condition number of a layer without W_O from the spectra of its heads (or groups of heads).

    Its heads share neither outputs nor parameters, so the singular values of the layer are the union of theirs.

    Strict: infinite as soon as one head has a deficient rank, or if some heads have more outputs than parameters and
    others fewer: then the layer has min(shape) above the number of singular values of its heads.
    """
    if not spectra:
        raise ValueError("expected the spectrum of at least one head")
    largest = max(one.sigma_max for one in spectra)
    if largest == 0:
        return math.nan
    if kind == "pseudo":
        last = [one.sigma_rank for one in spectra if one.rank]
        if any(math.isnan(sigma) for sigma in last):
            return math.nan
        return largest / min(last) if min(last) > 0 else math.inf
    rows, columns = (sum(one.shape[axis] for one in spectra) for axis in (0, 1))
    complete = min(rows, columns) == sum(min(one.shape) for one in spectra)
    last = [one.sigma_min for one in spectra]
    if not complete or 0 in last or any(one.nullity for one in spectra):
        return math.inf
    return math.nan if any(math.isnan(sigma) for sigma in last) else largest / min(last)


@dataclass(frozen=True)
class Cost:
    """What a solver needs at its peak, how long it may take, and why `auto` takes it."""

    num_bytes: int
    seconds: float
    reason: str


@dataclass(eq=False)
class Problem:
    """The spectrum of one operator that is asked for, and the record of it; everything is computed when needed.

    Attributes:
        operator: J.
        convention: which matrix J is, for the record.
        asked: a method, or ``auto``.
        given_rtol: singular values up to this share of the largest count as zero; max(shape) * eps if None.
        memory_limit: bytes that may be used; what is free if None.
        method: of the solver that was chosen, for the record.
        why: it was chosen.
    """

    operator: JacobianOperator
    convention: Convention = "wide"
    asked: str = "auto"
    given_rtol: float | None = None
    memory_limit: int | None = None
    method: MethodName = "gram"
    why: str = ""

    @cached_property
    def bound(self) -> RankBound:
        """The largest rank that J can have."""
        return self.operator.rank_bound()

    @cached_property
    def gram(self) -> GramOperator:
        """J J^T (of the stack: J^T J)."""
        return self.operator.gram()

    @cached_property
    def smaller_gram(self) -> GramOperator:
        """The smaller Gram matrix that is known."""
        return self.operator.gram("smaller")

    @cached_property
    def hints(self) -> Hints:
        """What else the operator knows."""
        return self.operator.hints

    @cached_property
    def limit(self) -> int:
        """Bytes that may be used."""
        return available_bytes(self.gram.device) if self.memory_limit is None else self.memory_limit

    @property
    def is_auto(self) -> bool:
        """Whether no method was asked for."""
        return self.asked == "auto"

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Outputs and parameters of J."""
        return self.operator.shape

    @property
    def rounding(self) -> float:
        """Relative error of singular values that were not squared."""
        return default_rtol(self.shape)

    @property
    def rtol(self) -> float:
        """Singular values up to this share of the largest count as zero."""
        return self.rounding if self.given_rtol is None else self.given_rtol

    @property
    def has_full_rank(self) -> bool:
        """Whether `gram` may be positive definite."""
        return self.bound.rank == self.gram.size

    @cached_property
    def closed_form(self) -> tuple[tuple[float, float, float], Estimate] | None:
        """Both ends in milliseconds: the interval of sigma_min and its rounding, and the largest eigenvalue.

        None unless the interval of the closed form closes, well above rounding.
        """
        interval = self.hints.closed_minimum()
        if interval is None or interval[0] == 0 or interval[1] > interval[0] * (1 + CLOSED):
            return None
        top = largest_eigenvalue(self.gram.matvec, self.gram.size)
        largest = math.sqrt(top.value)
        # Both ends of the interval come from one rounded SVD of PY: each is sure only up to its rounding.
        error = self.rounding * largest
        if not top.converged or error > CLOSED_ROUNDING * interval[0] or interval[0] <= self.rtol * largest:
            return None
        return (interval[0], interval[1], error), top

    def needed_bytes(self, method: MethodName) -> int:
        """Peak memory of a method, roughly, in bytes of float64."""
        n, smaller, rows = self.gram.size, self.smaller_gram, self.gram.factor_rows or self.gram.size
        # Factors hold an entry of every output for every key dimension; Lanczos keeps its vectors, or all.
        factors = rows * (min(self.bound.memory_rank, rows) + 64)
        vectors = (n if n <= EXHAUSTIVE_LIMIT else LANCZOS_STEPS) * n
        steps = 2 * MAX_STEPS * BLOCK * n if n >= SMALLEST_FLOAT32 else 0  # beside a factor of half the size
        scratch = smaller.scratch if n == smaller.size else 0
        entries = {
            "dense": 3 * self.shape[0] * self.shape[1],
            "gram": 3 * smaller.size**2 + 2 * factors + smaller.scratch,
            "cholesky": max(n * n + vectors, n * n // 2 + steps) + 2 * factors + scratch,
            "implicit": 2 * factors + vectors,
        }
        return 8 * entries[method]

    def fits_triangle(self) -> bool:
        """Whether J can be made triangular within the memory."""
        triangle = self.hints.triangle
        return triangle is not None and triangle.num_bytes is not None and triangle.num_bytes <= self.limit

    def last(self, smallest: float) -> float:
        """The last of min(shape) singular values: zero where the structure leaves fewer that are not."""
        return smallest if self.bound.rank == min(self.shape) else 0.0

    def record(
        self,
        sigma_max: float,
        sigma_min: float,
        sigma_rank: float,
        rank: int,
        status: Status,
        *,
        rank_bounds: tuple[float, float],
        max_bounds: tuple[float, float] | None = None,
        values: Tensor | None = None,
        reason: str | None = None,
        num_products: int = 0,
    ) -> JacobianSpectrum:
        """What was found, with what the structure says about it; sigma_max as a Ritz value, unless bounds are given."""
        if max_bounds is None:
            max_bounds = sigma_max, self.hints.bounds()[1]
        return JacobianSpectrum(
            convention=self.convention,
            shape=self.shape,
            sigma_max=sigma_max,
            sigma_min=sigma_min,
            sigma_rank=sigma_rank,
            rank=rank,
            nullity=min(self.shape) - rank,
            null_space=self.bound.null_space,
            sigma_max_bounds=max_bounds,
            sigma_rank_bounds=rank_bounds,
            rtol=self.rtol,
            method=self.method,
            reason=self.why if reason is None else f"{self.why}; {reason}",
            status=status,
            num_products=num_products,
            singular_values=None if values is None else tuple(values.tolist()),
        )

    def from_singular_values(self, sigma: Tensor, reason: str | None = None) -> JacobianSpectrum:
        """Record of singular values that were not squared; missing ones (compressed away) are zero."""
        full = torch.zeros(min(self.shape), dtype=torch.float64)
        full[: min(len(sigma), len(full))] = sigma[: len(full)].cpu()
        rank = int(resolve_rank(full, self.shape, rtol=self.rtol))
        # Autograd's softmax cancels where our centred factors do not: `dense` is sure to half the digits only.
        rounding = EPSILON**0.5 if self.method == "dense" else self.rounding
        sigma_rank, error = float(full[rank - 1]) if rank else 0.0, rounding * float(full[0])
        return self.record(
            float(full[0]),
            float(full[-1]),
            sigma_rank,
            rank,
            "exact",
            values=full,
            reason=reason,
            max_bounds=(float(full[0]) - error, float(full[0]) + error),
            rank_bounds=(max(0.0, sigma_rank - error), sigma_rank + error),
        )

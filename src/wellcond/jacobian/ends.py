r"""Both ends of a spectrum where all of it would take too long: from a triangular form of J, or from a float32 factor.

From a triangular form R, by Lanczos on R and on its inverse, nothing is squared but single vectors.

# Note [Float32 factor]
The least non-zero singular value by a factor in float32 and products in float64. With A = G / lambda_max, lambda the
least eigenvalue of A and u = 6e-8 the rounding of float32, the factor belongs to
A + SHIFT I + E, and |E| is about u: the factorisation ends as long as the least eigenvalue is not far below SHIFT, that
is for kappa(J) up to about 7e4. Where u << lambda, `smallest_eigenvalue` takes ten steps; near that limit, forty.
Neither the factor nor its error enters the result: it is |J^T x| / |x| for the vector found, whose relative error is
kappa(J) eps and the square of the angle by which x is off. Beyond the limit the factorisation breaks down or the steps
run out; then the caller takes its route in float64.

What is sure. The value is a Rayleigh quotient, so sigma_min never exceeds it. That no other is below it rests, as with
every method of Krylov's kind, on a random start. `no_eigenvalue_below` proves it: a Cholesky factorisation of G - s I
that does not break down has a computed factor with R^T R = G - s I + F, |F| <= n eps lambda_max, so that lambda_min(G)
>= s - n eps lambda_max. In float32 the same statement is weaker than what (L) of theory.md, section 6, gives for
nothing, so the proof costs a factorisation in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from wellcond.jacobian.operator import GramSteps
from wellcond.jacobian.problem import LOWEST, SURE, JacobianSpectrum, Problem
from wellcond.linalg.lanczos import MAX_STEPS, Estimate, largest_eigenvalue, smallest_eigenvalue

SHIFT = 2e-8
"""Added to the diagonal before a factorisation in float32; see Note [Float32 factor]."""


def from_triangle(problem: Problem, why: str = "") -> JacobianSpectrum:
    """Both ends of an operator that can be made triangular without squaring it, and whose rank shows on the way.

    `why` is the reason why this is done at all, where another solver was tried before.
    """
    assert problem.hints.triangle is not None
    top = largest_eigenvalue(problem.gram.matvec, problem.gram.size)
    if top.value <= 0:
        return problem.from_singular_values(torch.zeros(1, dtype=torch.float64))
    largest = math.sqrt(top.value)
    tolerance = problem.rtol * largest
    triangle, dropped = problem.hints.triangle.build(tolerance)
    if float(triangle.diagonal().abs().min()) <= torch.finfo(torch.float64).eps ** 2 * largest:
        # No diagonal entry is below the least singular value, and solving with this one would overflow.
        return problem.record(
            largest,
            0.0,
            0.0,
            problem.bound.rank,
            "numerically singular",
            reason=f"{why}triangular form, whose lower end fades into rounding",
            rank_bounds=(0.0, tolerance),
            num_products=top.num_products,
        )
    bottom = largest_of_inverse(triangle)
    smallest, rank = 1 / math.sqrt(bottom.value), len(triangle)
    error = problem.rounding * largest + dropped
    sure = top.converged and bottom.converged and smallest > SURE * max(error, tolerance)
    if smallest <= tolerance:
        # The lower end fades into rounding: count what is below, as far as LOWEST reaches.
        low = lowest_singular_values(triangle, LOWEST)
        rank -= int((low <= tolerance).sum())
        smallest = float(low[low > tolerance].min()) if bool((low > tolerance).any()) else tolerance
    known = problem.hints.bounds()[0] if rank == problem.gram.size else 0.0
    return problem.record(
        largest,
        smallest if rank == min(problem.shape) else 0.0,
        smallest,
        rank,
        "exact" if sure else "estimate",
        reason=f"{why}triangular form, then its ends",
        max_bounds=(largest - error, largest + error),
        rank_bounds=(max(0.0, smallest - error, known), smallest + error),
        num_products=top.num_products + bottom.num_products,
    )


def from_qr(problem: Problem, triangle: Tensor) -> JacobianSpectrum | None:
    """Both ends from R of J = QR.

    None if rounding may have made zeros of the lower end, so that the rank must be counted.
    """
    side = len(triangle)
    top = largest_eigenvalue(lambda u: triangle.T @ (triangle @ u), side)
    largest = math.sqrt(top.value)
    error = problem.rounding * largest
    lowest_allowed = SURE * max(error, problem.rtol * largest)
    # No diagonal entry of R is below its least singular value; solving with a smaller one would overflow.
    if float(triangle.diagonal().abs().min()) <= lowest_allowed or side != problem.bound.rank:
        return None
    bottom = largest_of_inverse(triangle)
    smallest = 1 / math.sqrt(bottom.value)
    if not smallest > lowest_allowed:
        return None
    return problem.record(
        largest,
        smallest if side == min(problem.shape) else 0.0,
        smallest,
        side,
        "exact" if top.converged and bottom.converged else "estimate",
        reason="squaring loses the small ones: QR of J, then its ends",
        max_bounds=(largest - error, largest + error),
        rank_bounds=(smallest - error, smallest + error),
        num_products=top.num_products + bottom.num_products,
    )


def _solve_twice(triangle: Tensor, u: Tensor) -> Tensor:
    """R^-1 R^-T u, for R upper triangular."""
    half = torch.linalg.solve_triangular(triangle.T, u[:, None], upper=False)
    return torch.linalg.solve_triangular(triangle, half, upper=True)[:, 0]


def largest_of_inverse(triangle: Tensor) -> Estimate:
    """Largest eigenvalue of R^-1 R^-T, one over the square of the lowest singular value of R."""
    return largest_eigenvalue(lambda u: _solve_twice(triangle, u), len(triangle))


def lowest_singular_values(triangle: Tensor, count: int) -> Tensor:
    """`count` of them, by ARPACK to six digits."""
    import scipy.sparse.linalg as sparse  # here, since it adds a filter to `warnings`

    side = len(triangle)

    def product(u: np.ndarray) -> np.ndarray:
        return _solve_twice(triangle, torch.from_numpy(u)).numpy()

    inverse = sparse.LinearOperator((side, side), product, dtype=np.float64)
    first = np.random.default_rng(0).standard_normal(side)
    values = sparse.eigsh(inverse, min(count, side - 1), v0=first, tol=1e-6, return_eigenvectors=False)
    return 1 / torch.from_numpy(values).sqrt()


def from_the_right(wide: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """R (n, n), upper triangular, of [0, R] = wide Q^T, and other Q^T."""
    n = len(wide)
    factors, tau = torch.geqrf(wide.flip(0, 1).T)
    right = factors[:n].triu().T.flip(0, 1)
    if other is None:
        return right, right
    return right, torch.ormqr(factors, tau, other.flip(1), left=False).flip(1)


@dataclass(frozen=True, eq=False)
class Least:
    """The least singular value that is not zero by structure; None with the reason if float32 did not suffice."""

    value: float | None
    reason: str
    num_products: int = 0


def least_singular_value(steps: GramSteps, largest: float, *, max_steps: int = MAX_STEPS) -> Least:
    """See Note [Float32 factor]; `largest` is sigma_max(J) or near it."""
    lower = steps.lower_float32(largest)
    lower.diagonal().add_(SHIFT)
    if not factorise_(lower):
        return Least(None, "the float32 factor broke down")
    found = smallest_eigenvalue(
        lambda rows: steps.scaled_matmat(rows, largest),
        lambda rows: solve_float32(lower, rows),
        steps.size,
        max_steps=max_steps,
        device=lower.device,
    )
    if not found.converged:
        return Least(None, f"the float32 factor did not lead there in {max_steps} steps", found.num_products)
    return Least(steps.norm_of(found.vector), "float32 factor, float64 products", found.num_products)


def no_eigenvalue_below(steps: GramSteps, largest: float, bound: float) -> bool:
    """Whether a factorisation of G - bound I ends; see Note [Float32 factor]."""
    shifted = steps.shifted(largest, bound)
    if shifted is None or not bool(torch.isfinite(shifted.diagonal()).all()):
        return False
    return factorise_(shifted)


def factorise_(lower: Tensor) -> bool:
    """Replace the lower triangle of a symmetric matrix A by L, L L^T = A. False if it is not positive definite.

    On the CPU by LAPACK itself, which needs no second matrix: rows of torch are columns of LAPACK, so its upper factor
    of the transpose is the lower one of this matrix.
    """
    if lower.numel() == 0:
        return True
    if lower.device.type != "cpu":
        factor, failed = torch.linalg.cholesky_ex(lower)
        lower.copy_(factor)
        return int(failed) == 0
    potrf = scipy.linalg.lapack.spotrf if lower.dtype == torch.float32 else scipy.linalg.lapack.dpotrf
    found, info = potrf(lower.numpy().T, lower=0, clean=0, overwrite_a=1)
    if found.ctypes.data != lower.data_ptr():  # LAPACK was given a copy: take its factor
        lower.copy_(torch.from_numpy(found.T))
    return bool(info == 0)


def solve_float32(factor: Tensor, rows: Tensor) -> Tensor:
    """(L L^T)^-1 of float64 rows; each is scaled to one, so that small residuals do not underflow."""
    sizes = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    columns = (rows / sizes).float().T
    half = torch.linalg.solve_triangular(factor, columns, upper=False)
    return torch.linalg.solve_triangular(factor.T, half, upper=True).T.double() * sizes

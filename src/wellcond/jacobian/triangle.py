"""Both ends of the spectrum from a triangular form of J: nothing is squared but single vectors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from wellcond.jacobian.records import JacobianSpectrum
from wellcond.jacobian.select import Task, from_singular_values, make_record
from wellcond.jacobian.tolerances import LOWEST, SURE
from wellcond.linalg.lanczos import Estimate, largest_eigenvalue
from wellcond.linalg.spectrum import default_rtol


def from_triangle(task: Task) -> JacobianSpectrum:
    """Both ends of a form that can be made triangular without squaring it, and whose rank shows on the way."""
    form = task.form
    top = largest_eigenvalue(form.product, form.num_outputs)
    if top.value <= 0:
        return from_singular_values(task, torch.zeros(1, dtype=torch.float64))
    largest = math.sqrt(top.value)
    tolerance = task.rtol * largest
    found = form.triangle(tolerance)
    if float(found.entries.diagonal().abs().min()) <= torch.finfo(torch.float64).eps ** 2 * largest:
        # No diagonal entry is below the least singular value, and solving with this one would overflow.
        return make_record(
            task, largest, 0.0, 0.0, task.structure.max_rank, "numerically singular",
            reason="triangular form, whose lower end fades into rounding",
            max_bounds=(largest, form.certified()[1]), rank_bounds=(0.0, tolerance),
            num_products=top.num_products,
        )  # fmt: skip
    bottom = largest_of_inverse(found.entries)
    smallest, rank = 1 / math.sqrt(bottom.value), len(found.entries)
    error = default_rtol((task.structure.num_outputs, task.structure.num_parameters)) * largest + found.dropped
    sure = top.converged and bottom.converged and smallest > SURE * max(error, tolerance)
    if smallest <= tolerance:
        # The lower end fades into rounding: count what is below, as far as LOWEST reaches.
        low = lowest_singular_values(found.entries, LOWEST)
        rank -= int((low <= tolerance).sum())
        smallest = float(low[low > tolerance].min()) if bool((low > tolerance).any()) else tolerance
    return make_record(
        task, largest, smallest if rank == task.structure.smaller_side else 0.0, smallest, rank,
        "exact" if sure else "estimate", reason="triangular form, then its ends",
        max_bounds=(largest - error, largest + error), rank_bounds=(max(0.0, smallest - error), smallest + error),
        num_products=top.num_products + bottom.num_products,
    )  # fmt: skip


def ends_of(task: Task, triangle: Tensor) -> JacobianSpectrum | None:
    """Both ends from R of J = QR by Lanczos on R and its inverse: nothing is squared but single vectors.

    None if rounding may have made zeros of the lower end, so that the rank must be counted.
    """
    side = len(triangle)
    top = largest_eigenvalue(lambda u: triangle.T @ (triangle @ u), side)
    largest = math.sqrt(top.value)
    error = default_rtol((task.structure.num_outputs, task.structure.num_parameters)) * largest
    lowest_allowed = SURE * max(error, task.rtol * largest)
    # No diagonal entry of R is below its least singular value; solving with a smaller one would overflow.
    if float(triangle.diagonal().abs().min()) <= lowest_allowed or side != task.structure.max_rank:
        return None
    bottom = largest_of_inverse(triangle)
    smallest = 1 / math.sqrt(bottom.value)
    if not smallest > lowest_allowed:
        return None
    sure = top.converged and bottom.converged
    return make_record(
        task, largest, smallest if side == task.structure.smaller_side else 0.0, smallest, side,
        "exact" if sure else "estimate", reason="squaring loses the small ones: QR of J, then its ends",
        max_bounds=(largest - error, largest + error), rank_bounds=(smallest - error, smallest + error),
        num_products=top.num_products + bottom.num_products,
    )  # fmt: skip


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

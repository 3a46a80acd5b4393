r"""The least non-zero singular value by a factor in float32 and products in float64.

With A = G / lambda_max, lambda the least eigenvalue of A and u = 6e-8 the rounding of float32, the factor belongs to
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

from dataclasses import dataclass
from typing import Protocol

import scipy.linalg
import torch
from torch import Tensor

from wellcond.linalg import float32_factor
from wellcond.linalg.davidson import MAX_STEPS, smallest_eigenvalue

SHIFT = 2e-8


class Side(Protocol):
    """J J^T, or J^T J with its null directions lifted; see `squared`."""

    @property
    def side(self) -> int:
        """Rows of the matrix."""
        ...

    @property
    def num_null(self) -> int:
        """Null directions that were lifted."""
        ...

    def square(self, rows: Tensor) -> Tensor:
        """Products with the matrix of J before anything is lifted, float64."""
        ...

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of the matrix of J / largest."""
        ...

    def gram(self, largest: float) -> Tensor:
        """The lower triangle of the matrix of J, float64."""
        ...

    def product(self, rows: Tensor, largest: float) -> Tensor:
        """Products with the matrix of J / largest, float64."""
        ...

    def length(self, vector: Tensor) -> float:
        """|J x| / |x| without squaring J."""
        ...


@dataclass(frozen=True, eq=False)
class Least:
    """The least singular value that is not zero by structure; None with the reason if float32 did not suffice."""

    value: float | None
    reason: str
    num_products: int = 0


def least_singular_value(side: Side, largest: float, *, max_steps: int = MAX_STEPS) -> Least:
    """By Davidson's method; `largest` is sigma_max(J) or near it."""
    lower = side.lower_float32(largest)
    if not float32_factor.factorise_(lower, SHIFT):
        return Least(None, "the float32 factor broke down")
    found = smallest_eigenvalue(
        lambda rows: side.product(rows, largest),
        lambda rows: float32_factor.solve(lower, rows),
        side.side,
        max_steps=max_steps,
    )
    if not found.converged:
        return Least(None, f"the float32 factor did not lead there in {max_steps} steps", found.num_products)
    return Least(side.length(found.vector), "float32 factor, float64 products", found.num_products)


def no_eigenvalue_below(gram: Tensor, bound: float) -> bool:
    """Whether a factorisation of gram - bound I ends; only the lower triangle is read, and it is overwritten."""
    gram.diagonal().sub_(bound)
    if not bool(torch.isfinite(gram.diagonal()).all()):
        return False
    _, info = scipy.linalg.lapack.dpotrf(gram.numpy().T, lower=0, clean=0, overwrite_a=1)
    return bool(info == 0)

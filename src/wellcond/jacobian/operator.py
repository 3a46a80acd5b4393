"""`JacobianOperator`: the parameter Jacobian of an attention head, known by its products with vectors.

An implementation has four members: `shape`, `matvec`, `rmatvec` and `rank_bound`. What it knows beyond that it may say
by three more: `as_matrix`, `gram` and `hints`. Nothing else is asked of it; how a spectrum is computed is the matter of
`wellcond.jacobian.solve`, which knows no implementation.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from wellcond.errors import WellcondError
from wellcond.jacobian.ranks import RankBound

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

CPU = torch.device("cpu")
Side = Literal["outputs", "smaller"]


class NotDefinedError(WellcondError, ValueError):
    """A convention or a method that is not defined for this attention."""


class GramSteps(Protocol):
    """A Gram matrix for iterations that a float32 factor steers; see `wellcond.jacobian.ends`.

    It is J J^T, or J^T J whose null directions are lifted to the upper end of the spectrum.
    """

    @property
    def size(self) -> int:
        """Rows of the matrix."""
        ...

    @property
    def num_null(self) -> int:
        """Null directions that were lifted."""
        ...

    def matmat(self, rows: Tensor) -> Tensor:
        """Products with the matrix of J before anything is lifted, float64."""
        ...

    def scaled_matmat(self, rows: Tensor, largest: float) -> Tensor:
        """Products with the matrix of J / largest, float64."""
        ...

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of the matrix of J / largest."""
        ...

    def shifted(self, largest: float, bound: float) -> Tensor | None:
        """The lower triangle of a float64 matrix that is positive definite exactly if this one less `bound` I is.

        None where it is known not to be.
        """
        ...

    def norm_of(self, vector: Tensor) -> float:
        """|J x| / |x| (or |J^T x| / |x|) without squaring J."""
        ...


@dataclass(frozen=True, eq=False)
class GramOperator:
    """J J^T, or J^T J where that is smaller and known.

    Attributes:
        size: its rows.
        matvec: its product with a vector, which is given and returned on the CPU.
        matrix: builds it.
        scratch: entries of tables that `matrix` needs beside itself.
        factor_rows: rows of the factors of J that are kept; `size` if None.
        device: where the matrix is built.
        steps: the same matrix for iterations steered by a float32 factor; None where it is not known that way. The
            function may find out that there is none.
    """

    size: int
    matvec: Callable[[Tensor], Tensor]
    matrix: Callable[[], Tensor]
    scratch: int = 0
    factor_rows: int | None = None
    device: torch.device = CPU
    steps: Callable[[], GramSteps | None] | None = None


@dataclass(frozen=True, eq=False)
class Triangle:
    """Upper triangular, with the singular values of J that are not zero; `dropped`: the norm of what counts as zero."""

    entries: Tensor
    dropped: float


@dataclass(frozen=True, eq=False)
class TriangleHint:
    """How J is made triangular without squaring it.

    Attributes:
        build: the triangle, in which singular values up to a tolerance may be left out.
        num_bytes: memory that this needs; None where it is not known.
        preferred: cheaper than all eigenvalues of a Gram matrix.
    """

    build: Callable[[float], Triangle]
    num_bytes: int | None = None
    preferred: bool = False


def no_bounds() -> tuple[float, float]:
    """Where nothing is known: sigma_min >= 0, sigma_max <= infinity."""
    return 0.0, math.inf


@dataclass(frozen=True, eq=False)
class Hints:
    """What some operators know about their singular values; every field may be left out.

    Attributes:
        bounds: sure bounds on sigma_min (of all rows) and sigma_max.
        closed_minimum: an interval that surely contains sigma_min, from a closed form; None where there is none.
        lower_kappa: a number that kappa(J) surely exceeds, at next to no price.
        triangle: how J is made triangular.
        reference: J by other means, for tests of everything else; method ``dense`` takes it.
        grams: matrices of ``gram("smaller")`` of several operators of one class and shape, stacked.
        matrices: `as_matrix` of several operators of one class and shape, stacked.
    """

    bounds: Callable[[], tuple[float, float]] = no_bounds
    closed_minimum: Callable[[], tuple[float, float] | None] = lambda: None
    lower_kappa: Callable[[], float] = lambda: 0.0
    triangle: TriangleHint | None = None
    reference: Callable[[], Tensor] | None = None
    grams: Callable[[Sequence[Any]], Tensor] | None = None
    matrices: Callable[[Sequence[Any]], Tensor] | None = None


class JacobianOperator(abc.ABC):
    """The Jacobian J of what an attention head puts out, with respect to its weights; float64.

    Columns are W_Q, W_K, W_V in this order, each flattened as its D x d matrix (in x out) row by row; W_Q of every
    query head where several share keys and values; a bias that is a parameter is the last row of its matrix.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and parameters."""

    @abc.abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """J v, for a vector of parameters on the CPU."""

    @abc.abstractmethod
    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u, for a vector of outputs on the CPU."""

    @abc.abstractmethod
    def rank_bound(self) -> RankBound:
        """The largest rank that such a Jacobian can have."""

    def as_matrix(self) -> Tensor:
        """J, or a matrix with other columns and the same non-zero singular values."""
        return torch.stack([self.rmatvec(unit) for unit in torch.eye(self.shape[0], dtype=torch.float64)])

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T; for the ``smaller`` side J^T J, where that is smaller and known."""
        return GramOperator(self.shape[0], lambda u: self.matvec(self.rmatvec(u)), self._squared)

    @property
    def hints(self) -> Hints:
        """What else is known about the singular values."""
        return Hints()

    def _squared(self) -> Tensor:
        jacobian = self.as_matrix()
        return jacobian @ jacobian.T

    def to_linear_operator(self) -> LinearOperator:
        """J for scipy, whose vectors are float64 arrays.

        Example:
            >>> from wellcond.jacobian.head import Head
            >>> from wellcond.jacobian.softmax import SoftmaxJacobian
            >>> x, one = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
            >>> operator = SoftmaxJacobian(Head(x, one, one, one, 1.0)).to_linear_operator()
            >>> operator.shape, operator.matvec([1.0, 0.0, 0.0]).shape
            ((2, 3), (2,))
        """
        from scipy.sparse.linalg import LinearOperator  # here, since it adds a filter to `warnings`

        def through(product: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            return lambda vector: product(torch.as_tensor(vector, dtype=torch.float64).reshape(-1)).numpy()

        return LinearOperator(self.shape, matvec=through(self.matvec), rmatvec=through(self.rmatvec), dtype="float64")

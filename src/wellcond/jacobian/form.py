"""`AbstractForm`: what the methods that compute a spectrum may ask of an attention, whatever its mathematics.

A new form says four things: its structure, J J^T times a vector, J itself, and how many outputs there are. Whatever it
knows beyond that (a cheaper Gram matrix, certified ends, a closed form, a triangular factor) it says by overriding a
default. No method knows a concrete class.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from wellcond.errors import NotDefinedError
from wellcond.jacobian.diagnosis import HeadDiagnosis
from wellcond.jacobian.head import Blocks, Head
from wellcond.theory.ranks import Structure


@dataclass(frozen=True, eq=False)
class Triangle:
    """Upper triangular, with the singular values of J that are not zero; `dropped`: the norm of what counts as zero."""

    entries: Tensor
    dropped: float


class Side(Protocol):
    """J J^T, or J^T J with its null directions lifted; see `wellcond.jacobian.gram`."""

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

    def shifted(self, largest: float, bound: float) -> Tensor | None:
        """The lower triangle of a float64 matrix that is positive definite exactly if this one less `bound` I is.

        None where it is known not to be.
        """
        ...

    def product(self, rows: Tensor, largest: float) -> Tensor:
        """Products with the matrix of J / largest, float64."""
        ...

    def length(self, vector: Tensor) -> float:
        """|J x| / |x| without squaring J."""
        ...


class AbstractForm(abc.ABC):
    """One attention head (or layer) whose parameter Jacobian J, n outputs x p parameters, is asked for."""

    has_triangle: ClassVar[bool] = False
    """Whether `triangle` is known, and cheaper than all eigenvalues of a Gram matrix."""
    has_sides: ClassVar[bool] = False
    """Whether `output_side` and `smaller_side` are known."""
    device: torch.device = torch.device("cpu")
    """Where J and its Gram matrices are computed."""
    plain_head: Head | None = None
    """The head itself, where it is plain softmax: what can be diagnosed, and bounded by the theory."""

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """Rows n of the wide Jacobian."""

    @abc.abstractmethod
    def structure(self) -> Structure:
        """Sizes, and the largest rank that such a Jacobian can have."""

    @abc.abstractmethod
    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector of length n, which is given and returned on the CPU."""

    @abc.abstractmethod
    def explicit_jacobian(self) -> Tensor:
        """J, or a matrix with fewer columns and the same non-zero singular values."""

    def output(self) -> Tensor:
        """The value whose derivative J is, (heads, N, dv) or (N, dv); flattened, it has the order of the rows of J."""
        raise NotDefinedError(f"{type(self).__name__} is not the derivative of an output")

    def output_gram(self) -> Tensor:
        """J J^T, n x n."""
        jacobian = self.explicit_jacobian()
        return jacobian @ jacobian.T

    @property
    def gram_side(self) -> int:
        """Side of the smaller Gram matrix that this form can build."""
        return self.num_outputs

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller and known."""
        return self.output_gram()

    @classmethod
    def structures(cls, forms: Sequence[Self]) -> list[Structure]:
        """`structure` of each."""
        return [form.structure() for form in forms]

    @classmethod
    def smaller_grams(cls, forms: Sequence[Self]) -> Tensor:
        """`smaller_gram` of forms of one shape, stacked."""
        return _stacked([form.smaller_gram() for form in forms])

    @classmethod
    def explicit_jacobians(cls, forms: Sequence[Self]) -> Tensor:
        """`explicit_jacobian` of forms of one shape, stacked."""
        return _stacked([form.explicit_jacobian() for form in forms])

    def reference_jacobian(self) -> Tensor:
        """J as method ``dense`` takes it, for tests of everything else: not compressed where that is possible."""
        return self.explicit_jacobian()

    def certified(self) -> tuple[float, float]:
        """Sure bounds on sigma_min (of all n rows) and sigma_max; (0, inf) where none is known."""
        return 0.0, math.inf

    def closed_minimum(self) -> tuple[float, float] | None:
        """An interval that surely contains sigma_min, from a closed form; None where there is none."""
        return None

    def sure_condition_number(self) -> float:
        """A number that kappa(J) surely exceeds, at next to no price; 0 where none is known."""
        return 0.0

    def triangle(self, tolerance: float) -> Triangle:
        """An upper triangular matrix with the singular values of J, made without squaring J."""
        raise NotDefinedError(f"{type(self).__name__} has no triangular form")

    def triangle_bytes(self) -> int | None:
        """Memory that `triangle` needs; None where it is not known."""
        return None

    def output_side(self) -> Side | None:
        """J J^T for iterations; None where the form has only the matrix."""
        return None

    def smaller_side(self) -> Side | None:
        """The smaller of J J^T and J^T J for iterations; None where its null space is not known as a basis."""
        return None

    def stacked(self) -> AbstractForm:
        """The same in the papers' convention [J_Q; J_K; J_V]."""
        raise NotDefinedError("the stacked convention is defined for plain softmax attention only")

    def plain_blocks(self) -> Blocks | None:
        """Blocks of `plain_head` with respect to its weights alone; None where there is no such head."""
        return None

    def diagnose(self) -> HeadDiagnosis | None:
        """What dominates the conditioning of a head that is not `plain_head`; None where that is not known."""
        return None

    @property
    def block_rows(self) -> int:
        """Rows of the covariance blocks that the form keeps."""
        return self.num_outputs

    @property
    def table_entries(self) -> int:
        """Entries of further tables that the smaller Gram matrix is assembled from."""
        return 0


def _stacked(matrices: list[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)


class ExplicitGram(AbstractForm):
    """A form whose Gram matrices come from its explicit Jacobian, the smaller of the two."""

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller."""
        jacobian = self.explicit_jacobian()
        return jacobian @ jacobian.T if jacobian.shape[0] <= jacobian.shape[1] else jacobian.T @ jacobian

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
from typing import ClassVar

import torch
from torch import Tensor

from wellcond.errors import WellcondError
from wellcond.head import Blocks, Head
from wellcond.jacobian.mixed_ends import Side
from wellcond.jacobian.tolerances import EXHAUSTIVE_LIMIT, LANCZOS_STEPS, SMALLEST_FLOAT32
from wellcond.linalg.davidson import BLOCK, MAX_STEPS
from wellcond.linalg.spectrum import resolve_rank, singular_values


class NotDefinedError(WellcondError, ValueError):
    """A convention or a method that is not defined for this attention."""


@dataclass(frozen=True)
class Structure:
    """Sizes and structural ranks of a head's Jacobian."""

    num_outputs: int
    num_parameters: int
    token_rank: int
    memory_rank: int
    max_rank: int
    """No Jacobian of this structure has a larger rank; a generic one has this rank."""
    null_space: str

    @property
    def smaller_side(self) -> int:
        """min(shape)."""
        return min(self.num_outputs, self.num_parameters)


@dataclass(frozen=True, eq=False)
class Triangle:
    """Upper triangular, with the singular values of J that are not zero; `dropped`: the norm of what counts as zero."""

    entries: Tensor
    dropped: float


def token_rank(tokens: Tensor) -> int:
    """Numerical rank of the tokens."""
    return int(resolve_rank(singular_values(tokens), tuple(tokens.shape)))


class AbstractForm(abc.ABC):
    """One attention head (or layer) whose parameter Jacobian J, n outputs x p parameters, is asked for."""

    has_triangle: ClassVar[bool] = False
    """Whether `triangle` is known."""
    has_sides: ClassVar[bool] = False
    """Whether `output_side` and `smaller_side` are known."""
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
        """J J^T times a vector of length n."""

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

    def reference_jacobian(self) -> Tensor:
        """J as method ``dense`` takes it, for tests of everything else: not compressed where that is possible."""
        return self.explicit_jacobian()

    def certified(self) -> tuple[float, float]:
        """Sure bounds on sigma_min (of all n rows) and sigma_max; (0, inf) where none is known."""
        return 0.0, math.inf

    def closed_minimum(self) -> tuple[float, float] | None:
        """An interval that surely contains sigma_min, from a closed form; None where there is none."""
        return None

    def triangle(self, tolerance: float) -> Triangle:
        """An upper triangular matrix with the singular values of J, made without squaring J."""
        raise NotDefinedError(f"{type(self).__name__} has no triangular form")

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

    @property
    def block_rows(self) -> int:
        """Rows of the covariance blocks that the form keeps."""
        return self.num_outputs

    @property
    def table_entries(self) -> int:
        """Entries of further tables that the smaller Gram matrix is assembled from."""
        return 0

    def needed_bytes(self, method: str, structure: Structure) -> int:
        """Peak memory of a method, roughly, in bytes of float64."""
        n, side, rows = self.num_outputs, self.gram_side, self.block_rows
        # Covariance blocks hold an entry of every output for every key dimension; Lanczos keeps its vectors, or all.
        blocks = rows * (min(structure.memory_rank, rows) + 64)
        vectors = (n if n <= EXHAUSTIVE_LIMIT else LANCZOS_STEPS) * n
        steps = 2 * MAX_STEPS * BLOCK * n if n >= SMALLEST_FLOAT32 else 0  # beside a factor of half the size
        entries = {
            "dense": 3 * structure.num_outputs * structure.num_parameters,
            "gram": 3 * side**2 + 2 * blocks + self.table_entries,
            "cholesky": max(n * n + vectors, n * n // 2 + steps)
            + 2 * blocks
            + (self.table_entries if n == side else 0),
            "implicit": 2 * blocks + vectors,
        }
        return 8 * entries[method]


class ExplicitGram(AbstractForm):
    """A form whose Gram matrices come from its explicit Jacobian, the smaller of the two."""

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller."""
        jacobian = self.explicit_jacobian()
        return jacobian @ jacobian.T if jacobian.shape[0] <= jacobian.shape[1] else jacobian.T @ jacobian


@dataclass(frozen=True, eq=False)
class SumForm(AbstractForm):
    """Several sets of parameters behind the same outputs: J = [J_1 J_2 ...], and J J^T is the sum of theirs.

    Heads behind W_O, and W_O itself, for example. The first part has the output.
    """

    parts: tuple[AbstractForm, ...]

    def __post_init__(self) -> None:
        """Check that the parts are about the same outputs."""
        if len({part.num_outputs for part in self.parts}) != 1:
            raise ValueError(f"expected parts of one size, got {[part.num_outputs for part in self.parts]} outputs")

    @property
    def num_outputs(self) -> int:
        """The same for all."""
        return self.parts[0].num_outputs

    def output(self) -> Tensor:
        """That of the first part."""
        return self.parts[0].output()

    def structure(self) -> Structure:
        """Sizes, and an upper bound on the rank: the parts may move the outputs alike."""
        found = [part.structure() for part in self.parts]
        rank = min(self.num_outputs, sum(part.max_rank for part in found))
        names = ["upper bound on the rank", listed(found)] if rank < self.num_outputs else []
        return Structure(
            num_outputs=self.num_outputs,
            num_parameters=sum(part.num_parameters for part in found),
            token_rank=max(part.token_rank for part in found),
            memory_rank=max(part.memory_rank for part in found),
            max_rank=rank,
            null_space="; ".join(name for name in names if name),
        )

    def product(self, flat: Tensor) -> Tensor:
        """Sum of the parts' products."""
        return sum((part.product(flat) for part in self.parts[1:]), start=self.parts[0].product(flat))

    def output_gram(self) -> Tensor:
        """Sum of the parts' Gram matrices."""
        return sum((part.output_gram() for part in self.parts[1:]), start=self.parts[0].output_gram())

    def explicit_jacobian(self) -> Tensor:
        """The parts side by side."""
        return torch.cat([part.explicit_jacobian() for part in self.parts], dim=1)


def listed(parts: Sequence[Structure]) -> str:
    """Null spaces of the parts, each once."""
    return " | ".join(dict.fromkeys(part.null_space for part in parts if part.null_space))

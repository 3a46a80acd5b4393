r"""`JacobianOperator`: the parameter Jacobian of an attention head, known by its products with vectors.

An implementation has four members: `shape`, `matvec`, `rmatvec` and `rank_bound`. What it knows beyond that it may say
by three more: `as_matrix`, `gram` and `hints`. Nothing else is asked of it; how a spectrum is computed is the matter of
`wellcond.jacobian.solve`, which knows no implementation.

One operator is made of others: heads behind a gate, a norm or the output projection W_O. Query heads that share keys
and values share parameters, so they are one operator.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from wellcond.linalg.spectrum import resolve_rank, singular_values

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

CPU = torch.device("cpu")
Side = Literal["outputs", "smaller"]


@dataclass(frozen=True)
class RankBound:
    """The largest rank that a Jacobian can have."""

    rank: int
    """No Jacobian of this structure has a larger rank; a generic one has this rank."""
    null_space: str = ""
    """Names of null directions, empty where there are none that matter."""
    memory_rank: int = 0
    """Rank of the tokens of keys and values, which decides the size of the factors of J."""


class GramSteps(abc.ABC):
    """A Gram matrix A^T A for iterations that a float32 factor steers; see `wellcond.jacobian.ends`.

    A is J^T, or J; the null directions of J^T J are lifted to the upper end of the spectrum, `num_null` of them.
    """

    num_null: int = 0

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Rows of the matrix."""

    @abc.abstractmethod
    def forward(self, rows: Tensor) -> Tensor:
        """A of every row, before anything is lifted, float64."""

    @abc.abstractmethod
    def backward(self, rows: Tensor) -> Tensor:
        """A^T of every row."""

    @abc.abstractmethod
    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of the matrix of J / largest."""

    @abc.abstractmethod
    def shifted(self, largest: float, bound: float) -> Tensor | None:
        """The lower triangle of a float64 matrix that is positive definite exactly if this one less `bound` I is.

        None where it is known not to be.
        """

    def matmat(self, rows: Tensor) -> Tensor:
        """Products with A^T A."""
        return self.backward(self.forward(rows))

    def scaled_matmat(self, rows: Tensor, largest: float) -> Tensor:
        """Products with the matrix of J / largest, what is lifted included."""
        return self.matmat(rows) / largest**2

    def norm_of(self, vector: Tensor) -> float:
        """|A x| / |x|: nothing is squared that loses digits."""
        return float(self.forward(vector[None]).norm() / vector.norm())


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
class TriangleHint:
    """How J is made triangular without squaring it.

    Attributes:
        build: an upper triangular matrix with the singular values of J that are not zero, up to a tolerance, and the
            norm of what was dropped below it.
        num_bytes: memory that this needs; None where it is not known.
        preferred: cheaper than all eigenvalues of a Gram matrix.
    """

    build: Callable[[float], tuple[Tensor, float]]
    num_bytes: int | None = None
    preferred: bool = False


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

    bounds: Callable[[], tuple[float, float]] = lambda: (0.0, math.inf)
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


@dataclass(frozen=True, eq=False)
class MappedOutputs(JacobianOperator):
    """L J of heads whose outputs pass a linear map L, token by token: a gate, a norm (theory.md, section 5.4), or W_O.

    Attributes:
        parts: operators of heads, or of groups of heads, with parameters of their own, whose mapped outputs are added.
        maps: for each part the block of L that reads it, (h', o, h, dv) or, if tokens differ, (N, h', o, h, dv): from
            its heads h and their channels to what leaves the map, heads h' of o channels.
        num_tokens: N.
        name: of the map in the names of null directions, which are those of the parts if it is empty.
        value: what leaves the map, (h', N, o), where it was asked for.
    """

    parts: tuple[JacobianOperator, ...]
    maps: tuple[Tensor, ...]
    num_tokens: int
    name: str = ""
    value: Tensor | None = None

    def __post_init__(self) -> None:
        for part, block in zip(self.parts, self.maps, strict=True):
            if part.shape[0] != self.num_tokens * math.prod(block.shape[-2:]):
                raise ValueError(f"a map of shape {tuple(block.shape)} does not read {part.shape[0]} outputs")

    @property
    def shape(self) -> tuple[int, int]:
        """What leaves the map, and the parameters of all heads."""
        return self.num_tokens * math.prod(self.maps[0].shape[-4:-2]), sum(part.shape[1] for part in self.parts)

    def output(self) -> Tensor | None:
        """What leaves the map."""
        return self.value

    def rank_bound(self) -> RankBound:
        """At most the rank of the map, and no more than the heads have together: their parameters differ."""
        parts = [part.rank_bound() for part in self.parts]
        by_token = torch.cat([block.flatten(-2).flatten(-3, -2) for block in self.maps], -1)
        ranks = resolve_rank(singular_values(by_token), tuple(by_token.shape))
        of_map = int(ranks.sum()) if by_token.dim() == 3 else self.num_tokens * int(ranks)
        outputs = self.shape[0]
        rank = min(outputs, sum(part.rank for part in parts), of_map)
        listed = " | ".join(dict.fromkeys(part.null_space for part in parts if part.null_space))
        names = [listed] if listed else []
        if self.name and rank < outputs:
            names = ["upper bound on the rank", f"outputs that {self.name} does not reach: {outputs - rank}", *names]
        return RankBound(rank, "; ".join(names), max(part.memory_rank for part in parts))

    def _push(self, block: Tensor, rows: Tensor) -> Tensor:
        """L applied to outputs of one part, (its outputs, columns) -> (outputs, columns)."""
        by_head = rows.reshape(block.shape[-2], self.num_tokens, block.shape[-1], -1)
        token = "i" if block.dim() == 5 else ""
        return torch.einsum(f"{token}pokv,kivc->pioc", block, by_head).flatten(0, 2)

    def _pull(self, block: Tensor, u: Tensor) -> Tensor:
        """L^T u for one part, in the order of its outputs."""
        rows = u.view(block.shape[-4], self.num_tokens, -1)
        token = "i" if block.dim() == 5 else ""
        return torch.einsum(f"{token}pokv,pio->kiv", block, rows).flatten()

    def _each(self) -> Iterator[tuple[JacobianOperator, Tensor]]:
        return zip(self.parts, self.maps, strict=True)

    def matvec(self, v: Tensor) -> Tensor:
        """The sum of what the directions move the mapped outputs by."""
        given = v.split([part.shape[1] for part in self.parts])
        moved = [self._push(block, part.matvec(w)) for (part, block), w in zip(self._each(), given, strict=True)]
        return torch.stack(moved).sum(0)[:, 0]

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T (L^T u) of every part, one after the other."""
        return torch.cat([part.rmatvec(self._pull(block, u)) for part, block in self._each()])

    def as_matrix(self) -> Tensor:
        """L J with compressed tokens: the same singular values."""
        return torch.cat([self._push(block, part.as_matrix()) for part, block in self._each()], dim=1)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """L (J J^T) L^T on either side; its products form nothing of size n x n if no part forms it."""
        return GramOperator(self.shape[0], self._gram_product, self._output_gram)

    def _gram_product(self, u: Tensor) -> Tensor:
        found = [self._push(block, part.gram().matvec(self._pull(block, u))) for part, block in self._each()]
        return torch.stack(found).sum(0)[:, 0]

    def _output_gram(self) -> Tensor:
        gram = self.maps[0].new_zeros(self.shape[0], self.shape[0])
        for part, block in self._each():
            gram += self._push(block, self._push(block, part.gram().matrix()).T)
        return gram

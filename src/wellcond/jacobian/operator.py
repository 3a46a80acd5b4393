r"""`JacobianOperator`: the parameter Jacobian of an attention head, known by its products with vectors.

An implementation has four members: `shape`, `matvec`, `rmatvec` and `rank_bound`. What it knows beyond that it may say
by three more: `as_matrix`, `gram` and `hints`. Nothing else is asked of it; how a spectrum is computed is the matter of
`wellcond.jacobian.solve`, which knows no implementation.

Two operators are made of others: heads behind a gate or a norm, and heads mixed by the output projection W_O.

Legend (everything float64):

    o_i^h  (dv)                 output of head h on token i;  c_i = (o_i^1 .. o_i^H) the concatenation
    W_h  (dv x Do)              rows of W_O that read head h;  torch stores W_O^T = [W_1^T .. W_H^T] (Do, H dv)
    y_i = W_O^T c_i             output of the layer, rows (i, o), n = N Do

    G_ij = sum over operators of  sum_hh' W_h^T G_(h,i),(h',j) W_h'    h, h' of one operator

Query heads that share keys and values share parameters, so they are one operator and h != h' occurs.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from wellcond.jacobian.ranks import RankBound
from wellcond.linalg.spectrum import cast_to_float64, move_to, numerical_rank

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

CPU = torch.device("cpu")
Side = Literal["outputs", "smaller"]


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
class MappedRows(JacobianOperator):
    """G J of another operator's J; G has one block for each token, the Jacobian of what its outputs pass before W_O.

    A gate acts on each query head by itself; a norm over all heads mixes those of a group (theory.md, section 5.4).

    Attributes:
        inner: the heads before the map, rows (g, N, dv).
        maps: (g, g, N, dv', dv), from the second head to the first.
        value: the heads behind the map, (g, N, dv').
    """

    inner: JacobianOperator
    maps: Tensor
    value: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """R dv' outputs, and the parameters of the heads."""
        return self.value.numel(), self.inner.shape[1]

    def output(self) -> Tensor:
        """What leaves the map."""
        return self.value

    def rank_bound(self) -> RankBound:
        """That of the heads; a map that is not injective can only lower it."""
        inner = self.inner.rank_bound()
        by_token = self.maps.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        rank = min(inner.rank, int(torch.linalg.matrix_rank(by_token).sum()))
        return RankBound(rank, inner.null_space, inner.memory_rank)

    def _push(self, rows: Tensor) -> Tensor:
        """G applied to outputs of the heads, (R dv, columns) -> (R dv', columns)."""
        g, _, n, _, dv = self.maps.shape
        return torch.einsum("hknop,knpc->hnoc", self.maps, rows.reshape(g, n, dv, -1)).reshape(self.shape[0], -1)

    def _pull(self, u: Tensor) -> Tensor:
        """G^T u."""
        return torch.einsum("hknop,hno->knp", self.maps, u.view_as(self.value)).flatten()

    def matvec(self, v: Tensor) -> Tensor:
        """G (J v)."""
        return self._push(self.inner.matvec(v))[:, 0]

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T (G^T u)."""
        return self.inner.rmatvec(self._pull(u))

    def as_matrix(self) -> Tensor:
        """G J."""
        return self._push(self.inner.as_matrix())

    def gram(self, side: Side = "outputs") -> GramOperator:
        """G (J J^T) G^T, on either side."""
        inner = self.inner.gram()
        return GramOperator(
            self.shape[0],
            lambda u: self._push(inner.matvec(self._pull(u)))[:, 0],
            lambda: self._push(self._push(inner.matrix()).T),
        )


@dataclass(frozen=True, eq=False)
class ProjectedHeads(JacobianOperator):
    """Heads behind the output projection, which is fixed.

    Attributes:
        heads: operators of heads, or of groups of heads, in the order in which W_O reads them.
        outputs: for each of them the heads, tokens and channels of its rows: (H, N, dv).
        w_o: (Do, H dv), as torch stores it.
    """

    heads: tuple[JacobianOperator, ...]
    outputs: tuple[tuple[int, int, int], ...]
    w_o: Tensor

    def __post_init__(self) -> None:
        cast_to_float64(self, ("w_o",))
        move_to(torch.device("cpu"), self, ("w_o",))
        width = sum(count * dv for count, _, dv in self.outputs)
        if self.w_o.dim() != 2 or self.w_o.shape[1] != width:
            raise ValueError(f"w_o: expected {width} columns, got shape {tuple(self.w_o.shape)}")

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.outputs[0][1]

    @property
    def shape(self) -> tuple[int, int]:
        """N Do outputs, and the parameters of all heads."""
        return self.num_tokens * self.w_o.shape[0], sum(head.shape[1] for head in self.heads)

    def rank_bound(self) -> RankBound:
        """At most N rank(W_O), and no more than the heads have together: their parameters differ, so ranks add."""
        parts = [head.rank_bound() for head in self.heads]
        outputs = self.shape[0]
        rank = min(outputs, sum(part.rank for part in parts), self.num_tokens * numerical_rank(self.w_o))
        listed = " | ".join(dict.fromkeys(part.null_space for part in parts if part.null_space))
        names = [listed] if listed else []
        if rank < outputs:
            names = ["upper bound on the rank", f"outputs that W_O does not reach: {outputs - rank}", *names]
        return RankBound(rank, "; ".join(names), max(part.memory_rank for part in parts))

    @cached_property
    def _slices(self) -> list[tuple[JacobianOperator, Tensor]]:
        """Each operator with the columns of w_o that read it, (Do, heads, dv)."""
        widths = [count * dv for count, _, dv in self.outputs]
        parts = zip(self.heads, self.w_o.split(widths, dim=1), self.outputs, strict=True)
        return [(head, weight.reshape(len(weight), count, dv)) for head, weight, (count, _, dv) in parts]

    def _push(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Outputs (heads N dv, columns) of one operator through W_O, (N Do, columns)."""
        _, count, dv = weight.shape
        by_head = rows.reshape(count, self.num_tokens, dv, -1)
        return torch.einsum("ohv,hivp->iop", weight, by_head).flatten(0, 1)

    def _pull(self, weight: Tensor, u: Tensor) -> Tensor:
        """W_O^T u for one operator, in the order of its rows."""
        return torch.einsum("ohv,io->hiv", weight, u.view(self.num_tokens, -1)).flatten()

    def matvec(self, v: Tensor) -> Tensor:
        """W_O^T times what the directions move the heads by."""
        parts = v.split([head.shape[1] for head in self.heads])
        each = zip(self._slices, parts, strict=True)
        moved = [self._push(weight, head.matvec(part)) for (head, weight), part in each]
        return torch.stack(moved).sum(0)[:, 0]

    def rmatvec(self, u: Tensor) -> Tensor:
        """J_h^T W_h u of every operator, one after the other."""
        return torch.cat([head.rmatvec(self._pull(weight, u)) for head, weight in self._slices])

    def as_matrix(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat([self._push(weight, head.as_matrix()) for head, weight in self._slices], dim=1)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T on either side; its products form nothing of size n x n if no head forms it."""
        return GramOperator(self.shape[0], self._gram_product, self._output_gram)

    def _gram_product(self, u: Tensor) -> Tensor:
        found = [self._push(weight, head.gram().matvec(self._pull(weight, u))) for head, weight in self._slices]
        return torch.stack(found).sum(0)[:, 0]

    def _output_gram(self) -> Tensor:
        n, out = self.num_tokens, self.w_o.shape[0]
        gram = self.w_o.new_zeros(n, out, n, out)
        for head, weight in self._slices:
            _, count, dv = weight.shape
            part = head.gram().matrix().view(count, n, dv, count, n, dv)
            half = torch.einsum("ohv,hivkjw->iokjw", weight, part)
            gram += torch.einsum("iokjw,pkw->iojp", half, weight)
        return gram.reshape(n * out, n * out)

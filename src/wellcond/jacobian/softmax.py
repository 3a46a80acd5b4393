r"""Jacobian of a softmax head, outputs x parameters (theory.md, section 3 and section 5.4), plain or with mapped rows.

Queries, keys and values may pass maps of their own, row by row: qhat_r = f_r(q_r), khat_j, vhat_j, with Jacobians
N_r^q, N_j^k, N_j^v; S_rj = h_rj(qhat_r . khat_j) with slopes h'_rj. A plain head has the identity and the slope s.
Products with J and its transpose need nothing of size n x n.

The plain head is here, wide and in the papers' stacked convention; `wellcond.jacobian.rowwise` has the mapped one, and
`wellcond.jacobian.factors` the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.errors import NotDefinedError
from wellcond.jacobian.diagnosis import lower_parts, lower_square, norm_bound
from wellcond.jacobian.factors import (
    FactorStack,
    JacobianFactors,
    build_all_factors,
    build_factors,
    explicit_jacobian,
    output_gram,
    parameter_gram,
    stack_factors,
    stack_gram,
)
from wellcond.jacobian.gauge import parameter_steps
from wellcond.jacobian.head import (
    Head,
    can_stack,
    counted_biases,
    stack_rank_bound,
    through_softmax,
    wide_rank_bound,
    wide_shape,
    with_constant,
)
from wellcond.jacobian.operator import GramOperator, Hints, JacobianOperator, RankBound, Side
from wellcond.linalg.spectrum import SMALLEST_ON_DEVICE, where_decomposed

Parts = tuple[Tensor, Tensor, Tensor]
"""Something of the queries, of the keys and of the values."""


@dataclass(frozen=True, eq=False)
class TokenMap:
    """A map of rows, evaluated: its values (T, d') and one Jacobian per row (T, d', d); None for the identity."""

    value: Tensor
    jacobian: Tensor | None = None

    @property
    def jacobians(self) -> Tensor:
        """The Jacobians of a map that is not the identity."""
        assert self.jacobian is not None
        return self.jacobian

    def push(self, rows: Tensor) -> Tensor:
        """The Jacobian of each row times a row of directions."""
        return rows if self.jacobian is None else (self.jacobian @ rows[:, :, None])[..., 0]

    def pull(self, rows: Tensor) -> Tensor:
        """The transposed Jacobian of each row times a row of cotangents."""
        return rows if self.jacobian is None else (rows[:, None, :] @ self.jacobian)[:, 0]


@dataclass(frozen=True, eq=False)
class RowSoftmax:
    """What stands between the products qhat . khat and the output.

    Attributes:
        p: probabilities (R, M), or (R, M + sinks), the last columns being those of sinks, which have no values.
        slope: dS_rj / d(qhat_r . khat_j), (R, M): the scale, times the derivative of a soft-cap; or one number for all.
        value: the map of the values, (M, dv').
        tokenless: how many of the last keys no token makes; their tokens are zero.
        tokens: what the value parameters multiply, (M, E), if it is not what the key parameters do.
        by_query: D_rj = dS_rj / dq_r, (R, M, d), where more than the product depends on the query: positions that
            multiply it (decomposed relative positions, relative keys). It counts up to what is the same for all keys.
    """

    p: Tensor
    slope: Tensor
    value: TokenMap
    tokenless: int = 0
    tokens: Tensor | None = None
    by_query: Tensor | None = None


class HeadJacobian(JacobianOperator):
    """A softmax head known by its rows: products with J and J^T of a few matrices R x M and R x d.

    Attributes:
        head: tokens and weights.
        query: the map of the queries, (R, d').
        key: the map of the keys, (M, d').
        softmax: what follows.
        biases: the biases of the head count as parameters.
    """

    head: Head
    query: TokenMap
    key: TokenMap
    softmax: RowSoftmax
    biases: bool

    @property
    def shape(self) -> tuple[int, int]:
        """R dv outputs, and the weights of the group."""
        return wide_shape(self.head, biases=self.biases)

    @property
    def p(self) -> Tensor:
        """P without the columns of sinks, (R, M)."""
        return self.softmax.p[:, : len(self.head.memory)]

    @property
    def v(self) -> Tensor:
        """V, (M, dv)."""
        return self.softmax.value.value

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return (self.p @ self.v).view(self.head.num_query_heads, self.head.num_tokens, -1)

    def matvec(self, v: Tensor) -> Tensor:
        """J v."""
        g, d, dv, inputs = self.head.num_query_heads, self.head.head_dim, self.head.value_dim, self.inputs()
        x, y, vy = (part.shape[1] for part in inputs)
        of_q, of_k, of_v = v.to(self.v.device).split((g * x * d, y * d, vy * dv))
        return self.push((of_q.view(g, x, d), of_k.view(y, d), of_v.view(vy, dv)), inputs).cpu()

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u."""
        return torch.cat([part.flatten() for part in self.pull(u.to(self.v.device), self.inputs())]).cpu()

    def pull(self, u: Tensor, inputs: Parts) -> Parts:
        """J^T u as (g, inputs, d), (inputs, d) and (inputs, dv)."""
        rows, (x, y, vy), softmax = u.view(self.head.num_rows, -1), inputs, self.softmax
        of_logits = through_softmax(self.p, rows @ self.v.T)
        pulled = softmax.slope * of_logits
        if softmax.by_query is None:
            to_q = self.query.pull(pulled @ self.key.value)
        else:
            to_q = (of_logits[:, None, :] @ softmax.by_query)[:, 0]
        to_k, to_v = self.key.pull(pulled.T @ self.query.value), softmax.value.pull(self.p.T @ rows)
        return x.T @ to_q.unflatten(0, (self.head.num_query_heads, -1)), y.T @ to_k, vy.T @ to_v

    def push(self, parts: Parts, inputs: Parts) -> Tensor:
        """J times what `pull` returns."""
        (of_q, of_k, of_v), (x, y, vy), softmax = parts, inputs, self.softmax
        dq, dk, values = (x @ of_q).flatten(0, 1), self.key.push(y @ of_k), softmax.value.push(vy @ of_v)
        if softmax.by_query is None:
            logits = softmax.slope * (self.query.push(dq) @ self.key.value.T)
        else:
            logits = (softmax.by_query @ dq[:, :, None])[..., 0]
        logits = logits + softmax.slope * (self.query.value @ dk.T)
        return (through_softmax(self.p, logits) @ self.v + self.p @ values).flatten()

    def inputs(self) -> Parts:
        """What the query, key and value parameters multiply: (N, .), (M, .), (M, .).

        A key that no token makes has no bias either.
        """
        with_q, with_k, with_v = counted_biases(self.head, self.biases)
        y = self.head.memory
        real, z = len(y) - self.softmax.tokenless, y if self.softmax.tokens is None else self.softmax.tokens
        k, v = (
            torch.nn.functional.pad(with_constant(tokens[:real], constant), (0, 0, 0, len(y) - real))
            for tokens, constant in ((y, with_k), (z, with_v))
        )
        return with_constant(self.head.x, with_q), k, v


@dataclass(frozen=True, eq=False)
class SoftmaxJacobian(HeadJacobian):
    """The Jacobian of a plain softmax head, outputs x parameters.

    Attributes:
        head: tokens and weights.
        biases: biases of the head count as parameters.
        built: its factors, where they were built together with those of other heads.
        token_ranks: ranks of tokens that heads share, filled as they are computed.
    """

    head: Head
    biases: bool = False
    built: JacobianFactors | None = None
    token_ranks: dict[Any, tuple[int, bool]] = field(default_factory=dict, repr=False)

    @cached_property
    def query(self) -> TokenMap:  # type: ignore[override]
        """The queries as they are."""
        return TokenMap(self.head.queries().flatten(0, 1))

    @cached_property
    def key(self) -> TokenMap:  # type: ignore[override]
        """The keys as they are."""
        return TokenMap(self.head.keys())

    @cached_property
    def softmax(self) -> RowSoftmax:  # type: ignore[override]
        """The softmax of scaled products, and values as they are."""
        p = self.head.probabilities().flatten(0, 1)
        return RowSoftmax(p, p.new_full((), self.head.scale), TokenMap(self.head.values()))

    @cached_property
    def factors(self) -> JacobianFactors:
        """Built once, when first needed."""
        return self.built or build_factors(self.head, biases=self.biases)

    def rank_bound(self) -> RankBound:
        """See `wide_rank_bound`."""
        return wide_rank_bound(self.head, biases=self.biases, known=self.token_ranks)

    def as_matrix(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return explicit_jacobian(self.factors)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T, or J^T J of the compressed parameters where that is smaller."""
        head, n, columns, device = self.head, self.head.num_outputs, self.num_columns, self.head.x.device
        if side == "outputs" or n <= columns:
            product, matrix, steps = self._gram_product, lambda: output_gram(self.factors), lambda: self.factors
            return GramOperator(n, product, matrix, device=device, steps=steps)
        widest = max(head.num_query_heads * min(head.x.shape), min(head.memory.shape))
        return GramOperator(
            columns,
            lambda w: self.factors.forward(self.factors.backward(w.to(device)[None]))[0].cpu(),
            lambda: parameter_gram(self.factors),
            scratch=2 * head.num_rows * widest**2,
            factor_rows=n,
            device=device,
            # The null space of a head whose biases are parameters is not known as a basis.
            steps=lambda: None if self.biases else parameter_steps(head, self.factors),
        )

    def _gram_product(self, u: Tensor) -> Tensor:
        return self.factors.matmat(u.to(self.head.x.device)[None])[0].cpu()

    @property
    def num_columns(self) -> int:
        """Columns of J with respect to the weights, compressed."""
        g, d, dv = self.head.num_query_heads, self.head.head_dim, self.head.value_dim
        return g * d * min(self.head.x.shape) + (d + dv) * min(self.head.memory.shape)

    @property
    def hints(self) -> Hints:
        """Bounds (L) and (U1), the closed form of sigma_min, J by automatic differentiation."""
        return Hints(
            bounds=self.bounds,
            closed_minimum=self.closed_minimum,
            lower_kappa=self.lower_kappa,
            reference=lambda: torch.cat(list(dense_jacobian(self.head, biases=self.biases).values()), dim=1),
            grams=_smaller_grams,
            matrices=lambda operators: explicit_jacobian(stack_factors([one.factors for one in operators])),
        )

    def bounds(self) -> tuple[float, float]:
        """Bounds (L) on sigma_min and (U1) on sigma_max."""
        lower = lower_square(lower_parts(self.factors, len(self.factors.x), less_rounding=True))
        return math.sqrt(lower), norm_bound(self.factors)

    def closed_minimum(self) -> tuple[float, float] | None:
        """An interval for sigma_min that closes when the values can make a constant, V u = 1 (theory.md, section 6).

        Then M_r^T u = 0 and B_r^T u = 0, because Lambda_r 1 = 0: on w (x) u only J_V acts, and with w the last left
        singular vector of P Y the lower bound sigma_R(PY) of (L) is attained. The upper end is |J^T v| of that very
        vector, whatever the residual of V u = 1, so the interval is sure. None if P Y has more rows than columns.
        """
        if self.factors.py.shape[0] > self.factors.py.shape[1]:
            return None
        low, high = self.factors.for_all(_closed_minima).tolist()
        return (low, high) if math.isfinite(high) else None

    def lower_kappa(self) -> float:
        """sigma_max is at least |PY|, and sigma_min at most the upper end of `closed_minimum`."""
        interval = self.closed_minimum()
        return 0.0 if interval is None or interval[1] == 0 else float(self.factors.values("py")[0]) / interval[1]


def _smaller_grams(operators: Sequence[SoftmaxJacobian]) -> Tensor:
    build = output_gram if operators[0].head.num_outputs <= operators[0].num_columns else parameter_gram
    return build(stack_factors([one.factors for one in operators]))


def _closed_minima(stack: FactorStack) -> Tensor:
    """sigma_R(PY) and |J^T (w (x) u)| of each head, (heads, 2); NaN where no u comes near V u = 1."""
    left, sigma, _ = torch.linalg.svd(where_decomposed(stack.py), full_matrices=False)
    v = stack.v.cpu()  # a small problem of any rank, for which a GPU has no driver
    u = torch.linalg.lstsq(v, v.new_ones(*v.shape[:-1], 1), driver="gelsd").solution
    u = (u / torch.linalg.vector_norm(u, dim=-2, keepdim=True))[:, None].to(stack.m.device)  # (heads, 1, dv, 1)
    w = left[..., -1:].to(stack.m.device)
    to_q = stack.x.mT @ (w * (stack.m.mT @ u)[..., 0])
    to_k = stack.q.mT @ (w * (stack.b.mT @ u)[..., 0])
    lengths = [torch.linalg.vector_norm(part, dim=(-2, -1)) for part in (to_q, to_k, stack.py.mT @ w)]
    return torch.stack([sigma[..., -1], torch.linalg.vector_norm(torch.stack(lengths), dim=0).to(sigma.device)], -1)


def stack_size(heads: Sequence[Head], room: int) -> int:
    """How many heads of a layer are measured together: small ones of one shape, as many as fit into `room` bytes."""
    head, operator = heads[0], SoftmaxJacobian(heads[0])
    if head.num_outputs >= SMALLEST_ON_DEVICE or not can_stack(heads):
        return 1
    keys, width = len(head.memory), min(head.memory.shape) + head.head_dim + head.value_dim
    # J and a copy, its factors and one row of their making, and P.
    entries = head.num_outputs * (2 * operator.num_columns + width) + (2 * width + head.num_rows) * keys
    return max(1, room // (8 * entries))


def softmax_jacobians(heads: Sequence[Head], biases: bool = False) -> list[SoftmaxJacobian]:
    """Operators of heads that `can_stack`, with factors built together; one head builds its own when needed."""
    if len(heads) == 1:
        return [SoftmaxJacobian(heads[0], biases)]
    built, ranks = build_all_factors(heads, biases=biases), dict[Any, tuple[int, bool]]()
    return [SoftmaxJacobian(head, biases, factors, ranks) for head, factors in zip(heads, built, strict=True)]


def dense_jacobian(head: Head, *, biases: bool = False) -> dict[str, Tensor]:
    """J_Q, J_K, J_V (R dv, parameters) by automatic differentiation: the reference for small sizes, never optimised.

    Parameters are flattened as the D x d matrix row by row; a bias is the last row of its block.
    """
    given = ((head.query_weights, head.query_biases), (head.w_k, head.b_k), (head.w_v, head.b_v))
    counted = counted_biases(head, biases)

    def output(*matrices: Tensor) -> Tensor:
        rows = []
        for tokens, matrix, (_, bias), counts in zip(
            (head.x, head.memory, head.memory), matrices, given, counted, strict=True
        ):
            projected = with_constant(tokens, counts) @ matrix
            rows.append(projected if bias is None or counts else projected + bias[..., None, :])
        q, k, v = rows
        logits = head.scale * q @ k.mT
        logits = logits if head.mask is None else logits + head.mask
        return logits.softmax(-1) @ v

    matrices = [
        torch.cat([weight.mT, bias[..., None, :]], dim=-2) if counts and bias is not None else weight.mT
        for (weight, bias), counts in zip(given, counted, strict=True)
    ]
    jacobians = torch.func.jacrev(output, argnums=(0, 1, 2))(*matrices)
    return {name: j.reshape(head.num_outputs, -1) for name, j in zip("qkv", jacobians, strict=True)}


# --- the papers' stacked matrix --------------------------------------------------------------------------------------


def stacked_jacobian(operator: JacobianOperator) -> StackedJacobian:
    """The same head in the papers' convention [J_Q; J_K; J_V].

    Raises: NotDefinedError unless it is one plain softmax head.
    """
    if not isinstance(operator, SoftmaxJacobian):
        raise NotDefinedError("the stacked convention is defined for plain softmax attention only")
    return StackedJacobian(operator.head, None if operator.biases else operator.built, operator.token_ranks)


@dataclass(frozen=True, eq=False)
class StackedJacobian(JacobianOperator):
    """The papers' stacked matrix [J_Q; J_K; J_V] of one head, 3 R dv x Dd.

    Its rows outnumber its columns, so methods work on H = J^T J, in the basis of the compressed tokens. Queries and
    keys read the same tokens, compressed alike: the three parameter spaces keep one basis.
    """

    head: Head
    built: JacobianFactors | None = None
    token_ranks: dict[Any, tuple[int, bool]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        head = self.head
        if head.num_query_heads > 1 or head.y is not None or head.value_dim != head.head_dim:
            raise NotDefinedError(
                "the stacked convention is defined for one self-attention head without biases, dv = d"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """3 R dv outputs, D d parameters."""
        return 3 * self.head.num_outputs, self.head.head_dim * self.head.width

    @cached_property
    def wide(self) -> SoftmaxJacobian:
        """The same head, wide."""
        return SoftmaxJacobian(self.head, built=self.built)

    def matvec(self, v: Tensor) -> Tensor:
        """The same direction of W_Q, of W_K and of W_V, one after the other."""
        return torch.cat([self.wide.matvec(row) for row in torch.block_diag(v, v, v)])

    def rmatvec(self, u: Tensor) -> Tensor:
        """The sum of J_Q^T u_Q, J_K^T u_K and J_V^T u_V."""
        pulled = torch.stack([self.wide.rmatvec(part) for part in u.chunk(3)])
        return pulled.view(3, 3, -1).diagonal().sum(1)

    def rank_bound(self) -> RankBound:
        """See `stack_rank_bound`."""
        return stack_rank_bound(self.head, known=self.token_ranks)

    def as_matrix(self) -> Tensor:
        """The three blocks below each other, with compressed tokens: (3 R dv, D~ d)."""
        return _stacked_matrices([self])[0]

    def gram(self, side: Side = "outputs") -> GramOperator:
        """H = J_Q^T J_Q + J_K^T J_K + J_V^T J_V, on either side."""
        head = self.head
        return GramOperator(
            head.head_dim * min(head.x.shape),
            self._gram_product,
            lambda: stack_gram(self.wide.factors),
            scratch=head.num_rows * (head.head_dim**2 + min(head.x.shape) ** 2),
            factor_rows=head.num_outputs,
            device=head.x.device,
        )

    def _gram_product(self, w: Tensor) -> Tensor:
        """H w: forward to the outputs of the three blocks, and back."""
        factors, w = self.wide.factors, w.to(self.head.x.device)
        pulled = factors.forward(factors.backward(torch.block_diag(w, w, w)))
        return pulled.view(3, 3, -1).diagonal().sum(1).cpu()

    @property
    def hints(self) -> Hints:
        """(U1) holds for the stacked matrix too."""
        return Hints(
            bounds=lambda: (0.0, norm_bound(self.wide.factors)),
            reference=lambda: torch.cat(list(dense_jacobian(self.head).values())),
            grams=lambda operators: stack_gram(stack_factors([one.wide.factors for one in operators])),
            matrices=_stacked_matrices,
        )


def _stacked_matrices(operators: Sequence[StackedJacobian]) -> Tensor:
    jacobian = explicit_jacobian(stack_factors([one.wide.factors for one in operators]))
    return torch.cat(jacobian.tensor_split(3, dim=-1), dim=-2)

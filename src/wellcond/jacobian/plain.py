r"""The Jacobian of a plain softmax head: wide, outputs x parameters, and the papers' stack (theory.md, section 3).

J J^T u without anything of size n x n: for U (R x dv), with K the keys, V the values, Kx = X X^T, Ky = Y Y^T:

    dP = U V^T,   dS = P * (dP - rowsum(P * dP))                   the pull-back of U to the logits, times 1/s
    J_Q^T U -> X^T dS K,   J_K^T U -> Y^T dS^T Q,   J_V^T U -> Y^T P^T U
    E  = (Kx dS K) K^T + Q (Ky dS^T Q)^T                           pushed forward to the logits
    G U = s^2 (P * (E - rowsum(P * E))) V + P Ky P^T U

Note [Gauge]. Wq -> Wq E, Wk -> Wk E^{-T} leaves every product q . k, hence the output, unchanged. The d^2 directions
(Wq E, -Wk E^T, 0) are null directions of the wide Jacobian. When tokens span only r < d dimensions, (d - r)^2 of them
are already null for another reason, and count once. Directions outside the span of the tokens are null as well; the
compressed Jacobian has none of these.

A query bias b that is not a parameter breaks the gauge: the change of q . k then is (terms that are the same for all
keys, which the softmax ignores) - b . E Wk^T y, so only the d (d - 1) directions with E^T b = 0 remain, and with g
query heads only the d (d - rank(b_1 .. b_g)) that suit all their biases. A key bias never matters, by the same softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.head import Blocks, Head, build_blocks, through_softmax
from wellcond.jacobian.dense import dense_jacobian
from wellcond.jacobian.form import AbstractForm, NotDefinedError, Structure, token_rank
from wellcond.jacobian.gram import explicit_jacobian, output_gram, parameter_gram, stack_gram
from wellcond.jacobian.squared import OutputSide, ParameterSide, parameter_side
from wellcond.theory.bounds import lower_parts, lower_square, upper_parts, upper_square


@dataclass(frozen=True, eq=False)
class WideForm(AbstractForm):
    """The Jacobian of a plain softmax head, outputs x parameters."""

    head: Head
    biases: bool = False
    has_sides = True

    @property
    def num_outputs(self) -> int:
        """R dv."""
        return self.head.num_outputs

    def output_side(self) -> OutputSide:
        """J J^T for iterations."""
        return OutputSide(self.blocks)

    def smaller_side(self) -> OutputSide | ParameterSide | None:
        """The smaller of J J^T and J^T J; None for biases, whose null space is not known as a basis."""
        if self.num_outputs <= self.gram_side:
            return self.output_side()
        return None if self.biases else parameter_side(self.head, self.blocks)

    @cached_property
    def blocks(self) -> Blocks:
        """Built once, when first needed."""
        return build_blocks(self.head, biases=self.biases)

    @property
    def plain_head(self) -> Head:  # type: ignore[override]
        """The head itself."""
        return self.head

    def plain_blocks(self) -> Blocks:
        """Blocks of the weights alone."""
        return build_blocks(self.head) if self.biases else self.blocks

    @property
    def num_query_heads(self) -> int:
        """Query heads g of the group."""
        return self.head.num_query_heads

    @cached_property
    def p(self) -> Tensor:
        """P, (R, M)."""
        return self.head.probabilities().flatten(0, 1)

    @cached_property
    def v(self) -> Tensor:
        """V, (M, dv)."""
        return self.head.values()

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.head.output()

    def stacked(self) -> StackForm:
        """The papers' matrix of this head."""
        return StackForm(self.head)

    def reference_jacobian(self) -> Tensor:
        """By automatic differentiation."""
        return torch.cat(list(dense_jacobian(self.head, biases=self.biases).values()), dim=1)

    @cached_property
    def operator(self) -> GramOperator:
        """Matrix-free J J^T."""
        return gram_operator(self.head, biases=self.biases)

    def structure(self) -> Structure:
        """See `wide_structure`."""
        return wide_structure(self.head, biases=self.biases)

    @property
    def gram_side(self) -> int:
        """Side of the smaller of the two Gram matrices."""
        g, d, dv = self.head.num_query_heads, self.head.head_dim, self.head.value_dim
        columns = g * d * min(self.head.x.shape) + (d + dv) * min(self.head.memory.shape)
        return min(self.num_outputs, columns)

    @property
    def table_entries(self) -> int:
        """Entries of the tables of products that J^T J is assembled from; none for J J^T."""
        if self.num_outputs <= self.gram_side:
            return 0
        widest = max(self.head.num_query_heads * min(self.head.x.shape), min(self.head.memory.shape))
        return 2 * self.head.num_rows * widest**2

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller."""
        return output_gram(self.blocks) if self.num_outputs <= self.gram_side else parameter_gram(self.blocks)

    def output_gram(self) -> Tensor:
        """J J^T."""
        return output_gram(self.blocks)

    def explicit_jacobian(self) -> Tensor:
        """The compressed J."""
        return explicit_jacobian(self.blocks)

    def product(self, flat: Tensor) -> Tensor:
        """J J^T u."""
        return self.operator(flat)

    def certified(self) -> tuple[float, float]:
        """Bounds (L) on sigma_min and (U1) on sigma_max."""
        lower = lower_square(lower_parts(self.blocks, len(self.blocks.x), less_rounding=True))
        return math.sqrt(lower), _norm_bound(self.blocks)

    def closed_minimum(self) -> tuple[float, float] | None:
        """An interval for sigma_min that closes when the values can make a constant, V u = 1 (theory.md, section 6).

        Then M_r^T u = 0 and B_r^T u = 0, because Lambda_r 1 = 0: on w (x) u only J_V acts, and with w the last left
        singular vector of P Y the lower bound sigma_R(PY) of (L) is attained. The upper end is |J^T v| of that very
        vector, whatever the residual of V u = 1, so the interval is sure. None if P Y has more rows than columns.
        """
        py, v = self.blocks.py, self.blocks.v
        if py.shape[0] > py.shape[1]:
            return None
        left, sigma, _ = torch.linalg.svd(py, full_matrices=False)
        u = torch.linalg.lstsq(v, torch.ones_like(v[:, :1]), driver="gelsd").solution[:, 0]
        if not bool(u.any()) or not bool(torch.isfinite(u).all()):
            return None
        vector = left[:, -1:] * (u / u.norm())
        return float(sigma[-1]), float(self._pull_back(vector))

    def _pull_back(self, u: Tensor) -> Tensor:
        """|J^T u| for u (R, dv), without squaring J."""
        b = self.blocks
        to_q = b.x.T @ torch.einsum("roc,ro->rc", b.m, u)
        to_k = torch.einsum("roe,ro->re", b.b, u).T @ b.q
        return torch.cat([to_q.flatten(), to_k.flatten(), (b.py.T @ u).flatten()]).norm()


@dataclass(frozen=True, eq=False)
class StackForm(AbstractForm):
    """The papers' stacked matrix [J_Q; J_K; J_V] of one head, 3 R dv x Dd.

    Its rows outnumber its columns, so methods are given its transpose, which has the same singular values: the rows of
    this form are the parameters, in the basis of the compressed tokens, and J J^T is H of `stack_gram`.
    """

    head: Head

    def __post_init__(self) -> None:
        """Refuse heads on which it is not defined."""
        head = self.head
        if head.num_query_heads > 1 or head.y is not None or head.value_dim != head.head_dim:
            raise NotDefinedError(
                "the stacked convention is defined for one self-attention head without biases, dv = d"
            )

    def reference_jacobian(self) -> Tensor:
        """By automatic differentiation, not transposed."""
        return torch.cat(list(dense_jacobian(self.head).values()))

    @cached_property
    def blocks(self) -> Blocks:
        """Queries and keys read the same tokens, compressed alike: the three parameter spaces keep one basis."""
        return build_blocks(self.head)

    @property
    def num_outputs(self) -> int:
        """D~ d, the rows of the transpose."""
        return self.head.head_dim * min(self.head.x.shape)

    def structure(self) -> Structure:
        """See `stack_structure`."""
        return stack_structure(self.head)

    @property
    def block_rows(self) -> int:
        """R dv, the outputs that the blocks describe."""
        return self.head.num_outputs

    @property
    def table_entries(self) -> int:
        """Entries of the tables of products that H is assembled from."""
        return 2 * self.head.num_rows * self.head.head_dim**2

    def output_gram(self) -> Tensor:
        """H = J_Q^T J_Q + J_K^T J_K + J_V^T J_V."""
        return stack_gram(self.blocks)

    def explicit_jacobian(self) -> Tensor:
        """The three blocks side by side, transposed: (D~ d, 3 R dv)."""
        return torch.cat([block.T for block in explicit_jacobian(self.blocks).tensor_split(3, dim=1)], dim=1)

    def product(self, flat: Tensor) -> Tensor:
        """H w: forward to the outputs of the three blocks, and back."""
        b, w = self.blocks, flat.view(-1, self.head.head_dim)
        of_q = torch.einsum("roc,rc->ro", b.m, b.x @ w)
        of_k = torch.einsum("roa,ra->ro", b.b, b.q @ w.T)
        back = b.x.T @ torch.einsum("roc,ro->rc", b.m, of_q) + torch.einsum("roa,ro->ra", b.b, of_k).T @ b.q
        return (back + b.py.T @ (b.py @ w)).flatten()

    def certified(self) -> tuple[float, float]:
        """(U1) holds for the stacked matrix too."""
        return 0.0, _norm_bound(self.blocks)


def _norm_bound(blocks: Blocks) -> float:
    """The square root of (U1), which rounding must not make smaller than what it bounds."""
    return math.sqrt(upper_square(upper_parts(blocks))) * (1 + 1e-12)


@dataclass(frozen=True, eq=False)
class GramOperator:
    """G = J J^T of one head (group), matrix-free."""

    p: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    x_gram: Tensor
    y_gram: Tensor
    value_gram: Tensor
    scale: float

    @property
    def size(self) -> int:
        """N = R dv."""
        return self.p.shape[0] * self.v.shape[1]

    def __call__(self, flat: Tensor) -> Tensor:
        """G times a vector of length n."""
        u = flat.view(self.p.shape[0], -1)
        pulled = through_softmax(self.p, u @ self.v.T)
        logits = (self.x_gram @ (pulled @ self.k)) @ self.k.T + self.q @ (self.y_gram @ (pulled.T @ self.q)).T
        return (self.scale**2 * through_softmax(self.p, logits) @ self.v + self.value_gram @ u).flatten()


def gram_operator(head: Head, *, biases: bool = False) -> GramOperator:
    """The operator of a head."""
    g, n = head.num_query_heads, head.num_tokens
    p, y = head.probabilities().flatten(0, 1), head.memory
    x_gram, y_gram = head.x @ head.x.T, y @ y.T
    if biases and head.b_q is not None:
        x_gram = x_gram + 1
    value_gram = p @ y_gram @ p.T
    if biases and head.b_v is not None:
        value_gram = value_gram + 1
    if g > 1:  # query heads of a group do not share query parameters
        x_gram = torch.kron(torch.eye(g, dtype=x_gram.dtype, device=x_gram.device), x_gram)
    assert x_gram.shape == (g * n, g * n)
    return GramOperator(
        p, head.queries().flatten(0, 1), head.keys(), head.values(), x_gram, y_gram, value_gram, head.scale
    )


def wide_structure(head: Head, *, biases: bool = False) -> Structure:
    """Sizes and ranks of the wide Jacobian R dv x parameters."""
    d, dv, g = head.head_dim, head.value_dim, head.num_query_heads
    rx = token_rank(head.x)
    ry = rx if head.y is None else token_rank(head.memory)
    with_q = biases and head.b_q is not None
    with_k = biases and head.b_k is not None
    with_v = biases and head.b_v is not None
    D, E = head.x.shape[1], head.memory.shape[1]
    parameters = g * d * (D + with_q) + d * (E + with_k) + dv * (E + with_v)
    # A constant input adds a dimension unless the tokens already contain it.
    qx = token_rank(torch.cat([head.x, torch.ones_like(head.x[:, :1])], 1)) if with_q else rx
    vy = token_rank(torch.cat([head.memory, torch.ones_like(head.memory[:, :1])], 1)) if with_v else ry
    seen = g * d * qx + d * ry + dv * vy
    fixed = 0 if head.query_biases is None or biases else token_rank(head.query_biases)
    gauge = max(0, d * (d - fixed) - max(0, d - rx) * max(0, d - ry))
    rank = min(head.num_outputs, seen - gauge)
    names = []
    if rank < min(head.num_outputs, parameters):
        names.append(f"gauge (W_Q E, -W_K E^T): {gauge}")
        if parameters > seen:
            names.append(f"outside the span of the tokens: {parameters - seen}")
    return Structure(head.num_outputs, parameters, rx, ry, rank, "; ".join(names))


def stack_structure(head: Head) -> Structure:
    """Sizes and ranks of the papers' stacked matrix 3 R dv x Dd."""
    d, r = head.head_dim, token_rank(head.x)
    D = head.x.shape[1]
    names = f"outside the span of the tokens: {d * (D - r)}" if r < D else ""
    return Structure(3 * head.num_outputs, d * D, r, r, d * r, names)

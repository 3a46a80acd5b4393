r"""The Jacobian of a plain softmax head: wide, outputs x parameters, and the papers' stack (theory.md, section 3).

J J^T u without anything of size n x n: for U (R x dv), with K the keys, V the values, Kx = X X^T, Ky = Y Y^T:

    dP = U V^T,   dS = P * (dP - rowsum(P * dP))                   the pull-back of U to the logits, times 1/s
    J_Q^T U -> X^T dS K,   J_K^T U -> Y^T dS^T Q,   J_V^T U -> Y^T P^T U
    E  = (Kx dS K) K^T + Q (Ky dS^T Q)^T                           pushed forward to the logits
    G U = s^2 (P * (E - rowsum(P * E))) V + P Ky P^T U

Ranks and null directions: `wellcond.theory.ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.form import AbstractForm, NotDefinedError
from wellcond.jacobian.gram import (
    OutputSide,
    ParameterSide,
    explicit_jacobian,
    output_gram,
    parameter_gram,
    parameter_side,
    stack_gram,
)
from wellcond.jacobian.head import (
    Blocks,
    BlockStack,
    Head,
    build_all_blocks,
    build_blocks,
    can_stack,
    stack_blocks,
    through_softmax,
)
from wellcond.linalg.spectrum import SMALLEST_ON_DEVICE, where_decomposed
from wellcond.theory.bounds import lower_parts, lower_square, upper_parts, upper_square
from wellcond.theory.ranks import Structure, stack_structure, wide_structure


@dataclass(frozen=True, eq=False)
class WideForm(AbstractForm):
    """The Jacobian of a plain softmax head, outputs x parameters."""

    head: Head
    biases: bool = False
    built: Blocks | None = None
    """Its blocks, where they were built together with those of other heads."""
    has_sides = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of the head."""
        return self.head.x.device

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
        return self.built or build_blocks(self.head, biases=self.biases)

    @property
    def plain_head(self) -> Head:  # type: ignore[override]
        """The head itself."""
        return self.head

    def plain_blocks(self) -> Blocks:
        """Blocks of the weights alone."""
        return build_blocks(self.head) if self.biases else self.blocks

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.head.output()

    def stacked(self) -> StackForm:
        """The papers' matrix of this head."""
        return StackForm(self.head, None if self.biases else self.built)

    def reference_jacobian(self) -> Tensor:
        """By automatic differentiation."""
        return torch.cat(list(dense_jacobian(self.head, biases=self.biases).values()), dim=1)

    @cached_property
    def operator(self) -> GramOperator:
        """Matrix-free J J^T."""
        return gram_operator(self.head, biases=self.biases)

    def structure(self) -> Structure:
        """See `wide_structure`."""
        return self.structures([self])[0]

    @classmethod
    def structures(cls, forms: Sequence[WideForm]) -> list[Structure]:
        """Ranks of tokens that heads share are computed once."""
        known: dict[Any, tuple[int, bool]] = {}
        return [wide_structure(form.head, biases=form.biases, known=known) for form in forms]

    @property
    def num_columns(self) -> int:
        """Of J with respect to the weights, compressed."""
        g, d, dv = self.head.num_query_heads, self.head.head_dim, self.head.value_dim
        return g * d * min(self.head.x.shape) + (d + dv) * min(self.head.memory.shape)

    @property
    def gram_side(self) -> int:
        """Side of the smaller of the two Gram matrices."""
        return min(self.num_outputs, self.num_columns)

    @property
    def table_entries(self) -> int:
        """Entries of the tables of products that J^T J is assembled from; none for J J^T."""
        if self.num_outputs <= self.gram_side:
            return 0
        widest = max(self.head.num_query_heads * min(self.head.x.shape), min(self.head.memory.shape))
        return 2 * self.head.num_rows * widest**2

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller."""
        return self.smaller_grams([self])[0]

    def output_gram(self) -> Tensor:
        """J J^T."""
        return output_gram(self.blocks)

    def explicit_jacobian(self) -> Tensor:
        """The compressed J."""
        return explicit_jacobian(self.blocks)

    @classmethod
    def smaller_grams(cls, forms: Sequence[WideForm]) -> Tensor:
        """All at once."""
        build = output_gram if forms[0].num_outputs <= forms[0].gram_side else parameter_gram
        return build(stack_blocks([form.blocks for form in forms]))

    @classmethod
    def explicit_jacobians(cls, forms: Sequence[WideForm]) -> Tensor:
        """All at once."""
        return explicit_jacobian(stack_blocks([form.blocks for form in forms]))

    def product(self, flat: Tensor) -> Tensor:
        """J J^T u."""
        return self.operator(flat.to(self.device)).cpu()

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
        if self.blocks.py.shape[0] > self.blocks.py.shape[1]:
            return None
        low, high = self.blocks.together("closed minimum", _closed_minima).tolist()
        return (low, high) if math.isfinite(high) else None

    def sure_condition_number(self) -> float:
        """sigma_max is at least |PY|, and sigma_min at most the upper end of `closed_minimum`."""
        interval = self.closed_minimum()
        return 0.0 if interval is None or interval[1] == 0 else float(self.blocks.py_values[0]) / interval[1]


def _closed_minima(stack: BlockStack) -> Tensor:
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
    head, form = heads[0], WideForm(heads[0])
    if form.num_outputs >= SMALLEST_ON_DEVICE or not can_stack(heads):
        return 1
    keys, width = len(head.memory), min(head.memory.shape) + head.head_dim + head.value_dim
    # J and a copy, its blocks and one row of their making, and P.
    entries = form.num_outputs * (2 * form.num_columns + width) + (2 * width + head.num_rows) * keys
    return max(1, room // (8 * entries))


def wide_forms(heads: Sequence[Head], biases: bool = False) -> list[WideForm]:
    """Forms of heads that `can_stack`, with blocks built together; one head builds its own when they are needed."""
    if len(heads) == 1:
        return [WideForm(heads[0], biases)]
    built = build_all_blocks(heads, biases=biases)
    return [WideForm(head, biases, blocks) for head, blocks in zip(heads, built, strict=True)]


@dataclass(frozen=True, eq=False)
class StackForm(AbstractForm):
    """The papers' stacked matrix [J_Q; J_K; J_V] of one head, 3 R dv x Dd.

    Its rows outnumber its columns, so methods are given its transpose, which has the same singular values: the rows of
    this form are the parameters, in the basis of the compressed tokens, and J J^T is H of `stack_gram`.
    """

    head: Head
    built: Blocks | None = None

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
        return self.built or build_blocks(self.head)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of the head."""
        return self.head.x.device

    @property
    def num_outputs(self) -> int:
        """D~ d, the rows of the transpose."""
        return self.head.head_dim * min(self.head.x.shape)

    def structure(self) -> Structure:
        """See `stack_structure`."""
        return stack_structure(self.head)

    @classmethod
    def structures(cls, forms: Sequence[StackForm]) -> list[Structure]:
        """Ranks of tokens that heads share are computed once."""
        known: dict[Any, tuple[int, bool]] = {}
        return [stack_structure(form.head, known=known) for form in forms]

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
        return self.explicit_jacobians([self])[0]

    @classmethod
    def smaller_grams(cls, forms: Sequence[StackForm]) -> Tensor:
        """All at once."""
        return stack_gram(stack_blocks([form.blocks for form in forms]))

    @classmethod
    def explicit_jacobians(cls, forms: Sequence[StackForm]) -> Tensor:
        """All at once."""
        jacobian = explicit_jacobian(stack_blocks([form.blocks for form in forms]))
        return torch.cat([block.mT for block in jacobian.tensor_split(3, dim=-1)], dim=-1)

    def product(self, flat: Tensor) -> Tensor:
        """H w: forward to the outputs of the three blocks, and back."""
        b, w = self.blocks, flat.to(self.device).view(-1, self.head.head_dim)
        of_q = torch.einsum("roc,rc->ro", b.m, b.x @ w)
        of_k = torch.einsum("roa,ra->ro", b.b, b.q @ w.T)
        back = b.x.T @ torch.einsum("roc,ro->rc", b.m, of_q) + torch.einsum("roa,ro->ra", b.b, of_k).T @ b.q
        return (back + b.py.T @ (b.py @ w)).flatten().cpu()

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


def dense_jacobian(head: Head, *, biases: bool = False) -> dict[str, Tensor]:
    """J_Q, J_K, J_V (R dv, parameters) by automatic differentiation: the reference for small sizes, never optimised.

    Parameters are flattened as the D x d matrix row by row; a bias is the last row of its block.
    """
    g, d = head.num_query_heads, head.head_dim

    def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.mT if bias is None or not biases else torch.cat([weight.mT, bias[..., None, :]], dim=-2)

    def output(wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        def project(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if bias is not None and biases:
                return tokens @ weight[..., :-1, :] + weight[..., -1:, :]
            return tokens @ weight + (0.0 if bias is None else bias[..., None, :])

        q, k = project(head.x, wq, head.query_biases), project(head.memory, wk, head.b_k)
        v = project(head.memory, wv, head.b_v)
        logits = head.scale * q @ k.mT
        logits = logits if head.mask is None else logits + head.mask
        return logits.softmax(-1) @ v

    weights = (
        with_bias(head.query_weights, head.query_biases),
        with_bias(head.w_k, head.b_k),
        with_bias(head.w_v, head.b_v),
    )
    jacobians = torch.func.jacrev(output, argnums=(0, 1, 2))(*weights)
    assert output(*weights).shape == (g, head.num_tokens, head.value_dim) and weights[1].shape[-1] == d
    return {name: j.reshape(head.num_outputs, -1) for name, j in zip("qkv", jacobians, strict=True)}

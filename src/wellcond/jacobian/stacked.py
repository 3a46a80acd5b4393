"""The papers' stacked matrix [J_Q; J_K; J_V] of a plain softmax head (theory.md, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.errors import NotDefinedError
from wellcond.jacobian.diagnosis import norm_bound
from wellcond.jacobian.head import CHUNK_BYTES, Head, JacobianFactors, build_factors, stack_factors
from wellcond.jacobian.operator import GramOperator, Hints, JacobianOperator, Side
from wellcond.jacobian.ranks import RankBound, stack_rank_bound
from wellcond.jacobian.softmax import SoftmaxJacobian, dense_jacobian, explicit_jacobian, table


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

    Its rows outnumber its columns, so methods work on H = J^T J, in the basis of the compressed tokens.
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
    def factors(self) -> JacobianFactors:
        """Queries and keys read the same tokens, compressed alike: the three parameter spaces keep one basis."""
        return self.built or build_factors(self.head)

    @cached_property
    def _wide(self) -> SoftmaxJacobian:
        return SoftmaxJacobian(self.head)

    def matvec(self, v: Tensor) -> Tensor:
        """The same direction of W_Q, of W_K and of W_V, one after the other."""
        nothing = torch.zeros_like(v)
        alone = [(v, nothing, nothing), (nothing, v, nothing), (nothing, nothing, v)]
        return torch.cat([self._wide.matvec(torch.cat(parts)) for parts in alone])

    def rmatvec(self, u: Tensor) -> Tensor:
        """The sum of J_Q^T u_Q, J_K^T u_K and J_V^T u_V."""
        pulled = [self._wide.rmatvec(part).chunk(3)[at] for at, part in enumerate(u.chunk(3))]
        return pulled[0] + pulled[1] + pulled[2]

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
            lambda: stack_gram(self.factors),
            scratch=2 * head.num_rows * head.head_dim**2,
            factor_rows=head.num_outputs,
            device=head.x.device,
        )

    def _gram_product(self, flat: Tensor) -> Tensor:
        """H w: forward to the outputs of the three blocks, and back."""
        f, w = self.factors, flat.to(self.head.x.device).view(-1, self.head.head_dim)
        of_q = torch.einsum("roc,rc->ro", f.m, f.x @ w)
        of_k = torch.einsum("roa,ra->ro", f.b, f.q @ w.T)
        back = f.x.T @ torch.einsum("roc,ro->rc", f.m, of_q) + torch.einsum("roa,ro->ra", f.b, of_k).T @ f.q
        return (back + f.py.T @ (f.py @ w)).flatten().cpu()

    @property
    def hints(self) -> Hints:
        """(U1) holds for the stacked matrix too."""
        return Hints(
            bounds=lambda: (0.0, norm_bound(self.factors)),
            reference=lambda: torch.cat(list(dense_jacobian(self.head).values())),
            grams=lambda operators: stack_gram(stack_factors([one.factors for one in operators])),
            matrices=_stacked_matrices,
        )


def _stacked_matrices(operators: Sequence[StackedJacobian]) -> Tensor:
    jacobian = explicit_jacobian(stack_factors([one.factors for one in operators]))
    return torch.cat(jacobian.tensor_split(3, dim=-1), dim=-2)


def stack_gram(factors: JacobianFactors) -> Tensor:
    """H = J_Q^T J_Q + J_K^T J_K + J_V^T J_V, the Gram matrix of the papers' stacked [J_Q; J_K; J_V] (Dd, Dd).

    It needs one identification of the three parameter spaces: equal widths, and the same order (a, c) in all of them.
    """
    x, q, py, m, b = factors.x, factors.q, factors.py, factors.m, factors.b
    *front, rows, dv, d = m.shape
    D = x.shape[-1]
    if not (dv == d and b.shape[-1] == py.shape[-1] == D):
        raise ValueError("the stacked convention needs query, key and value parameters of one shape, without biases")
    gram = x.new_empty(*front, D, d, D, d)
    mm, qq = (m.mT @ m).flatten(-2), table(q, q)
    size = max(1, CHUNK_BYTES // (8 * math.prod(front) * D * (d * d + rows)))
    for at in range(0, D, size):
        some = slice(at, min(at + size, D))
        part = gram[..., some, :, :, :]  # (a c) x (a' c') from [a a'] x [c c']
        shape = (*front, -1, D, d, d)
        part.copy_((table(x[..., some], x).mT @ mm).view(shape).transpose(-3, -2))
        part.add_(((b[..., some].mT @ b).flatten(-2).mT @ qq).view(shape).transpose(-3, -2))
    gram.diagonal(dim1=-3, dim2=-1).add_((py.mT @ py)[..., None])
    return gram.flatten(-2).flatten(-3, -2)

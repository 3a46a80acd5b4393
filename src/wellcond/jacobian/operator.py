r"""J J^T applied to a vector without forming anything of size n x n (theory.md 2.3).

For U (R x dv), with K the keys, V the values, Kx = X X^T, Ky = Y Y^T:

    dP = U V^T,   dS = P * (dP - rowsum(P * dP))                   the pull-back of U to the logits, times 1/s
    J_Q^T U -> X^T dS K,   J_K^T U -> Y^T dS^T Q,   J_V^T U -> Y^T P^T U
    E  = (Kx dS K) K^T + Q (Ky dS^T Q)^T                           pushed forward to the logits
    G U = s^2 (P * (E - rowsum(P * E))) V + P Ky P^T U
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.head import Head, through_softmax


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

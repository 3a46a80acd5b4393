r"""How many singular values must be zero, whatever the numbers (theory.md, section 4).

Note [Gauge]. Wq -> Wq E, Wk -> Wk E^{-T} leaves every product q . k, hence the output, unchanged. The d^2 directions
(Wq E, -Wk E^T, 0) are null directions of the wide Jacobian. When tokens span only r < d dimensions, (d - r)^2 of them
are already null for another reason, and count once. Directions outside the span of the tokens are null as well; the
compressed Jacobian has none of these.

A query bias b that is not a parameter breaks the gauge: the change of q . k then is (terms that are the same for all
keys, which the softmax ignores) - b . E Wk^T y, so only the d (d - 1) directions with E^T b = 0 remain, and with g
query heads only the d (d - rank(b_1 .. b_g)) that suit all their biases. A key bias never matters, by the same softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.head import Head
from wellcond.linalg.spectrum import resolve_rank, singular_values


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


def token_rank(tokens: Tensor) -> int:
    """Numerical rank of the tokens."""
    return int(resolve_rank(singular_values(tokens), tuple(tokens.shape)))


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

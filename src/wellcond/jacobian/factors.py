r"""The factors that the Jacobian of a softmax head is made of; J itself is never needed to have its Gram matrices.

Legend (theory.md, section 3; everything float64):

    X  N x D    query tokens            Y  M x E     key/value tokens (Y = X for self-attention)
    q_r, k_j, v_j                       rows of Q = X Wq, K = Y Wk, V = Y Wv, biases included
    r                                   a row of the output: a token of a head; R = g N rows for g grouped heads
    P  R x M    softmax of s Q K^T + mask;  p_r a row of it;   o_r = V^T p_r the output
    Lambda_r    diag(p_r) - p_r p_r^T
    M_r = s V^T Lambda_r K  (dv x d)    B_r = s V^T Lambda_r Y  (dv x E)

The Jacobian is made of rows

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]        J_K[r]: (a, c) -> B_r[:, a] q_r[c]        J_V[r]: (a, o) -> (P Y)_r[a] e_o

so it depends on the tokens of the keys only through Gram matrices: Y may be replaced by any L with L L^T = Y Y^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.head import Head, stack_heads
from wellcond.linalg.spectrum import singular_values

CHUNK_BYTES = 64 * 2**20
NAMES = ("x", "q", "py", "m", "b", "p", "k", "v")


@dataclass(frozen=True, eq=False)
class JacobianFactors:
    """The factors of one head; see the legend of this file.

    `x` (R, gD~) are the inputs of the query parameters as each row sees them, a bias being one more constant input, and
    a query head of a group owning its own columns. `py` likewise for the value parameters. The bias of the keys has a
    zero Jacobian (V^T Lambda_r 1 = 0) and does not appear.
    """

    x: Tensor
    q: Tensor
    py: Tensor
    m: Tensor
    b: Tensor
    p: Tensor = field(repr=False)
    k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    built_with: tuple[FactorStack, int] | None = field(default=None, repr=False)
    """The factors of all heads that were built together with these, and the place of these among them."""

    def for_all(self, compute: Callable[[FactorStack], Tensor]) -> Tensor:
        """What `compute` finds for this head, on the CPU.

        A function of a module is run once for all heads that were built together, and its result is kept.
        """
        stack, index = self.built_with or (stack_factors([self]), 0)
        if compute not in stack.cache:
            stack.cache[compute] = compute(stack).cpu()
        return stack.cache[compute][index]

    @property
    def py_values(self) -> Tensor:
        """Singular values of py."""
        return self.for_all(_py_values)

    @property
    def x_values(self) -> Tensor:
        """Singular values of x."""
        return self.for_all(_x_values)

    @property
    def m_values(self) -> Tensor:
        """Singular values of every M_r."""
        return self.for_all(_m_values)


@dataclass(frozen=True, eq=False)
class FactorStack(JacobianFactors):
    """Factors of heads of one shape: tensors have one axis more in front."""

    cache: dict[Callable[[FactorStack], Tensor], Tensor] = field(default_factory=dict, repr=False)
    """Results of `for_all`, by the function that computed them."""


def _py_values(stack: FactorStack) -> Tensor:
    return once(singular_values, stack.py)


def _x_values(stack: FactorStack) -> Tensor:
    return once(singular_values, stack.x)


def _m_values(stack: FactorStack) -> Tensor:
    return once(singular_values, stack.m)


def once(function: Callable[[Tensor], Tensor], stacked: Tensor) -> Tensor:
    """`function` of every entry of a stack; of one alone where `stack_heads` found that all are the same."""
    found = function(stacked if stacked.stride(0) else stacked[:1])
    return found.expand(len(stacked), *found.shape[1:])


def stack_factors(factors: Sequence[JacobianFactors]) -> FactorStack:
    """Factors of one shape together; without a copy where all that were built together are asked for, in that order."""
    built = [one.built_with for one in factors]
    if built[0] is not None and len(factors) == len(built[0][0].m):
        stack = built[0][0]
        if all(place is not None and place[0] is stack and place[1] == at for at, place in enumerate(built)):
            return stack

    def together(name: str) -> Any:
        tensors = [getattr(one, name) for one in factors]
        return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)

    return FactorStack(**{name: together(name) for name in NAMES})


def build_factors(head: Head, *, biases: bool = False, compress: bool = True) -> JacobianFactors:
    """The factors of a head.

    Args:
        head: tokens and weights.
        biases: biases count as parameters.
        compress: replace Y by an equivalent L with at most as many columns as tokens; singular values are unchanged.
    """
    return build_all_factors([head], biases=biases, compress=compress)[0]


def build_all_factors(heads: Sequence[Head], *, biases: bool = False, compress: bool = True) -> list[JacobianFactors]:
    """`build_factors` of heads that `can_stack`, computed together."""
    stack = stack_heads(heads)
    g = stack.num_query_heads
    p, k, v = stack.probabilities().flatten(1, 2), stack.keys(), stack.values()
    y = once(compressed, stack.memory) if compress else stack.memory
    x = y if stack.y is None else once(compressed, stack.x) if compress else stack.x
    x = with_constant(x, biases and stack.b_q is not None)
    if g > 1:  # each query head of a group has its own columns
        eye = torch.eye(g, dtype=x.dtype, device=x.device)
        x = torch.einsum("gf,hna->hgnfa", eye, x).flatten(3).flatten(1, 2)
    py = with_constant(p @ y, biases and stack.b_v is not None)
    m, b = weighted_covariances(p, k, v, y, stack.scale)
    built = FactorStack(x=x, q=stack.queries().flatten(1, 2), py=py, m=m, b=b, p=p, k=k, v=v)
    return [
        JacobianFactors(x[at], built.q[at], py[at], m[at], b[at], p[at], k[at], v[at], built_with=(built, at))
        for at in range(len(heads))
    ]


def compressed(tokens: Tensor) -> Tensor:
    """L with L L^T = T T^T and min(N, D) columns: the R factor of T^T, transposed."""
    if tokens.shape[-2] >= tokens.shape[-1]:
        return tokens
    return torch.linalg.qr(tokens.mT).R.mT


def with_constant(tokens: Tensor, constant: bool) -> Tensor:
    """The inputs of a projection: tokens, and the constant input of its bias if that is a parameter."""
    return torch.cat([tokens, torch.ones_like(tokens[..., :1])], -1) if constant else tokens


def weighted_covariances(p: Tensor, k: Tensor, v: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """M_r and B_r, in the centred form, which keeps relative accuracy when p_r is nearly one-hot.

    V^T Lambda_r Z = sum_j p_rj (v_j - o_r) (z_j - Z^T p_r)^T
    """
    (*front, rows, keys), dv = p.shape, v.shape[-1]
    m, b = p.new_empty(*front, rows, dv, k.shape[-1]), p.new_empty(*front, rows, dv, y.shape[-1])
    widest = max(dv, k.shape[-1], y.shape[-1])
    size = max(1, CHUNK_BYTES // (8 * math.prod(front) * keys * widest))
    k, v, y = k[..., None, :, :], v[..., None, :, :], y[..., None, :, :]
    for at in range(0, rows, size):
        some = slice(at, at + size)
        part = p[..., some, None, :]
        weighted_v = scale * part.mT * (v - part @ v)
        m[..., some, :, :] = weighted_v.mT @ (k - part @ k)
        b[..., some, :, :] = weighted_v.mT @ (y - part @ y)
    return m, b


def through_softmax(p: Tensor, t: Tensor) -> Tensor:
    """Lambda_r t_r for every row: the derivative of the row softmax, which is its own transpose."""
    return p * (t - (p * t).sum(-1, keepdim=True))


def softmax_weights(p: Tensor, v: Tensor) -> Tensor:
    """V^T Lambda_r of every row, (R, dv, M): columns p_rj (v_j - o_r).

    The columns of each sum to zero. Where p_r is nearly one-hot, v_j - o_r cancels for its largest entry, and only for
    that one; it is replaced by minus the sum of the others, which keeps relative accuracy.
    """
    w = p[:, None, :] * (v.T - (p @ v)[:, :, None])
    top = p.argmax(-1)[:, None, None].expand(-1, v.shape[1], 1)
    w.scatter_(2, top, 0.0)
    return w.scatter_(2, top, -w.sum(-1, keepdim=True))

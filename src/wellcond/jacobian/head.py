r"""One softmax head (or the heads of one key/value group) on given tokens, and the factors its Jacobian is made of.

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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.linalg.spectrum import cast_to_float64, move_to, singular_values

CHUNK_BYTES = 64 * 2**20
NAMES = ("x", "q", "py", "m", "b", "p", "k", "v")
TENSORS = ("x", "w_q", "w_k", "w_v", "mask", "y", "b_q", "b_k", "b_v")
GROUPED = {"w_q": 3, "b_q": 2, "mask": 3}  # dimensions with the axis of a group of query heads, which may lack


@dataclass(frozen=True, eq=False)
class Head:
    """Tokens and weights of one head, held in float64; weights are (out, in) as in torch.

    It is on the device of its tokens, if that has float64.

    Args:
        x: tokens, N x D.
        w_q: query weight, d x D, or (g, d, D) for g query heads that share one key/value head.
        w_k: key weight, d x E.
        w_v: value weight, dv x E.
        scale: logit scale s, usually 1/sqrt(d).
        mask: added to the logits, N x M or (g, N, M): -inf where a key is masked, a relative position bias, or both. A
            large negative number counts as unmasked.
        y: tokens of keys and values, M x E; x if None.
        b_q: query bias, (d) or (g, d).
        b_k: key bias, (d).
        b_v: value bias, (dv).

    Raises:
        ValueError: shapes that do not fit.
        WeightError: entries that are not finite, or a token that is masked from everything (its softmax is NaN).

    Example:
        >>> eye = torch.eye(2)
        >>> Head(eye, eye, eye, eye, scale=0.0).num_tokens
        2
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    scale: float
    mask: Tensor | None = None
    y: Tensor | None = None
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None

    def __post_init__(self) -> None:
        cast_to_float64(self, TENSORS, unchecked=("mask",))
        move_to(self.x.device, self, TENSORS)
        _check(self)

    def cpu(self) -> Head:
        """The same on the CPU."""
        return replace(self, **{name: t.cpu() for name in TENSORS if (t := getattr(self, name)) is not None})

    @property
    def memory(self) -> Tensor:
        """Tokens that keys and values are made of."""
        return self.x if self.y is None else self.y

    @property
    def query_weights(self) -> Tensor:
        """w_q of every query head, (g, d, D)."""
        return self.w_q if self.w_q.dim() == 3 else self.w_q[None]

    @property
    def query_biases(self) -> Tensor | None:
        """b_q of every query head, (g, d)."""
        return self.b_q[None] if self.b_q is not None and self.b_q.dim() == 1 else self.b_q

    @property
    def num_query_heads(self) -> int:
        """Query heads g of the group."""
        return self.query_weights.shape[-3]

    @property
    def num_tokens(self) -> int:
        """Query tokens N."""
        return self.x.shape[-2]

    @property
    def width(self) -> int:
        """D."""
        return self.x.shape[-1]

    @property
    def num_rows(self) -> int:
        """R = g N."""
        return self.num_query_heads * self.num_tokens

    @property
    def head_dim(self) -> int:
        """d, of queries and keys."""
        return self.w_k.shape[-2]

    @property
    def value_dim(self) -> int:
        """dv, of values."""
        return self.w_v.shape[-2]

    @property
    def num_outputs(self) -> int:
        """Rows of the wide Jacobian, R dv."""
        return self.num_rows * self.value_dim

    @property
    def is_single(self) -> bool:
        """One query head that attends to its own tokens: what the papers and their statements are about."""
        return self.num_query_heads == 1 and self.y is None

    def queries(self) -> Tensor:
        """Q, (g, N, d)."""
        q = self.x[..., None, :, :] @ self.query_weights.mT
        return q if self.query_biases is None else q + self.query_biases[..., None, :]

    def keys(self) -> Tensor:
        """K, (M, d)."""
        k = self.memory @ self.w_k.mT
        return k if self.b_k is None else k + self.b_k[..., None, :]

    def values(self) -> Tensor:
        """V, (M, dv)."""
        v = self.memory @ self.w_v.mT
        return v if self.b_v is None else v + self.b_v[..., None, :]

    def logits(self) -> Tensor:
        """Logits s Q K^T + mask, (g, N, M)."""
        logits = self.scale * self.queries() @ self.keys()[..., None, :, :].mT
        return logits if self.mask is None else logits + self.mask

    def probabilities(self) -> Tensor:
        """P, (g, N, M)."""
        return self._softmax

    @cached_property
    def _softmax(self) -> Tensor:
        return self.logits().softmax(-1)

    def log_probabilities(self) -> Tensor:
        """Logarithm of P, finite where P underflows (a logit gap of 800 is e^-800); -inf where it is masked."""
        return self.logits().log_softmax(-1)

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.probabilities() @ self.values()[..., None, :, :]


def _check(head: Head) -> None:
    expected = "expected x (N, D), w_q (d, D) or (g, d, D), w_k (d, E), w_v (dv, E)"
    if any(t.dim() != 2 for t in (head.x, head.memory, head.w_k, head.w_v)) or head.w_q.dim() not in (2, 3):
        shapes = [tuple(t.shape) for t in (head.x, head.memory, head.w_q, head.w_k, head.w_v)]
        raise ValueError(f"expected matrices: {expected}; got x, y, w_q, w_k, w_v of shapes {shapes}")
    D, E = head.x.shape[-1], head.memory.shape[-1]
    for name, tensor, last in (("w_q", head.w_q, D), ("w_k", head.w_k, E), ("w_v", head.w_v, E)):
        if tensor.shape[-1] != last:
            raise ValueError(f"{name}: expected {last} columns ({expected}), got shape {tuple(tensor.shape)}")
    if head.w_q.shape[-2] != head.w_k.shape[0]:
        raise ValueError(f"queries and keys differ in width: {head.w_q.shape[-2]} and {head.w_k.shape[0]}")
    _check_biases(head)
    shape = (head.num_tokens, head.memory.shape[0])
    if head.mask is not None:
        if tuple(head.mask.shape[-2:]) != shape or head.mask.dim() > 3:
            raise ValueError(f"expected mask of shape {shape} (or one per query head), got {tuple(head.mask.shape)}")
        if bool(torch.isnan(head.mask).any()) or bool((head.mask == torch.inf).any()):
            raise ValueError("mask: expected finite numbers and -inf, found NaN or +inf")
        dead = (head.mask == -torch.inf).all(-1)
        if bool(dead.any()):
            rows = dead.nonzero()[:, -1].unique().tolist()
            raise WeightError(
                f"mask: tokens {rows[:8]} may attend to nothing (masked throughout), so their softmax is not defined"
            )


def _check_biases(head: Head) -> None:
    """A bias has an entry for each row of its weight; that of grouped queries, of every query head."""
    for name, weight in (("b_q", head.w_q), ("b_k", head.w_k), ("b_v", head.w_v)):
        bias, expected = getattr(head, name), tuple(weight.shape[:-1])
        if bias is not None and tuple(bias.shape) not in (expected, expected[-1:]):
            raise ValueError(
                f"{name}: expected the shape {expected} of the rows of its weight, got {tuple(bias.shape)}"
            )


@dataclass(frozen=True, eq=False)
class HeadStack(Head):
    """Heads of one shape: tensors have one axis more in front, masks and P always that of a group too."""

    def __post_init__(self) -> None:
        """The heads were checked."""

    query_weights = property(lambda self: self.w_q)  # type: ignore[assignment]
    query_biases = property(lambda self: self.b_q)  # type: ignore[assignment]


def can_stack(heads: Sequence[Head]) -> bool:
    """Whether heads have one shape, one scale and one device."""

    def form(head: Head) -> tuple[object, ...]:
        return head.scale, head.x.device, *(getattr(getattr(head, name), "shape", None) for name in TENSORS)

    return all(form(head) == form(heads[0]) for head in heads)


def stack_heads(heads: Sequence[Head]) -> HeadStack:
    """Heads that `can_stack`. What all of them share, tokens most of all, is not copied."""

    def together(name: str) -> Any:
        first, *others = found = [getattr(head, name) for head in heads]
        if first is None:
            return None
        same = all(t.data_ptr() == first.data_ptr() and t.stride() == first.stride() for t in others)
        stacked = first.expand(len(found), *first.shape) if same else torch.stack(found)
        return stacked if first.dim() == GROUPED.get(name, first.dim()) else stacked[:, None]

    return HeadStack(scale=heads[0].scale, **{name: together(name) for name in TENSORS})


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

    def for_all(self, compute: Callable[[Any], Tensor], name: str = "") -> Tensor:
        """What `compute` finds for this head, on the CPU: of all its factors, or of the one with this name.

        A function of a module is run once for all heads that were built together, and its result is kept.
        """
        stack, index = self.built_with or (stack_factors([self]), 0)
        if (compute, name) not in stack.cache:
            stack.cache[compute, name] = compute(getattr(stack, name) if name else stack).cpu()
        return stack.cache[compute, name][index]

    def values(self, name: str) -> Tensor:
        """Singular values of one of the factors; of every M_r."""
        return self.for_all(_values, name)


@dataclass(frozen=True, eq=False)
class FactorStack(JacobianFactors):
    """Factors of heads of one shape: tensors have one axis more in front."""

    cache: dict[tuple[Callable[[Any], Tensor], str], Tensor] = field(default_factory=dict, repr=False)
    """Results of `for_all`."""


def _values(stacked: Tensor) -> Tensor:
    return once(singular_values, stacked)


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


def build_factors(head: Head, *, biases: bool = False) -> JacobianFactors:
    """The factors of a head; `biases` count as parameters.

    Y is replaced by an equivalent L with at most as many columns as tokens: singular values are unchanged.
    """
    return build_all_factors([head], biases=biases)[0]


def build_all_factors(heads: Sequence[Head], *, biases: bool = False) -> list[JacobianFactors]:
    """`build_factors` of heads that `can_stack`, computed together."""
    stack = stack_heads(heads)
    g = stack.num_query_heads
    p, k, v = stack.probabilities().flatten(1, 2), stack.keys(), stack.values()
    y = once(compressed, stack.memory)
    x = y if stack.y is None else once(compressed, stack.x)
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

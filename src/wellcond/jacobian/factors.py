r"""The factors that the Jacobian of a softmax head is made of, and matrices and products from them, without forming J.

With the legend of `wellcond.jacobian.head` and M_r = s V^T Lambda_r K (dv x d), B_r = s V^T Lambda_r Y (dv x E), the
rows of J are (theory.md, section 3.2 and section 3.3)

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]        J_K[r]: (a, c) -> B_r[:, a] q_r[c]        J_V[r]: (a, o) -> (P Y)_r[a] e_o

so J depends on the tokens of the keys only through Gram matrices: Y may be replaced by any L with L L^T = Y Y^T.

    J J^T, rows (r, o):    G_rr' = (x_r . x_r') M_r M_r'^T + (q_r . q_r') B_r B_r'^T + (PY_r . PY_r') I
    J^T J, columns Q (a, c), K (a, c), V (a, o):    sums over r of products of two tables with R rows

Products of several vectors at once, the rows of a tensor, are cheap and in float64, so that the matrix itself, which
only steers the iterations, may be stored in float32 and destroyed by its factor.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.head import Head, compressed, stack_heads, with_constant
from wellcond.jacobian.operator import GramSteps
from wellcond.linalg.spectrum import singular_values

CHUNK_BYTES = 64 * 2**20
CACHE_BYTES = 4 * 2**20  # rows that are multiplied, scaled and added while they are near the processor
NAMES = ("x", "q", "py", "m", "b", "p", "k", "v")


class RowFactors(GramSteps):
    """J J^T of a Jacobian with rows x_r (x) M_r for the queries, (PY)_r (x) I for the values, and others for the keys.

    Attributes:
        x: inputs of the query parameters as each row sees them, (R, columns): a bias is one more constant input, and a
            query head of a group owns its own columns.
        m: M_r, (R, dv, d).
        py: inputs of the value parameters times P, (R, columns).
    """

    x: Tensor
    m: Tensor
    py: Tensor

    @property
    @abc.abstractmethod
    def key_inputs(self) -> int:
        """Inputs of the key parameters."""

    @abc.abstractmethod
    def pull_keys(self, by_row: Tensor) -> Tensor:
        """J_K^T u for u as (r, o, k): (inputs, d, k)."""

    @abc.abstractmethod
    def push_keys(self, of_keys: Tensor) -> Tensor:
        """J_K w for w as (inputs d, k): (r, o, k)."""

    @abc.abstractmethod
    def lower_gram(self) -> Tensor:
        """The lower triangle of J J^T; what is above the diagonal is not defined."""

    @abc.abstractmethod
    def in_float32(self, largest: float) -> RowFactors:
        """Factors of J / `largest`, each of moderate size: squares must not leave the range of float32."""

    @property
    def size(self) -> int:
        """R dv."""
        return self.m.shape[0] * self.m.shape[1]

    def forward(self, rows: Tensor) -> Tensor:
        """J^T u for rows u (k, R dv): (k, parameters)."""
        by_row = rows.view(len(rows), len(self.m), -1).permute(1, 2, 0)  # (r, o, k)
        to_q = (self.x.T @ (self.m.mT @ by_row).flatten(1)).unflatten(1, (-1, len(rows)))  # (a, c, k)
        to_v = (self.py.T @ by_row.flatten(1)).unflatten(1, (-1, len(rows)))  # (a, o, k)
        return torch.cat([part.flatten(0, 1) for part in (to_q, self.pull_keys(by_row), to_v)]).T

    def backward(self, rows: Tensor) -> Tensor:
        """J w for rows w (k, parameters): (k, R dv)."""
        (_, dv, d), k = self.m.shape, len(rows)
        widths = (self.x.shape[1] * d, self.key_inputs * d, self.py.shape[1] * dv)
        of_q, of_k, of_v = (part.T for part in rows.split(widths, dim=1))
        seen = (self.x @ of_q.reshape(-1, d * k)).unflatten(1, (d, k))  # (r, c, k)
        read = (self.py @ of_v.reshape(-1, dv * k)).unflatten(1, (dv, k))  # (r, o, k)
        return (self.m @ seen + self.push_keys(of_k) + read).flatten(0, 1).T

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of J J^T / largest^2."""
        return self.in_float32(largest).lower_gram()

    def shifted(self, largest: float, bound: float) -> Tensor | None:
        """The lower triangle of J J^T - bound I; nothing needs `largest` here."""
        gram = self.lower_gram()
        gram.diagonal().sub_(bound)
        return gram


@dataclass(frozen=True, eq=False)
class JacobianFactors(RowFactors):
    """The factors of one plain head; see the legend of this file.

    The bias of the keys has a zero Jacobian (V^T Lambda_r 1 = 0) and does not appear.
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

    @property
    def key_inputs(self) -> int:
        """Columns of Y."""
        return self.b.shape[2]

    def pull_keys(self, by_row: Tensor) -> Tensor:
        """J_K^T u."""
        k = by_row.shape[2]
        return ((self.b.mT @ by_row).flatten(1).T @ self.q).unflatten(0, (-1, k)).transpose(1, 2)

    def push_keys(self, of_keys: Tensor) -> Tensor:
        """J_K w."""
        k = of_keys.shape[1]
        by_query = of_keys.reshape(-1, self.q.shape[1], k).transpose(0, 1).flatten(1)
        return self.b @ (self.q @ by_query).unflatten(1, (-1, k))

    def lower_gram(self) -> Tensor:
        """The lower triangle of J J^T."""
        return output_gram(self, lower=True)

    def in_float32(self, largest: float) -> JacobianFactors:
        """Factors of J / `largest`."""
        m_size, b_size = (float(t.abs().max()) or 1.0 for t in (self.m, self.b))
        return replace(
            self,
            x=(self.x * (m_size / largest)).float(),
            m=(self.m / m_size).float(),
            q=(self.q * (b_size / largest)).float(),
            b=(self.b / b_size).float(),
            py=(self.py / largest).float(),
            built_with=None,
        )


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
        JacobianFactors(**{name: getattr(built, name)[at] for name in NAMES}, built_with=(built, at))
        for at in range(len(heads))
    ]


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


# --- matrices, of one head or of each of a stack ---------------------------------------------------------------------


def output_gram(factors: JacobianFactors, *, lower: bool = False) -> Tensor:
    """J J^T of the wide Jacobian, (R dv, R dv); if `lower`, what is above the diagonal is left undefined."""
    *front, rows, dv, _ = factors.m.shape
    n = rows * dv
    m, b = factors.m.flatten(-3, -2), factors.b.flatten(-3, -2)
    x_gram, q_gram = factors.x @ factors.x.mT, factors.q @ factors.q.mT
    py_gram = factors.py @ factors.py.mT
    gram = m.new_empty(*front, n, n)
    size = max(1, (CACHE_BYTES if lower else CHUNK_BYTES) // (m.element_size() * math.prod(front) * n * dv))
    for at in range(0, rows, size):
        end = min(at + size, rows)
        some, lines = slice(at, end), slice(at * dv, end * dv)
        stop = end if lower else rows
        part = gram[..., lines, : stop * dv]
        torch.matmul(m[..., lines, :], m[..., : stop * dv, :].mT, out=part)
        blockwise = part.unflatten(-1, (stop, dv)).unflatten(-3, (end - at, dv))
        blockwise.mul_(x_gram[..., some, None, :stop, None])
        of_keys = (b[..., lines, :] @ b[..., : stop * dv, :].mT).view_as(blockwise)
        blockwise.addcmul_(of_keys, q_gram[..., some, None, :stop, None])
        blockwise.diagonal(dim1=-3, dim2=-1).add_(py_gram[..., some, :stop, None])
    return gram


def parameter_gram(factors: JacobianFactors, *, values: bool = True) -> Tensor:
    """J^T J of the wide Jacobian, in the (compressed) parameters; unless `values`, those of Q and K alone."""
    x, q, py, m, b = factors.x, factors.q, factors.py, factors.m, factors.b
    *front, _, dv, d = m.shape
    Dx, Dy, Dv = x.shape[-1], b.shape[-1], py.shape[-1]
    nq, nk, nv = Dx * d, Dy * d, Dv * dv if values else 0
    gram = x.new_empty(*front, nq + nk + nv, nq + nk + nv)
    to_q, to_k, to_v = slice(0, nq), slice(nq, nq + nk), slice(nq + nk, None)

    def put(first: slice, second: slice, block: Tensor) -> None:
        """Entries (i, j, i', j') of a block with rows (i, j) and columns (i', j')."""
        rows, columns = block.shape[-4:-2], block.shape[-2:]
        gram[..., first, second].unflatten(-1, columns).unflatten(-3, rows).copy_(block)
        if first != second:
            turned = block.movedim((-2, -1), (-4, -3))
            gram[..., second, first].unflatten(-1, rows).unflatten(-3, columns).copy_(turned)

    for of_role, block in zip((to_q, to_k, to_v) if values else (to_q, to_k), _blocks(factors), strict=False):
        put(of_role, of_role, block)
    # [a c'] x [c a']
    put(to_q, to_k, _tables(table(x, q), (m.mT @ b).flatten(-2), (Dx, d, d, Dy)).movedim(-3, -1))
    if values:
        # [a a'] x [o c], [c a'] x [o a]
        put(to_q, to_v, _tables(table(x, py), m.flatten(-2), (Dx, Dv, dv, d)).movedim(-1, -3))
        put(to_k, to_v, _tables(table(q, py), b.flatten(-2), (d, Dv, dv, Dy)).movedim(-1, -4))
    return gram


def stack_gram(factors: JacobianFactors) -> Tensor:
    """J_Q^T J_Q + J_K^T J_K + J_V^T J_V (Dd, Dd), of the papers' stack, for parameters of one shape."""
    blocks = _blocks(factors)
    gram = next(blocks).contiguous()
    for block in blocks:
        gram += block
    return gram.flatten(-2).flatten(-3, -2)


def _blocks(factors: JacobianFactors) -> Iterator[Tensor]:
    """Q^T Q, K^T K and V^T V, with axes (i, j, i', j')."""
    x, q, py, m, b = factors.x, factors.q, factors.py, factors.m, factors.b
    dv, d = m.shape[-2:]
    # [a a'] x [c c'] -> (a c) x (a' c')
    yield _tables(table(x, x), (m.mT @ m).flatten(-2), (x.shape[-1],) * 2 + (d, d)).transpose(-3, -2)
    yield _tables((b.mT @ b).flatten(-2), table(q, q), (b.shape[-1],) * 2 + (d, d)).transpose(-3, -2)
    eye = torch.eye(dv, dtype=x.dtype, device=x.device)
    yield (py.mT @ py)[..., :, None, :, None] * eye[:, None, :]


def _tables(left: Tensor, right: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """sum_r left_r right_r, of tables with the given axes."""
    return (left.mT @ right).view(*left.shape[:-2], *sizes)


def table(left: Tensor, right: Tensor) -> Tensor:
    """Rows (r) of all products left_r[i] right_r[j]."""
    return (left[..., :, None] * right[..., None, :]).flatten(-2)


def explicit_jacobian(factors: JacobianFactors) -> Tensor:
    """J itself (R dv, parameters), for the small and the ill-conditioned: nothing is squared."""
    *front, rows, dv, d = factors.m.shape
    widths = (factors.x.shape[-1] * d, factors.b.shape[-1] * d, factors.py.shape[-1] * dv)
    jacobian = factors.m.new_empty(*front, rows, dv, sum(widths))
    j_q, j_k, j_v = jacobian.split(widths, dim=-1)
    torch.mul(factors.x[..., None, :, None], factors.m[..., None, :], out=j_q.unflatten(-1, (-1, d)))
    torch.mul(factors.b[..., None], factors.q[..., None, None, :], out=j_k.unflatten(-1, (-1, d)))
    on_diagonal = j_v.zero_().unflatten(-1, (-1, dv)).diagonal(dim1=-3, dim2=-1)
    on_diagonal.copy_(factors.py[..., None].expand_as(on_diagonal))
    return jacobian.flatten(-3, -2)

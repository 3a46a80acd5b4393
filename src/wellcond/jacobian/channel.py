r"""Attention over channels: cross-covariance attention (XCiT) and the channel attention of DaViT.

Legend (theory.md, section 5.2; everything float64). Indices: c a query channel, e a key channel, i a token.

    X  N x D                                tokens;  Q = X Wq (N x C), K = X Wk, V = X Wv (N x E), biases included
    qhat_c, khat_e                          columns of unit length; or the columns themselves (DaViT)
    N_c = (I - qhat_c qhat_c^T) / |q_c|     derivative of qhat_c, symmetric; the identity without normalisation
    P  C x E = softmax_rows(tau Qhat^T Khat)     output column c: V p_c
    Z_c = V Lambda_c  (N x E),  A_c = tau Z_c Khat^T N_c X~,  u_ce = X~^T N_e qhat_c,  X~ = [X 1] with a bias

    G_cc' = delta_cc' A_c A_c^T + tau^2 Z_c diag_e(u_ce . u_c'e) Z_c'^T + (P P^T)_cc' X~ X~^T

X enters through X^T only, so any L with L L^T = X~ X~^T replaces it. Rows are ordered (i, c), as for every other head;
the blocks above are the slices of one channel. A bias of the keys is not ignored by this softmax.

Note [Channel triangle]. J_Q and J_K move outputs within the range of V only, since Z_c = V Lambda_c. With V = Q_1 R_V,
[Q_1 Q_2] orthogonal, P = Q_P R_P, and [Q_1 Q_2]^T X~ = [[R_11, R_12], [0, R_22]] made triangular from the right, J has
the singular values of

    [ [Q_1 (x) Q_P]^T [J_Q J_K]   R_11 (x) R_P   R_12 (x) R_P ]
    [               0                        0         R_22 (x) R_P ]

and its first two blocks, E C rows, are made triangular by one factorisation. Nothing is squared, so kappa(J) is found
up to 1/eps, while a Gram matrix loses it at 1/sqrt(eps): P is nearly singular where attention is nearly uniform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.jacobian.ends import from_the_right
from wellcond.jacobian.head import compressed, rank_and_ones, softmax_weights, through_softmax, with_constant
from wellcond.jacobian.operator import GramOperator, Hints, JacobianOperator, RankBound, Side, TriangleHint
from wellcond.linalg.spectrum import cast_to_float64, default_rtol, move_to, singular_values

TENSORS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")


@dataclass(frozen=True, eq=False)
class ChannelHead(JacobianOperator):
    """Tokens and weights of one head of channel attention; weights are (out, in) as torch stores them.

    Attributes:
        x: tokens (N, D).
        w_q, w_k, w_v: what plays the query (C, D), the key and the value (E, D).
        scale: tau.
        b_q, b_k, b_v: their biases.
        normalise: columns of Q and K are divided by max(|.|, eps).
        eps: as in `torch.nn.functional.normalize`.
        biases: biases count as parameters.
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    scale: float
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    normalise: bool = True
    eps: float = 1e-12
    biases: bool = False

    def __post_init__(self) -> None:
        cast_to_float64(self, TENSORS)
        move_to(torch.device("cpu"), self, TENSORS)
        for name in ("x", "w_q", "w_k", "w_v"):
            if getattr(self, name).dim() != 2 or getattr(self, name).shape[1] != self.x.shape[-1]:
                raise ValueError(f"{name}: expected a matrix with {self.x.shape[-1]} columns")
        if self.w_k.shape != self.w_v.shape:
            raise ValueError(f"keys and values differ in channels: {self.w_k.shape[0]} and {self.w_v.shape[0]}")

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.x.shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows of the Jacobian, N C."""
        return self.num_tokens * self.w_q.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """N C outputs, and the weights of the head."""
        inputs = [tokens.shape[1] for tokens in self._read]
        return self.num_outputs, sum(rows * width for rows, width in zip(inputs, self._widths, strict=True))

    @cached_property
    def q(self) -> _Columns:
        """Qhat (N, C) and what its derivative needs."""
        return self._columns(_project(self.x, self.w_q, self.b_q))

    @cached_property
    def k(self) -> _Columns:
        """Khat (N, E) and what its derivative needs."""
        return self._columns(_project(self.x, self.w_k, self.b_k))

    @cached_property
    def v(self) -> Tensor:
        """V, (N, E)."""
        return _project(self.x, self.w_v, self.b_v)

    @cached_property
    def p(self) -> Tensor:
        """P, (C, E)."""
        return (self.scale * self.q.hat.T @ self.k.hat).softmax(-1)

    def output(self) -> Tensor:
        """V P^T, (N, C)."""
        return self.v @ self.p.T

    def rank_bound(self) -> RankBound:
        """An upper bound.

        Note [Channel ranks]. Every output column V p_c, and every derivative of it, is a combination of the tokens (and
        of the constant, if values have a bias): with t the rank of those, rank J <= C t, never full for N > D + 1. With
        at least as many key channels as query channels P generically has rank C and J_V = P (x) X~ alone reaches C t,
        if the bias of the values is a parameter or absent. (Not for one token with l2 norm: its P has entries e^tau and
        e^-tau only.) With fewer, rank J_V <= E rank(X~), and at most C (E - 1) dimensions of the logits pass the
        softmax.
        """
        (c, e, _), with_v = self._widths, self._counted[2]
        rank_x, ones = rank_and_ones(self.x)
        span = rank_x + int(self.b_v is not None and not ones)
        rank = min(c * span, e * (span if with_v else rank_x) + c * (e - 1), self.shape[1])
        names = []
        if rank < self.num_outputs:
            names.append(f"outputs outside the span of the tokens: {self.num_outputs - c * span}")
        if rank < c * span or span > rank_x and not with_v:
            names.append("upper bound on the rank")
        return RankBound(rank, "; ".join(names), rank_x)

    def matvec(self, v: Tensor) -> Tensor:
        """J v."""
        sizes = [(tokens.shape[1], width) for tokens, width in zip(self._read, self._widths, strict=True)]
        parts = v.split([rows * columns for rows, columns in sizes])
        return self._push([part.view(size) for part, size in zip(parts, sizes, strict=True)], self._read)

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u."""
        return torch.cat([part.flatten() for part in self._pull(u, self._read)])

    def _pull(self, u: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """J^T u as matrices (inputs, channels), at the cost of a few products N x C x E."""
        rows = u.view(self.num_tokens, -1)
        pulled = self.scale * through_softmax(self.p, rows.T @ self.v)
        moved = (self.q.derivative(self.k.hat @ pulled.T), self.k.derivative(self.q.hat @ pulled), rows @ self.p)
        return [tokens.T @ part for tokens, part in zip(inputs, moved, strict=True)]

    def _push(self, parts: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """J times what `_pull` returns."""
        of_q, of_k, of_v = (tokens @ part for tokens, part in zip(inputs, parts, strict=True))
        logits = self.scale * (self.q.derivative(of_q).T @ self.k.hat + self.q.hat.T @ self.k.derivative(of_k))
        return (self.v @ through_softmax(self.p, logits).T + of_v @ self.p.T).flatten()

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.w_q.shape[0], self.w_k.shape[0], self.w_v.shape[0]

    def as_matrix(self) -> Tensor:
        """J with compressed tokens, columns (channel, input): the same singular values."""
        n, (xq, xk, xv), z = self.num_outputs, self._inputs, self._z
        identity = torch.eye(self.w_q.shape[0], dtype=z.dtype, device=z.device)
        blocks = (
            torch.einsum("cia,cf->icfa", self._a(xq), identity),
            self.scale * torch.einsum("cie,cea->icea", z, self._u(xk)),
            torch.einsum("ce,ia->icea", self.p, xv),
        )
        return torch.cat([block.reshape(n, -1) for block in blocks], dim=1)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T, on either side."""
        inputs = self._inputs
        return GramOperator(self.num_outputs, lambda u: self._push(self._pull(u, inputs), inputs), self._output_gram)

    @property
    def hints(self) -> Hints:
        """Bounds from the values and the norms of all blocks; a triangle where P is square and tokens independent."""
        needed = self._triangle_bytes()
        triangle = None if needed is None else TriangleHint(self._triangle, needed)
        return Hints(bounds=self.bounds, lower_kappa=self.lower_kappa, triangle=triangle)

    def _output_gram(self) -> Tensor:
        """J J^T, (N C, N C), from N x N blocks."""
        (xq, xk, xv), z = self._inputs, self._z
        a, u = self._a(xq), self._u(xk)
        n, channels = self.num_tokens, len(z)
        overlaps = torch.einsum("cea,fea->cfe", u, u)
        gram = torch.einsum("cf,ij->cifj", self.p @ self.p.T, xv @ xv.T)
        for c in range(channels):
            # tau^2 Z_c diag_e(u_ce . u_fe) Z_f^T for every f at once
            keys = self.scale**2 * (z[c] * overlaps[c][:, None, :]) @ z.mT
            gram[c] += keys.transpose(0, 1)
            gram[c, :, c] += a[c] @ a[c].T
        return gram.permute(1, 0, 3, 2).reshape(n * channels, n * channels)

    def bounds(self) -> tuple[float, float]:
        """sigma_min of J_V = P (x) X~ alone, if it has as many columns as rows; the norms of all blocks together."""
        (xq, xk, xv), p = self._inputs, self.p
        of_p, of_x = singular_values(p), singular_values(xv)
        a, z, u = self._a(xq), self._z, self._u(xk)
        largest = float(of_p[0] * of_x[0])
        squares = a.square().sum((1, 2)).max() + self.scale**2 * (z.square().sum(1) * u.square().sum(2)).sum()
        highest = (float(squares) + largest**2) ** 0.5 * (1 + 1e-12)
        if p.shape[0] > p.shape[1] or xv.shape[0] > xv.shape[1]:
            return 0.0, highest
        lost = [default_rtol(t.shape) * float(sigma[0]) for t, sigma in ((p, of_p), (xv, of_x))]
        sure = max(0.0, float(of_p[-1]) - lost[0]) * max(0.0, float(of_x[-1]) - lost[1])
        return sure, highest

    def lower_kappa(self) -> float:
        """J_Q and J_K move no outputs outside the range of V, so J_V alone decides there; 0 where there are none."""
        xv, (tokens, channels) = self._inputs[2], self.v.shape
        if tokens <= channels or xv.shape[0] != xv.shape[1] or self.p.shape[0] != self.p.shape[1]:
            return 0.0
        outside = torch.linalg.qr(self.v, mode="complete").Q[:, channels:]
        of_p, of_x, least = singular_values(self.p), singular_values(xv), singular_values(outside.T @ xv)[-1]
        smallest = float(of_p[-1] * least) + default_rtol(xv.shape) * float(of_p[0] * of_x[0])
        return float(of_p[0] * of_x[0]) / smallest

    def _triangle_bytes(self) -> int | None:
        """Memory of Note [Channel triangle]; None unless P is square and the tokens are independent."""
        (xq, xk, xv), (c, e) = self._inputs, self.p.shape
        if c != e or xv.shape[0] != xv.shape[1]:
            return None
        rows = min(e, self.num_tokens) * c
        return 8 * (3 * rows * (c * xq.shape[1] + e * xk.shape[1] + 1 + rows) + 2 * self.num_outputs**2)

    def _triangle(self, tolerance: float) -> tuple[Tensor, float]:
        """See Note [Channel triangle]; nothing is dropped, whatever the tolerance."""
        (xq, xk, xv), channels = self._inputs, len(self.p)
        turn, r_v = torch.linalg.qr(self.v, mode="complete")
        first = min(self.v.shape)
        of_tokens = from_the_right(turn.T @ xv)[0]
        q_p, r_p = torch.linalg.qr(self.p)
        z = softmax_weights(self.p, r_v[:first].T)
        inner_a, u = self._inner_a(xq), self._u(xk)
        blocks = [
            torch.einsum("cb,cia->ibca", q_p, self.scale * z @ inner_a),
            self.scale * torch.einsum("cb,cie,cea->ibea", q_p, z, u),
        ]
        rows = first * channels
        wide = [block.reshape(rows, -1) for block in blocks] + [_kron(of_tokens[:first, :first], r_p)]
        entries = self.x.new_zeros(self.num_outputs, self.num_outputs)
        entries[:rows, :rows] = from_the_right(torch.cat(wide, dim=1))[0]
        entries[:rows, rows:] = _kron(of_tokens[:first, first:], r_p)
        entries[rows:, rows:] = _kron(of_tokens[first:, first:], r_p)
        return entries, 0.0

    @cached_property
    def _z(self) -> Tensor:
        """Z_c = V Lambda_c, (C, N, E)."""
        return softmax_weights(self.p, self.v.T)

    def _a(self, x: Tensor) -> Tensor:
        """A_c, (C, N, inputs): Khat^T N_c X~ is formed first, as it has only E rows."""
        return self.scale * self._z @ self._inner_a(x)

    def _inner_a(self, x: Tensor) -> Tensor:
        """Khat^T N_c X~, (C, E, inputs)."""
        across, along = self.k.hat.T @ x, self.k.hat.T @ self.q.hat  # (E, inputs), (E, C)
        radial = along.T[:, :, None] * (self.q.hat.T @ x)[:, None, :]
        return (across - self.q.radial[:, None, None] * radial) * self.q.inverse[:, None, None]

    def _u(self, x: Tensor) -> Tensor:
        """u_ce, (C, E, inputs)."""
        along = self.q.hat.T @ self.k.hat  # (C, E)
        radial = along[:, :, None] * (self.k.hat.T @ x)
        return ((self.q.hat.T @ x)[:, None, :] - self.k.radial[:, None] * radial) * self.k.inverse[:, None]

    @property
    def _counted(self) -> tuple[bool, bool, bool]:
        with_q, with_k, with_v = (self.biases and b is not None for b in (self.b_q, self.b_k, self.b_v))
        return with_q, with_k, with_v

    @property
    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the query, key and value parameters multiply."""
        xq, xk, xv = (with_constant(self.x, counted) for counted in self._counted)
        return xq, xk, xv

    @cached_property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same, compressed."""
        xq, xk, xv = (compressed(tokens) for tokens in self._read)
        return xq, xk, xv

    def _columns(self, columns: Tensor) -> _Columns:
        norm = torch.linalg.vector_norm(columns, dim=0)
        if not self.normalise:
            return _Columns(columns, torch.ones_like(norm), torch.zeros_like(norm))
        inverse = 1 / norm.clamp_min(self.eps)
        return _Columns(columns * inverse, inverse, (norm > self.eps).to(norm))


@dataclass(frozen=True, eq=False)
class _Columns:
    """Normalised columns: N_c = inverse_c (I - radial_c hat_c hat_c^T); radial is 0 where nothing is projected out."""

    hat: Tensor
    inverse: Tensor
    radial: Tensor

    def derivative(self, columns: Tensor) -> Tensor:
        """N_c applied to column c; it is symmetric, so this is the transpose as well."""
        return self.inverse * (columns - self.radial * self.hat * (self.hat * columns).sum(0))


def _kron(left: Tensor, right: Tensor) -> Tensor:
    return torch.kron(left.contiguous(), right.contiguous())


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias

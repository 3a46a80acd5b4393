r"""Attention over channels: cross-covariance attention (XCiT) and the channel attention of DaViT.

Legend (theory.md, section 5.2; everything float64). Indices: c a query channel, e a key channel, i a token.

    X  N x D                                tokens;  Q = X Wq (N x C), K = X Wk, V = X Wv (N x E), biases included
    qhat_c = q_c / |q_c|, khat_e            columns of unit length; or the columns themselves (DaViT)
    N_c = (I - qhat_c qhat_c^T) / |q_c|     derivative of qhat_c, symmetric; the identity without normalisation
    P  C x E = softmax_rows(tau Qhat^T Khat)     output column c: V p_c
    Z_c = V Lambda_c  (N x E)               Lambda_c = diag(p_c) - p_c p_c^T

Parameter columns of the weights (w_c of Wq, and so on), X~ = [X 1] where a bias is a parameter:

    J_Q: (c; w_c only) -> A_c = tau Z_c Khat^T N_c X~          N x D
    J_K: (c; w_e)      -> tau Z_c[:, e] u_ce^T,                u_ce = X~^T N_e qhat_c
    J_V: (c; w_e)      -> p_ce X~                              J_tau: (c) -> Z_c Khat^T qhat_c

    G_cc' = delta_cc' A_c A_c^T + tau^2 Z_c diag_e(u_ce . u_c'e) Z_c'^T + (P P^T)_cc' X~ X~^T + J_tau J_tau^T

X enters through X^T only, so any L with L L^T = X~ X~^T replaces it. Rows are ordered (i, c), as for every other head;
the blocks above are the slices of one channel.

A bias of the keys adds b_e sum_i q_i to a logit, which differs from key to key: it is not ignored by this softmax.

Note [Channel triangle]. J_Q and J_K move outputs within the range of V only, since Z_c = V Lambda_c. With V = Q_1 R_V,
[Q_1 Q_2] orthogonal, P = Q_P R_P, and [Q_1 Q_2]^T X~ = [[R_11, R_12], [0, R_22]] made triangular from the right, J has
the singular values of

    [ [Q_1 (x) Q_P]^T [J_Q J_K J_tau]   R_11 (x) R_P   R_12 (x) R_P ]
    [               0                        0         R_22 (x) R_P ]

and its first two blocks, E C rows, are made triangular by one factorisation. Nothing is squared, so kappa(J) is found
up to 1/eps, while a Gram matrix loses it at 1/sqrt(eps): P is nearly singular where attention is nearly uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.jacobian.ends import from_the_right
from wellcond.jacobian.form import AbstractForm, NotDefinedError, Triangle
from wellcond.jacobian.head import compressed, softmax_weights, through_softmax, with_constant
from wellcond.linalg.spectrum import cast_to_float64, default_rtol, move_to, singular_values
from wellcond.theory.ranks import Structure, rank_and_ones

TENSORS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")


@dataclass(frozen=True, eq=False)
class ChannelHead(AbstractForm):
    """Tokens and weights of one head of channel attention; weights are (out, in) as torch stores them.

    Attributes:
        x: tokens (N, D).
        w_q: what plays the query, (C, D).
        w_k: what plays the key, (E, D).
        w_v: what plays the value, (E, D).
        scale: tau.
        b_q: bias of the query, and so on.
        b_k: see above.
        b_v: see above.
        normalise: columns of Q and K are divided by max(|.|, eps).
        eps: as in `torch.nn.functional.normalize`.
        biases: biases count as parameters.
        scale_is_parameter: tau counts as a parameter.
        names: the parameters that play query, key and value, as the model calls them.
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
    scale_is_parameter: bool = False
    names: tuple[str, str, str] = ("q", "k", "v")

    def __post_init__(self) -> None:
        """Cast to float64 and check shapes and values."""
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
        """Rows of the wide Jacobian, N C."""
        return self.num_tokens * self.w_q.shape[0]

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

    def structure(self) -> Structure:
        """Sizes and rank; see Note [Channel ranks]."""
        return _structure(self)

    def parameter_blocks(self) -> dict[str, Tensor]:
        """J of the query, key and value parameters under their `names`, and of the scale; columns (channel, input)."""
        n, (xq, xk, xv), z = self.num_outputs, self._inputs, self._z
        identity = torch.eye(self.w_q.shape[0], dtype=z.dtype, device=z.device)
        by_role = (
            torch.einsum("cia,cf->icfa", self._a(xq), identity),
            self.scale * torch.einsum("cie,cea->icea", z, self._u(xk)),
            torch.einsum("ce,ia->icea", self.p, xv),
        )
        blocks = {name: block.reshape(n, -1) for name, block in zip(self.names, by_role, strict=True)}
        if self.scale_is_parameter:
            blocks["scale"] = self._scale_column.T.reshape(n, 1)
        return blocks

    def explicit_jacobian(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat(list(self.parameter_blocks().values()), dim=1)

    def output_gram(self) -> Tensor:
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
        if self.scale_is_parameter:
            gram += torch.einsum("ci,fj->cifj", self._scale_column, self._scale_column)
        return gram.permute(1, 0, 3, 2).reshape(n * channels, n * channels)

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector of length N C, at the cost of a few products N x C x E and N x N x C."""
        u = flat.view(self.num_tokens, -1)
        q_gram, k_gram, v_gram = self._token_grams
        cosines = self.q.hat.T @ self.k.hat
        pulled = through_softmax(self.p, u.T @ self.v)
        dq = self.q.derivative(q_gram @ self.q.derivative(self.k.hat @ pulled.T))
        dk = self.k.derivative(k_gram @ self.k.derivative(self.q.hat @ pulled))
        logits = self.scale**2 * (dq.T @ self.k.hat + self.q.hat.T @ dk)
        if self.scale_is_parameter:
            logits = logits + (pulled * cosines).sum() * cosines
        return (self.v @ through_softmax(self.p, logits).T + v_gram @ (u @ self.p) @ self.p.T).flatten()

    def certified(self) -> tuple[float, float]:
        """sigma_min of J_V = P (x) X~ alone, if it has as many columns as rows; the norms of all blocks together."""
        (xq, xk, xv), p = self._inputs, self.p
        of_p, of_x = singular_values(p), singular_values(xv)
        a, z, u = self._a(xq), self._z, self._u(xk)
        largest = float(of_p[0] * of_x[0])
        squares = a.square().sum((1, 2)).max() + self.scale**2 * (z.square().sum(1) * u.square().sum(2)).sum()
        if self.scale_is_parameter:
            squares = squares + self._scale_column.square().sum()
        highest = (float(squares) + largest**2) ** 0.5 * (1 + 1e-12)
        if p.shape[0] > p.shape[1] or xv.shape[0] > xv.shape[1]:
            return 0.0, highest
        lost = [default_rtol(t.shape) * float(sigma[0]) for t, sigma in ((p, of_p), (xv, of_x))]
        sure = max(0.0, float(of_p[-1]) - lost[0]) * max(0.0, float(of_x[-1]) - lost[1])
        return sure, highest

    def sure_condition_number(self) -> float:
        """J_Q and J_K move no outputs outside the range of V, so J_V alone decides there; 0 where there are none."""
        xv, (tokens, channels) = self._inputs[2], self.v.shape
        if tokens <= channels or xv.shape[0] != xv.shape[1] or self.p.shape[0] != self.p.shape[1]:
            return 0.0
        outside = torch.linalg.qr(self.v, mode="complete").Q[:, channels:]
        of_p, of_x, least = singular_values(self.p), singular_values(xv), singular_values(outside.T @ xv)[-1]
        smallest = float(of_p[-1] * least) + default_rtol(xv.shape) * float(of_p[0] * of_x[0])
        return float(of_p[0] * of_x[0]) / smallest

    def triangle_bytes(self) -> int | None:
        """Memory of Note [Channel triangle]; None unless P is square and the tokens are independent."""
        (xq, xk, xv), (c, e) = self._inputs, self.p.shape
        if c != e or xv.shape[0] != xv.shape[1]:
            return None
        rows = min(e, self.num_tokens) * c
        return 8 * (3 * rows * (c * xq.shape[1] + e * xk.shape[1] + 1 + rows) + 2 * self.num_outputs**2)

    def triangle(self, tolerance: float) -> Triangle:
        """See Note [Channel triangle]; nothing is dropped, whatever the tolerance."""
        if self.triangle_bytes() is None:
            raise NotDefinedError("the triangular form needs as many key as query channels, and independent tokens")
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
        if self.scale_is_parameter:
            column = (z @ (self.q.hat.T @ self.k.hat)[:, :, None])[..., 0]
            blocks.append((column.T @ q_p)[..., None, None])
        rows = first * channels
        wide = [block.reshape(rows, -1) for block in blocks] + [_kron(of_tokens[:first, :first], r_p)]
        entries = self.x.new_zeros(self.num_outputs, self.num_outputs)
        entries[:rows, :rows] = from_the_right(torch.cat(wide, dim=1))[0]
        entries[:rows, rows:] = _kron(of_tokens[:first, first:], r_p)
        entries[rows:, rows:] = _kron(of_tokens[first:, first:], r_p)
        return Triangle(entries, 0.0)

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

    @cached_property
    def _scale_column(self) -> Tensor:
        """J_tau, (C, N)."""
        return (self._z @ (self.q.hat.T @ self.k.hat)[:, :, None])[..., 0]

    @property
    def _counted(self) -> tuple[bool, bool, bool]:
        with_q, with_k, with_v = (self.biases and b is not None for b in (self.b_q, self.b_k, self.b_v))
        return with_q, with_k, with_v

    @cached_property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the query, key and value parameters multiply, compressed."""
        xq, xk, xv = (compressed(with_constant(self.x, counted)) for counted in self._counted)
        return xq, xk, xv

    @cached_property
    def _token_grams(self) -> tuple[Tensor, Tensor, Tensor]:
        xq, xk, xv = self._inputs
        return xq @ xq.T, xk @ xk.T, xv @ xv.T

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


def xcit_head(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    temperature: float = 1.0,
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    temperature_is_parameter: bool = False,
) -> ChannelHead:
    """Cross-covariance attention of XCiT; `biases` of q, k, v count as parameters.

    Example:
        >>> head = xcit_head(torch.eye(3), torch.eye(3)[:2], torch.eye(3)[1:], torch.eye(3)[:2])
        >>> head.output().shape, head.num_outputs
        (torch.Size([3, 2]), 6)
    """
    b_q, b_k, b_v = biases or (None, None, None)
    return ChannelHead(
        x, w_q, w_k, w_v, temperature, b_q, b_k, b_v,
        biases=biases is not None, scale_is_parameter=temperature_is_parameter,
    )  # fmt: skip


def davit_channel_head(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    scale: float | None = None,
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> ChannelHead:
    """Channel attention of DaViT, softmax((s k)^T v) applied to q: k plays the query, v the key and q the value.

    `scale` is 1/sqrt(channels) if None; `biases` of q, k, v count as parameters. The later version in timm
    (`ChannelAttentionV2`) has the usual roles: `ChannelHead(..., normalise=False, scale=N**-0.5)`.
    """
    b_q, b_k, b_v = biases or (None, None, None)
    scale = w_k.shape[0] ** -0.5 if scale is None else scale
    return ChannelHead(
        x, w_k, w_v, w_q, scale, b_k, b_v, b_q,
        normalise=False, biases=biases is not None, names=("k", "v", "q"),
    )  # fmt: skip


def _kron(left: Tensor, right: Tensor) -> Tensor:
    return torch.kron(left.contiguous(), right.contiguous())


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _structure(head: ChannelHead) -> Structure:
    r"""Sizes, and an upper bound on the rank.

    Note [Channel ranks]. Every output column V p_c, and every derivative of it, is a combination of the tokens (and of
    the constant, if values have a bias): with t the rank of those, rank J <= C t. So J never has full row rank when
    N > t, in particular when N > D + 1. With at least as many key channels as query channels P generically has rank C
    and J_V = P (x) X~ alone reaches C t, if the bias of the values is a parameter or absent: the bound is attained.
    (Not for one token with l2 norm: its P has entries e^tau and e^-tau only.)
    With fewer, rank J_V <= E rank(X~), and at most C (E - 1) dimensions of the logits pass the softmax.
    """
    (c, _), (e, width) = head.w_q.shape, head.w_k.shape
    with_q, with_k, with_v = head._counted
    rank_x, ones = rank_and_ones(head.x)
    span = rank_x + int(head.b_v is not None and not ones)
    parameters = c * (width + with_q) + e * (2 * width + with_k + with_v) + int(head.scale_is_parameter)
    through_values = e * (span if with_v else rank_x)
    rank = min(c * span, through_values + c * (e - 1), parameters)
    names = []
    if rank < head.num_outputs:
        names.append(f"outputs outside the span of the tokens: {head.num_outputs - c * span}")
    if rank < c * span or span > rank_x and not with_v:
        names.append("upper bound on the rank")
    return Structure(head.num_outputs, parameters, rank_x, rank_x, rank, "; ".join(names))

r"""J J^T of a head whose queries and keys pass maps, from pairs of rows, and its products for iterations.

Legend of `wellcond.jacobian.normalised`, with the slopes of the logits in W_r:

    G_rr' = (x_r . x_r') M_r M_r'^T + W_r (T_rr' * Y Y^T) W_r'^T + (PY_r . PY_r') I,      T_rr'[j, j'] = t_rj . t_r'j'

# Note [Pairs of rows]
J_K[r] is no Kronecker product with q_r, and one channel c of the keys at a time J_K J_K^T takes n^2 d E steps. A pair
of rows (r, r') needs T_rr' of the keys that they see only, d + dv steps for each pair of keys (j, j'): s^2 (d + dv) in
all, s being the number of (row, key) that the mask leaves. For N = 256, d = 64 and a causal mask that is 30 times less.
Long sequences of narrow tokens take the channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.jacobian.gram import output_gram
from wellcond.jacobian.head import Blocks
from wellcond.linalg.spectrum import largest_eigenvalues

ROWS = 8
"""Rows whose keys are taken together: their products with one row stay in the cache."""
COLUMNS = 256
"""Columns of J_K that are multiplied at once where it is formed by channels."""
MIRRORED = 1024
"""Rows of a lower triangle that are copied above the diagonal at a time."""


@dataclass(frozen=True, eq=False)
class MappedBlocks:
    """What J J^T and its products are made of.

    Attributes:
        x: inputs of the query parameters as each row sees them, (R, columns).
        m: M_r, (R, dv, d).
        py: inputs of the value parameters times P, (R, columns).
        w: W_r with the slopes, (R, dv, M).
        t: t_rj, (R, M, d).
        y: inputs of the key parameters, (M, columns).
    """

    x: Tensor
    m: Tensor
    py: Tensor
    w: Tensor
    t: Tensor
    y: Tensor

    @property
    def num_outputs(self) -> int:
        """R dv."""
        return self.m.shape[0] * self.m.shape[1]

    def in_float32(self, largest: float) -> MappedBlocks:
        """Blocks of J / `largest`, every factor of moderate size: squares must not leave the range of float32."""
        m_size, w_size, y_size = (float(part.abs().max()) or 1.0 for part in (self.m, self.w, self.y))
        return MappedBlocks(
            x=(self.x * (m_size / largest)).float(),
            m=(self.m / m_size).float(),
            py=(self.py / largest).float(),
            w=(self.w / w_size).float(),
            t=(self.t * (w_size * y_size / largest)).float(),
            y=(self.y / y_size).float(),
        )

    def gram(self) -> Tensor:
        """The lower triangle of J J^T; what is above the diagonal is not defined."""
        none = self.w[:, :, :0]
        plain = Blocks(x=self.x, q=self.x[:, :0], py=self.py, m=self.m, b=none, p=none, k=none, v=none)
        gram = output_gram(plain, lower=True)
        seen, (rows, dv, d) = int((self.w != 0).any(1).sum()), self.m.shape
        if seen**2 * (d + dv) <= (rows * dv) ** 2 * d * self.y.shape[1]:
            _add_by_pairs(gram, self.w, self.t, self.y @ self.y.T)
        else:
            _add_by_channels(gram, self)
        return gram

    def key_channels(self, channels: slice) -> Tensor:
        """Columns (a, c) of J_K for some channels c, (R dv, columns of y, channels)."""
        t = self.t[:, :, channels].permute(2, 0, 1)[:, :, None, :]
        return ((self.w * t).flatten(1, 2) @ self.y).permute(1, 2, 0)

    def pull_back(self, u: Tensor) -> Tensor:
        """J^T u for rows u (k, R dv): (k, parameters)."""
        by_row = u.view(len(u), len(self.m), -1).permute(1, 2, 0)  # (r, o, k)
        to_q = (self.x.T @ (self.m.mT @ by_row).flatten(1)).unflatten(1, (-1, len(u)))  # (a, c, k)
        logits = (self.w.mT @ by_row).transpose(0, 1)  # (j, r, k)
        to_k = (self.y.T @ (self.t.permute(1, 2, 0) @ logits).flatten(1)).unflatten(1, (-1, len(u)))
        to_v = (self.py.T @ by_row.flatten(1)).unflatten(1, (-1, len(u)))  # (a, o, k)
        return torch.cat([part.flatten(0, 1) for part in (to_q, to_k, to_v)]).T

    def push_forward(self, w: Tensor) -> Tensor:
        """J w for rows w (k, parameters): (k, R dv)."""
        (_, dv, d), k = self.m.shape, len(w)
        widths = (self.x.shape[1] * d, self.y.shape[1] * d, self.py.shape[1] * dv)
        of_q, of_k, of_v = (part.T for part in w.split(widths, dim=1))
        seen = (self.x @ of_q.reshape(-1, d * k)).unflatten(1, (d, k))  # (r, c, k)
        keys = (self.y @ of_k.reshape(-1, d * k)).unflatten(1, (d, k))  # (j, c, k)
        logits = (self.t.transpose(0, 1) @ keys).transpose(0, 1)  # (r, j, k)
        read = (self.py @ of_v.reshape(-1, dv * k)).unflatten(1, (dv, k))  # (r, o, k)
        return (self.m @ seen + self.w @ logits + read).flatten(0, 1).T

    def norms(self) -> tuple[float, float]:
        """Spectral norms of J_Q and J_K, by one run of Lanczos."""
        # Scaled to one, so that the squares of a nearly dead head do not underflow.
        m_size, w_size = (float(part.abs().max()) or 1.0 for part in (self.m, self.w))
        m, w, x_gram, y_gram = self.m / m_size, self.w / w_size, self.x @ self.x.T, self.y @ self.y.T

        def product(flat: Tensor) -> Tensor:
            of_q, of_k = flat.view(2, len(m), -1, 1)
            by_q = m @ (x_gram @ (m.mT @ of_q)[..., 0])[..., None]
            moved = y_gram @ (self.t * (w.mT @ of_k)).sum(0)  # (j, c)
            by_k = w @ (self.t * moved).sum(-1, keepdim=True)
            return torch.stack([by_q, by_k]).flatten(1)

        # Ritz values that agree to 1e-6 three times in a row are right to about 1e-10.
        of_q, of_k = largest_eigenvalues(product, 2, self.num_outputs, tolerance=1e-6)
        return m_size * max(of_q.value, 0.0) ** 0.5, w_size * max(of_k.value, 0.0) ** 0.5


@dataclass(frozen=True, eq=False)
class MappedOutputSide:
    """J J^T of a mapped head."""

    blocks: MappedBlocks
    num_null = 0

    @property
    def side(self) -> int:
        """R dv."""
        return self.blocks.num_outputs

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of J J^T / largest^2."""
        return self.blocks.in_float32(largest).gram()

    def shifted(self, largest: float, bound: float) -> Tensor:
        """The lower triangle of J J^T - bound I; nothing needs `largest` here."""
        gram = self.blocks.gram()
        gram.diagonal().sub_(bound)
        return gram

    def square(self, rows: Tensor) -> Tensor:
        """J J^T u."""
        return self.blocks.push_forward(self.blocks.pull_back(rows))

    def product(self, rows: Tensor, largest: float) -> Tensor:
        """J J^T u / largest^2."""
        return self.square(rows) / largest**2

    def length(self, vector: Tensor) -> float:
        """|J^T u| / |u|: nothing is squared that loses digits."""
        return float(self.blocks.pull_back(vector[None]).norm() / vector.norm())


def mirrored_(lower: Tensor) -> Tensor:
    """The symmetric matrix whose lower triangle is given, in its place."""
    for at in range(0, len(lower), MIRRORED):
        end = min(at + MIRRORED, len(lower))
        corner = lower[at:end, at:end]
        lower[:at, at:end] = lower[at:end, :at].T
        corner.copy_(corner.tril() + corner.tril(-1).T)
    return lower


def _add_by_pairs(gram: Tensor, w: Tensor, t: Tensor, y_gram: Tensor) -> None:
    """Add J_K J_K^T to the lower triangle; see Note [Pairs of rows]."""
    rows, dv, _ = w.shape
    entries = gram.view(rows, dv, rows, dv)
    parts = []
    for at in range(0, rows, ROWS):
        some = slice(at, min(at + ROWS, rows))
        keys = (w[some] != 0).any(0).any(0).nonzero()[:, 0]
        if len(keys):  # the first token of a causal head sees itself only, and has no derivative by its keys
            parts.append((some, keys, w[some][:, :, keys].contiguous(), t[some][:, keys].contiguous()))
    for number, (some, keys, weights, turned) in enumerate(parts):
        for other, other_keys, other_weights, other_turned in parts[: number + 1]:
            products, width = y_gram[keys][:, None, other_keys], other_turned.flatten(0, 1).T
            for row in range(some.stop - some.start):
                pairs = (turned[row] @ width).unflatten(1, (-1, len(other_keys))).mul_(products)  # (j, r', j')
                left = (weights[row] @ pairs.flatten(1)).unflatten(1, (-1, len(other_keys)))  # (o, r', j')
                entries[some.start + row, :, other].add_((left.transpose(0, 1) @ other_weights.mT).transpose(0, 1))


def _add_by_channels(gram: Tensor, blocks: MappedBlocks) -> None:
    """The same by J_K itself, some channels of the keys at a time."""
    n, step = len(gram), max(1, COLUMNS // blocks.y.shape[1])
    for first in range(0, blocks.t.shape[2], step):
        columns = blocks.key_channels(slice(first, first + step)).flatten(1)
        for at in range(0, n, MIRRORED):
            end = min(at + MIRRORED, n)
            gram[at:end, :end].addmm_(columns[at:end], columns[:end].T)

r"""An upper triangular matrix with the singular values of a Nystrom head's Jacobian.

J_V = T (x) I with T = U S W^T. In the basis U of the tokens, with U' beside it,

    J = [ S (x) I   M_1 ]     rank J = dv rank T + rank M_2
        [    0      M_2 ]

and QR of M_2 alone makes it triangular. Of the tokens in U', where only queries and keys move something, outputs lie in

    (F Z at landmarks that move) (x) all channels + F (x) rows of B V + (tokens that are seen) (x) differences of Y

from (F Z) dB V, F dZ (B V) and dF Y, since rows of dF sum to zero: with few landmarks less than everything.
"""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor

from wellcond.jacobian.form import Triangle
from wellcond.jacobian.nystrom.head import NystromHead
from wellcond.jacobian.nystrom.null import differences, row_space, split_by


class Reach:
    """Orthonormal coordinates of the outputs that queries and keys can move, at tokens beyond the range of T."""

    def __init__(self, head: NystromHead, beyond: Tensor) -> None:
        """From a head and an orthonormal basis (N, count) of the tokens beyond."""
        n, u = len(beyond), head.from_landmarks @ head.v
        seen = torch.ones(n, dtype=torch.bool) if head.visible is None else head.visible != 0
        moving = head.landmarks(seen.double()) > 0
        levels = (
            (head.mixing[:, moving], torch.eye(u.shape[1], dtype=u.dtype)),
            (head.to_landmarks, row_space(u)),
            (torch.eye(n, dtype=u.dtype)[:, seen], row_space(differences(head.inverse.z @ u))),
        )
        self.parts: list[tuple[Tensor, Tensor]] = []
        left = beyond
        for tokens, channels in levels:
            found, left = split_by(tokens.T, left)
            self.parts.append((found, channels))
        self.num_by_b = self.parts[0][0].shape[1] * u.shape[1]
        self.size = sum(tokens.shape[1] * channels.shape[1] for tokens, channels in self.parts)

    def rows_of(self, jacobian: Tensor) -> Tensor:
        """J (N, dv, columns) in these coordinates, (size, columns)."""
        n, dv, columns = jacobian.shape
        by_token = jacobian.reshape(n, dv * columns)
        found = []
        for tokens, channels in self.parts:
            rows = (tokens.T @ by_token).view(tokens.shape[1], dv, columns)
            found.append((rows if channels.shape == (dv, dv) else channels.T @ rows).flatten(0, 1))
        return torch.cat(found)


def triangle(values: Tensor, above: Tensor, below: Tensor, tolerance: float) -> Triangle:
    """From S (x) I as a vector, M_1 and M_2; directions that M_2 moves by no more than the tolerance are zero."""
    if len(below) >= below.shape[1]:
        below = torch.linalg.qr(below, mode="r").R
    dropped = 0.0
    square = _from_the_right(below)[0] if len(below) < below.shape[1] else below
    if len(square) and not _is_regular(square, tolerance):
        # Pivoting tells how many directions M_2 has; QR alone does not.
        pivoted, order = scipy.linalg.qr(below.numpy(), mode="r", pivoting=True)
        rank = int((abs(pivoted.diagonal()) > tolerance).sum())
        dropped = float(scipy.linalg.norm(pivoted[rank:]))
        below = below.new_empty(rank, below.shape[1])
        below[:, torch.from_numpy(order).long()] = torch.from_numpy(pivoted[:rank])
    if len(below) < below.shape[1]:
        # M_2 = [0, R] Q by turning columns, and then [S (x) I, what Q leaves of M_1 above 0] likewise.
        free = below.shape[1] - len(below)
        below, above = _from_the_right(below, above)
        wide = torch.cat([above[:, :free], torch.diag(values)], dim=1)
        corner, above = _from_the_right(wide)[0], above[:, free:]
    else:
        corner = torch.diag(values)
    size, first = len(corner) + len(below), len(corner)
    entries = above.new_zeros(size, size)
    entries[:first, :first], entries[:first, first:], entries[first:, first:] = corner, above, below
    return Triangle(entries, dropped)


def _from_the_right(wide: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """R (n, n), upper triangular, of [0, R] = wide Q^T, and other Q^T."""
    n = len(wide)
    factors, tau = torch.geqrf(wide.flip(0, 1).T)
    right = factors[:n].triu().T.flip(0, 1)
    if other is None:
        return right, right
    return right, torch.ormqr(factors, tau, other.flip(1), left=False).flip(1)


def _is_regular(square: Tensor, tolerance: float) -> bool:
    """Whether 1 / |R^-1|, by LAPACK's estimate, is well above the tolerance."""
    reciprocal, _ = scipy.linalg.lapack.dtrcon(square.numpy(), norm="1", uplo="U")
    return bool(reciprocal * square.abs().sum(0).max() > 10 * tolerance)

r"""Nystrom attention (theory.md, section 5.3): one head as a function of its weights, and its Jacobian in small pieces.

    L_q, L_k  means of queries and keys over m segments; s = d^(-1/4) on either side
    F = softmax(Q L_k^T)    A = softmax(L_q L_k^T)    B = softmax(L_q K^T + key bias)
    out = F Z B V + C V,    Z six Newton-like steps from A^T / c towards the inverse of A,    C a convolution

With U = B V and Y = Z U, row i of F and row l of B are softmax heads of their own, so that

    d out = dF Y + (F Z) dB V + F (dZ U) + (F Z B + C) dV

needs covariances of N + m rows, m d derivatives of Z U, and one matrix T = (F Z B + C) X for the values:
J_V = T (x) I. Without the convolution T has at most m independent rows (rank J_V <= m d); with it, any number.

# Coordinates
Orthonormal coordinates of what a Nystrom head can move, of its weights (columns of J) and of its outputs (rows).

# Note [Columns]
Some directions of W_Q and W_K change no softmax; coordinates are of the others. With tokens X, segment means S X and
their differences S' X, queries and keys enter through three sets of logits

    F: X dW_Q C^T + Q dW_K^T (S'X)^T      C, L_q: differences of key landmarks, query landmarks
    B: S X dW_Q K'^T + L_q dW_K^T X'^T    K', X': differences of the keys, of the tokens, that B sees
    A: means of F over segments

so that J_Q lives in (SX) (x) (K' and C) + X (x) C, and J_K in (S'X) (x) Q + (S'X and X') (x) L_q: with few landmarks
less than everything. Of what is left, these are null:

 * the gauge W_Q E, -W_K E^T, as it is for the softmax (theory.md, section 4). Biases that are no
   parameters change q . k by x W_Q E b_k^T - b_q E W_K^T y^T. The first term is the same for all keys, which a softmax
   ignores, unless masks scale b_k differently in different landmarks. The second asks for b_q E = 0.
 * with few landmarks, some of what b_q forbids: if C e = 0 then W_Q g e^T and W_K e u^T act on B alone, and change its
   logits by (e . k)(l - share b_q)(g) + (e . k) l u for landmark l with that share of visible tokens. They cancel if
   L_q (g + u) = shares (b_q . g), which can be solved for u where the landmarks are independent.
 * with few landmarks, W_K that moves one row of B only, y u^T with L_q u = (0 .. 1 .. 0) and S'X y = 0, and not B V: of
   the many y only dv are seen.
 * what b_k forbids under masks, as for b_q: if L_q g = 0 and b_q . g = 0, then W_Q g (e + z)^T and -W_K e g^T act on F
   alone, and cancel if C z = -(b_k . e) (differences of shares).

# Note [Rows]
J_V = T (x) I with T = U S W^T. In the basis U of the tokens, with U' beside it,

    J = [ S (x) I   M_1 ]     rank J = dv rank T + rank M_2
        [    0      M_2 ]

and QR of M_2 alone makes it triangular. Of the tokens in U', where only queries and keys move something, outputs lie in

    (F Z at landmarks that move) (x) all channels + F (x) rows of B V + (tokens that are seen) (x) differences of Y

from (F Z) dB V, F dZ (B V) and dF Y, since rows of dF sum to zero: with few landmarks less than everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from wellcond.jacobian.factors import weighted_covariances
from wellcond.jacobian.head import through_softmax
from wellcond.linalg.spectrum import row_space

STEPS = 6
ROUNDING = 1e-12  # of bases that come from ill-conditioned matrices
SOLVED = 1e-9  # relative residual of a linear system that counts as solvable


@dataclass(frozen=True, eq=False)
class NystromHead:
    """One head on one sample, in float64.

    `visible` are the release's 0/1 marks of tokens, which multiply queries, keys and what the convolution reads;
    `key_bias` is added to the logits of B, as Hugging Face does. `column_sum` is the largest column sum of A in the
    other heads, where they share c; None where each head has its own c.
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    num_landmarks: int
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    kernel: Tensor | None = None
    visible: Tensor | None = None
    key_bias: Tensor | None = None
    column_sum: float | None = None

    @property
    def root(self) -> float:
        """Scale of queries, and of keys."""
        return float(self.w_q.shape[0] ** -0.25)

    @cached_property
    def seen(self) -> Tensor:
        """Tokens as queries, keys and the convolution see them, (N, D)."""
        return self.x if self.visible is None else self.x * self.visible[:, None]

    def _project(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = self.x @ weight.T
        return rows if bias is None else rows + bias

    def _scaled(self, rows: Tensor) -> Tensor:
        return self.root * (rows if self.visible is None else rows * self.visible[:, None])

    @cached_property
    def q(self) -> Tensor:
        """Scaled queries (N, d)."""
        return self._scaled(self._project(self.w_q, self.b_q))

    @cached_property
    def k(self) -> Tensor:
        """Scaled keys (N, d)."""
        return self._scaled(self._project(self.w_k, self.b_k))

    @cached_property
    def v(self) -> Tensor:
        """Values (N, dv)."""
        return self._project(self.w_v, self.b_v)

    def landmarks(self, rows: Tensor) -> Tensor:
        """Means over segments, (m, ...)."""
        return rows.unflatten(0, (self.num_landmarks, -1)).mean(1)

    @cached_property
    def to_landmarks(self) -> Tensor:
        """F, (N, m)."""
        return (self.q @ self.landmarks(self.k).T).softmax(-1)

    @cached_property
    def between(self) -> Tensor:
        """A, (m, m)."""
        return (self.landmarks(self.q) @ self.landmarks(self.k).T).softmax(-1)

    @cached_property
    def from_landmarks(self) -> Tensor:
        """B, (m, N)."""
        logits = self.landmarks(self.q) @ self.k.T
        return (logits if self.key_bias is None else logits + self.key_bias).softmax(-1)

    @cached_property
    def inverse(self) -> Inverse:
        """Z and its derivative."""
        return Inverse(self.between, self.column_sum)

    @cached_property
    def mixing(self) -> Tensor:
        """F Z, (N, m)."""
        return self.to_landmarks @ self.inverse.z

    def convolve(self, rows: Tensor) -> Tensor:
        """C times rows (N, columns)."""
        assert self.kernel is not None
        return conv1d(rows.T[:, None], self.kernel[None, None], padding=len(self.kernel) // 2)[:, 0].T

    def linear_in_values(self, rows: Tensor) -> Tensor:
        """(F Z B + C) times rows (N, columns)."""
        mixed = self.mixing @ (self.from_landmarks @ rows)
        if self.kernel is None:
            return mixed
        return mixed + self.convolve(rows if self.visible is None else rows * self.visible[:, None])

    def output(self) -> Tensor:
        """What W_O reads of this head, (N, dv)."""
        return self.linear_in_values(self.v)

    def query_key_jacobian(self, x_q: Tensor, x_k: Tensor) -> tuple[Tensor, Tensor]:
        """J_Q (N, dv, a, d) and J_K (N, dv, a', d) in coordinates of the weights.

        x_q, x_k: `seen` in those coordinates, seen @ (orthonormal columns).
        """
        m, (n, dv), d = self.num_landmarks, self.v.shape, self.w_q.shape[0]
        f, z, b = self.to_landmarks, self.inverse.z, self.from_landmarks
        l_q, l_k, u = self.landmarks(self.q), self.landmarks(self.k), b @ self.v
        lx_q, lx_k = self.landmarks(x_q), self.landmarks(x_k)
        # Of Z U through A: the gradient of every entry (l, o), pulled back to landmarks of queries and keys.
        pulled = through_softmax(self.between, self.inverse.pull_back(u))
        inner_q = torch.einsum("loij,jc,ia->loac", pulled, l_k, lx_q)
        inner_k = torch.einsum("loij,ic,ja->loac", pulled, l_q, lx_k)
        # Of B V: row l is a softmax head whose query is landmark l.
        key_side, token_side = weighted_covariances(b, self.k, self.v, x_k, 1.0)
        outer_q = torch.einsum("la,loc->loac", lx_q, key_side)
        outer_k = torch.einsum("loa,lc->loac", token_side, l_q)
        j_q = (f @ inner_q.reshape(m, -1)).addmm_(self.mixing, outer_q.reshape(m, -1)).view(n, dv, -1, d)
        j_k = (f @ inner_k.reshape(m, -1)).addmm_(self.mixing, outer_k.reshape(m, -1)).view(n, dv, -1, d)
        # Of F Y: row i is a softmax head whose keys are landmarks.
        key_side, token_side = weighted_covariances(f, l_k, z @ u, lx_k, 1.0)
        j_q += x_q[:, None, :, None] * key_side[:, :, None, :]
        j_k += token_side[:, :, :, None] * self.q[:, None, None, :]
        return j_q.mul_(self.root), j_k.mul_(self.root)


class Inverse:
    r"""Z from A by six steps Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4 from Z = A^T / c, with its derivative.

    A Z is A A^T / c = H at the start and a polynomial of H ever after: Z = A^T phi(H) / c. With H = W diag(l) W^T

        d phi(H) = W (phi[l_i, l_j] * (W^T dH W)) W^T

    where phi[., .] are divided differences. They are carried through the steps by the product rule, not by dividing.
    """

    def __init__(self, a: Tensor, column_sum: float | None = None) -> None:
        """From A; c is its largest column sum, or `column_sum` if that is larger."""
        sums = a.sum(0)
        self.a, self.c = a, float(sums.max())
        # As torch does: equal sums share the derivative of their maximum.
        self.c_gradient = (sums == sums.max()).to(a) / (sums == sums.max()).sum()
        if column_sum is not None and column_sum > self.c:
            self.c, self.c_gradient = column_sum, torch.zeros_like(sums)
        self.values, self.basis = torch.linalg.eigh(a @ a.T / self.c)
        self.phi, self.differences = _steps(self.values)
        self.map = self.basis * self.phi @ self.basis.T
        self.z = a.T @ self.map / self.c

    def pull_back(self, u: Tensor) -> Tensor:
        """Gradients of every entry (l, o) of Z u with respect to A, (m, columns of u, m, m)."""
        a, c, w = self.a, self.c, self.basis
        m, columns = u.shape
        left, right = a.T @ w, u.T @ w  # rows: W^T a_l and W^T u_o
        # Of phi(H): diag(left_l) phi[.,.] diag(right_o), symmetrised, since H is symmetric.
        middle = left[:, None, :, None] * self.differences * right[None, :, None, :]
        middle = middle + middle.mT
        found = torch.matmul(w, (middle.reshape(-1, m) @ (w.T @ a)).view(m, columns, m, m)) / c**2
        # Of A^T in front: entry (l, o) reads column l of A.
        diagonal = found.diagonal(dim1=0, dim2=3)  # (columns, m, l)
        diagonal += ((self.map @ u) / c).T[:, :, None]
        # Of c: Z scales with 1/c itself, and so does H in phi.
        slope = self.values * self.differences.diagonal()
        by_c = -(self.z @ u + (left * slope) @ right.T / c) / c
        return found + by_c[:, :, None, None] * self.c_gradient


def _steps(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of phi and its divided differences at the eigenvalues of H."""
    phi, phi_pairs = torch.ones_like(values), torch.zeros(len(values), len(values), dtype=values.dtype)
    for _ in range(STEPS):
        p = values * phi
        first, second = p[:, None], p[None, :]
        p_pairs = phi[:, None] + values[None, :] * phi_pairs
        step = (13 - p * (15 - p * (7 - p))) / 4
        step_pairs = (-15 + 7 * (first + second) - (first**2 + first * second + second**2)) / 4 * p_pairs
        phi, phi_pairs = phi * step, phi[:, None] * step_pairs + phi_pairs * step[None, :]
    return phi, phi_pairs


def split_by(rows: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of what these rows have in the span of a basis (orthonormal columns), and of what it has left.

    Rounding is judged by the size of the rows themselves, of which nothing may be left.
    """
    part, size = rows @ basis, torch.linalg.matrix_norm(rows, 2)
    _, sigma, right = torch.linalg.svd(part)
    rank = int((sigma > ROUNDING * size).sum())
    return basis @ right[:rank].T, basis @ right[rank:].T


def null_space(*rows: Tensor) -> Tensor:
    """Orthonormal basis (columns) of what is orthogonal to all these rows."""
    basis = row_space(torch.cat(rows))
    return torch.linalg.qr(basis, mode="complete").Q[:, basis.shape[1] :]


def differences(rows: Tensor) -> Tensor:
    """Rows that span the differences of rows."""
    return rows - rows.mean(0)


class Coordinates:
    """Coordinates of (inner tokens) (x) (outer channels) + (outer tokens) (x) (inner channels)."""

    def __init__(self, weight: Tensor, tokens: tuple[Tensor, Tensor], channels: tuple[Tensor, Tensor]) -> None:
        """From rows that span each; inner lies in outer. Of the weight (r, d) a few coordinates hold as much as can."""
        inner, rest = split_by(tokens[0], row_space(tokens[1]))
        self.num_outer_only = rest.shape[1]
        self.inner_channels, self.outer_channels = (row_space(rows) for rows in channels)
        if self.inner_channels.shape == self.outer_channels.shape:
            both = torch.cat([inner, rest], dim=1)
            self.tokens = both @ torch.linalg.qr(both.T @ weight, mode="complete").Q
            self.split = both.shape[1]
        else:
            self.tokens, self.split = torch.cat([inner, rest], dim=1), inner.shape[1]

    def coordinates(self, directions: Tensor) -> Tensor:
        """Of directions (count, r, d), as (count, size)."""
        return self.of_turned(self.tokens.T @ directions)

    def of_turned(self, turned: Tensor) -> Tensor:
        """The same, of directions whose tokens are in coordinates already, (count, tokens, d)."""
        first, second = turned[:, : self.split], turned[:, self.split :]
        return torch.cat([(first @ self.outer_channels).flatten(1), (second @ self.inner_channels).flatten(1)], dim=1)

    def turned(self, coordinates: Tensor) -> Tensor:
        """The direction (tokens, d) that has these coordinates (size,): the transpose of `of_turned`."""
        outer, inner = self.outer_channels, self.inner_channels
        first, second = coordinates.split(
            [self.split * outer.shape[1], coordinates.numel() - self.split * outer.shape[1]]
        )
        return torch.cat([first.view(self.split, -1) @ outer.T, second.view(-1, inner.shape[1]) @ inner.T])

    @property
    def size(self) -> int:
        """How many there are."""
        inner = self.tokens.shape[1] - self.split
        return self.split * self.outer_channels.shape[1] + inner * self.inner_channels.shape[1]


class Moving:
    """Orthonormal coordinates of all directions of W_Q and W_K that are not known to be null; Note [Columns]."""

    def __init__(self, head: NystromHead, span: Tensor) -> None:
        """From a head and an orthonormal basis of its tokens."""
        seen = head.seen @ span
        self.w_q, self.w_k = span.T @ head.w_q.T, span.T @ head.w_k.T
        keys = head.from_landmarks.any(0)
        l_q, c = head.landmarks(head.q) / head.root, differences(head.landmarks(head.k)) / head.root
        lx = head.landmarks(seen)
        self.q = Coordinates(self.w_q, (lx, seen), (c, torch.cat([c, differences(head.k[keys])])))
        between = torch.cat([differences(lx), differences(seen[keys])])
        self.k = Coordinates(self.w_k, (differences(lx), between), (l_q, head.q))
        # No landmark of the keys moves apart from the others, so that neither F nor A does.
        self.num_b_only = self.k.num_outer_only * self.k.inner_channels.shape[1]
        shares = torch.ones(len(lx), dtype=torch.float64)
        if head.visible is not None:
            shares = head.landmarks(head.visible)
        unheard = _unheard(head, seen, l_q)
        self.num_b_only -= len(unheard)
        found = _null_directions(self.w_q, self.w_k, head.b_q, head.b_k, l_q, c, shares)
        self._remove([*found, (torch.zeros_like(unheard), unheard)])

    def _remove(self, found: list[tuple[Tensor, Tensor]]) -> None:
        moves = torch.cat([torch.cat([self.q.coordinates(q), self.k.coordinates(k)], dim=1) for q, k in found])
        values, vectors = torch.linalg.eigh(moves @ moves.T)
        independent = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        null = vectors[:, independent].T @ moves / values[independent, None].sqrt()
        touched = null.norm(dim=0) > 1e-12
        self.num_null = len(null)
        self.order = torch.cat([touched.nonzero(), (~touched).nonzero()]).flatten()
        self.num_touched = int(touched.sum())
        self.reflectors = torch.geqrf(null[:, touched].T)
        self.size = moves.shape[1] - self.num_null

    def take(self, j_q: Tensor, j_k: Tensor) -> Tensor:
        """Columns (n, tokens, d) of J_Q and J_K, whose tokens are in these coordinates, as one matrix (n, size)."""
        both = torch.cat([self.q.of_turned(j_q), self.k.of_turned(j_k)], dim=1)[:, self.order]
        if self.num_null:
            # Q = [null directions, the rest] from Householder's reflections.
            mixed = torch.ormqr(*self.reflectors, both[:, : self.num_touched], left=False)
            both[:, : self.num_touched] = mixed
        return both[:, self.num_null :]

    def give(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Directions (tokens, d) of W_Q and W_K that have these coordinates (size,): the transpose of `take`."""
        both = torch.cat([coordinates.new_zeros(self.num_null), coordinates])[None]
        if self.num_null:
            mixed = torch.ormqr(*self.reflectors, both[:, : self.num_touched], left=False, transpose=True)
            both[:, : self.num_touched] = mixed
        ordered = torch.empty_like(both[0]).scatter_(0, self.order, both[0])
        of_q, of_k = ordered.split([self.q.size, self.k.size])
        return self.q.turned(of_q), self.k.turned(of_k)


class Reach:
    """Orthonormal coordinates of the outputs that queries and keys can move, beyond the range of T; Note [Rows]."""

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


def _null_directions(
    w_q: Tensor, w_k: Tensor, b_q: Tensor | None, b_k: Tensor | None, l_q: Tensor, c: Tensor, shares: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Directions (count, r, d) of W_Q and W_K; Note [Columns]."""
    d = w_q.shape[1]
    none = w_q.new_zeros(1, d)
    b_q = none if b_q is None else b_q[None]
    # A key bias matters only where landmarks have different shares of it.
    b_k = none if b_k is None or bool((shares == shares[0]).all()) else b_k[None]
    n_q, n_k = null_space(b_q), null_space(b_k)
    to_q = torch.einsum("ra,cb->abrc", w_q @ n_q, n_k).flatten(0, 1)
    to_k = torch.einsum("rb,ca->abrc", w_k @ n_k, n_q).flatten(0, 1)
    found = [(to_q, -to_k)]
    if bool(b_q.any()):
        g, e = (b_q / b_q.norm() ** 2).flatten(), null_space(c, b_k)
        s = _solve(l_q, shares)
        if s is not None:
            found += [(torch.einsum("r,ce->erc", w_q @ g, e), torch.einsum("re,c->erc", w_k @ e, s - g))]
    if bool(b_k.any()):
        e, g = (b_k / b_k.norm() ** 2).flatten(), null_space(l_q, b_q)
        z = _solve(c, shares.mean() - shares)
        if z is not None:
            found += [(torch.einsum("rg,c->grc", w_q @ g, e + z), -torch.einsum("r,cg->grc", w_k @ e, g))]
    return found


def _unheard(head: NystromHead, seen: Tensor, l_q: Tensor) -> Tensor:
    """Directions (count, r, d) of W_K that change a row of B, but not of B V."""
    still = null_space(differences(head.landmarks(seen)))
    _, token_side = weighted_covariances(head.from_landmarks, head.k, head.v, seen @ still, 1.0)
    found = [seen.new_zeros(0, seen.shape[1], l_q.shape[1])]
    for number, (side, landmark) in enumerate(zip(token_side, l_q, strict=True)):
        u = _solve(l_q, torch.eye(len(l_q), dtype=l_q.dtype)[number]) if bool(landmark.any()) else None
        if u is not None:
            found.append(torch.einsum("ry,c->yrc", still @ null_space(side), u))
    return torch.cat(found)


def _solve(matrix: Tensor, right: Tensor) -> Tensor | None:
    """A solution, if there is one."""
    found = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    return found if bool((matrix @ found - right).norm() <= SOLVED * right.norm()) else None

r"""Nystrom attention (theory.md, section 5.3): one head as a function of its weights, and its Jacobian in small pieces.

    L_q, L_k  means of queries and keys over m segments; s = d^(-1/4) on either side
    F = softmax(Q L_k^T)    A = softmax(L_q L_k^T)    B = softmax(L_q K^T + key bias)
    out = F Z B V + C V,    Z six Newton-like steps from A^T / c towards the inverse of A,    C a convolution

With U = B V and Y = Z U, row i of F and row l of B are softmax heads of their own, so that

    d out = dF Y + (F Z) dB V + F (dZ U) + (F Z B + C) dV

needs covariances of N + m rows, m d derivatives of Z U, and one matrix T = (F Z B + C) X for the values:
J_V = T (x) I. Without the convolution T has at most m independent rows (rank J_V <= m d); with it, any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from wellcond.jacobian.factors import through_softmax, weighted_covariances

STEPS = 6


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

    def approximate_map(self) -> Tensor:
        """F Z B, (N, N): what stands in the place of the softmax."""
        return self.mixing @ self.from_landmarks

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

"""Naive Jacobians of one attention head, from the definition, never optimised. Weights are the papers' D x d.

The automatic-differentiation blocks are row-major: rows (token, output), columns (a, c) of the D x d weight. The
Kronecker forms of section 2.1 are column-stacked (`vec`); `to_row_major` converts. Their keyword arguments replace one
factor by a printed error, so that an erratum is the distance between two calls.
"""

import torch
from torch import Tensor

from wellcond.jacobian.factors import weighted_covariances
from wellcond.jacobian.head import Head

F64 = torch.float64


def tensor(rows) -> Tensor:
    return torch.tensor(rows, dtype=F64)


def head(x, wq, wk, wv, s, mask=None) -> Head:
    """A head from the papers' D x d weights."""
    x, wq, wk, wv = (w if isinstance(w, Tensor) else tensor(w) for w in (x, wq, wk, wv))
    wq, wk, wv = (w[:, None] if w.dim() == 1 else w for w in (wq, wk, wv))
    return Head(x, wq.T, wk.T, wv.T, s, mask)


def causal_mask(n: int) -> Tensor:
    return torch.full((n, n), -torch.inf, dtype=F64).triu(1)


def attention(x, wq, wk, wv, s, mask=None) -> Tensor:
    logits = s * (x @ wq) @ (x @ wk).T
    return torch.softmax(logits if mask is None else logits + mask, -1) @ (x @ wv)


def blocks(h: Head) -> tuple[Tensor, Tensor, Tensor]:
    """J_Q, J_K, J_V by automatic differentiation, each N d x D d, row-major."""
    weights = (h.w_q.T, h.w_k.T, h.w_v.T)
    parts = torch.func.jacrev(lambda q, k, v: attention(h.x, q, k, v, h.scale, h.mask), argnums=(0, 1, 2))(*weights)
    return tuple(part.reshape(part.shape[0] * part.shape[1], -1) for part in parts)


def wide(h: Head) -> Tensor:
    return torch.cat(blocks(h), 1)


def stack(h: Head) -> Tensor:
    return torch.cat(blocks(h), 0)


def sigma(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix)


def rank(matrix: Tensor, rtol: float = 1e-11) -> int:
    s = sigma(matrix)
    return int((s > rtol * s[0]).sum())


def kappa(matrix: Tensor) -> float:
    s = sigma(matrix)
    return float(s[0] / s[-1])


def kron(a: Tensor, b: Tensor) -> Tensor:
    """torch.kron, which refuses a transposed view."""
    return torch.kron(a.contiguous(), b.contiguous())


def commutation(m: int, n: int) -> Tensor:
    """T_mn with T_mn vec(Z) = vec(Z^T) for Z of size m x n; vec stacks columns."""
    t = torch.zeros(m * n, m * n, dtype=F64)
    for i in range(m):
        for j in range(n):
            t[i * n + j, j * m + i] = 1
    return t


def softmax_jacobian(p: Tensor) -> Tensor:
    return torch.diag(p) - torch.outer(p, p)


def lambda_hat(p: Tensor) -> Tensor:
    """sum_i Lambda_i (x) e_i e_i^T, the derivative of row softmax in column order."""
    eye = torch.eye(len(p), dtype=F64)
    return sum(kron(softmax_jacobian(row), torch.outer(e, e)) for row, e in zip(p, eye, strict=True))


def kronecker_query(h: Head, *, hat=None, s=None) -> Tensor:
    """dvec(A)/dvec(Wq) = s (V^T (x) I) Lhat (K (x) X), column order."""
    x, k, v = h.x, h.x @ h.w_k.T, h.x @ h.w_v.T
    hat = lambda_hat(probabilities(h)) if hat is None else hat
    return (h.scale if s is None else s) * kron(v.T, torch.eye(len(x), dtype=F64)) @ hat @ kron(k, x)


def kronecker_key(h: Head, *, hat=None, t=None) -> Tensor:
    """dvec(A)/dvec(Wk) = s (V^T (x) I) Lhat (X (x) Q) T_Dd, column order."""
    x, q, v = h.x, h.x @ h.w_q.T, h.x @ h.w_v.T
    hat = lambda_hat(probabilities(h)) if hat is None else hat
    t = commutation(x.shape[1], q.shape[1]) if t is None else t
    return h.scale * kron(v.T, torch.eye(len(x), dtype=F64)) @ hat @ kron(x, q) @ t


def kronecker_value(h: Head) -> Tensor:
    """dvec(A)/dvec(Wv) = I_d (x) (P X), column order."""
    return kron(torch.eye(len(h.w_v), dtype=F64), probabilities(h) @ h.x)


def to_row_major(j: Tensor, h: Head) -> Tensor:
    """T_Nd J T_Dd^T."""
    (n, width), d = h.x.shape, len(h.w_q)
    return commutation(n, d) @ j @ commutation(width, d).T


def probabilities(h: Head) -> Tensor:
    logits = h.scale * (h.x @ h.w_q.T) @ (h.x @ h.w_k.T).T
    return torch.softmax(logits if h.mask is None else logits + h.mask, -1)


def jacobian_of(function, *arguments) -> list[Tensor]:
    """Blocks of the Jacobian of any function of several tensors, rows and columns flattened."""
    parts = torch.func.jacrev(function, argnums=tuple(range(len(arguments))))(*arguments)
    outputs = function(*arguments).numel()
    return [part.reshape(outputs, -1) for part in parts]


def row_form(h: Head) -> tuple[Tensor, Tensor, Tensor]:
    """The same blocks from section 2.2, for sizes where automatic differentiation is slow:

    J_Q[i]: (a,c) -> x_i[a] M_i[:,c],   J_K[i]: (a,c) -> q_i[c] B_i[:,a],   J_V[i]: (a,c) -> (PX)_i[a] e_c.
    """
    eye = torch.eye(h.value_dim, dtype=F64)
    m, b = weighted_covariances(probabilities(h), h.keys(), h.values(), h.x, h.scale)
    j_q = torch.einsum("ia,ioc->ioac", h.x, m)
    j_k = torch.einsum("ic,ioa->ioac", h.x @ h.w_q.T, b)
    j_v = torch.einsum("ia,oc->ioac", probabilities(h) @ h.x, eye)
    return tuple(j.reshape(h.num_tokens * h.value_dim, -1) for j in (j_q, j_k, j_v))

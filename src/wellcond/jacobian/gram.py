r"""Gram matrices of the Jacobian, assembled from blocks without ever forming it.

Outputs (theory.md, section 3.3), n x n with n = R dv, rows ordered (r, o):

    G_rr' = (x_r . x_r') M_r M_r'^T + (q_r . q_r') B_r B_r'^T + (PY_r . PY_r') I

Parameters, columns ordered Q: (a, c), K: (a, c), V: (a, o):

    Q^T Q: sum_r x_r x_r^T (x) M_r^T M_r      K^T K: sum_r B_r^T B_r (x) q_r q_r^T      V^T V: (PY)^T PY (x) I
    Q^T K: sum_r x_r[a] (M_r^T B_r)[c, a'] q_r[c']       Q^T V: sum_r x_r[a] PY_r[a'] M_r[o, c]
    K^T V: sum_r q_r[c] PY_r[a'] B_r[o, a]

Each sum over r is one matrix product of two tables with R rows, so the cost is R (Dd)^2, not R dv (Dd)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wellcond.head import CHUNK_BYTES, Blocks

CACHE_BYTES = 4 * 2**20  # rows that are multiplied, scaled and added while they are near the processor


def output_gram(blocks: Blocks, *, lower: bool = False) -> Tensor:
    """J J^T of the wide Jacobian, (R dv, R dv); if `lower`, what is above the diagonal is left undefined."""
    rows, dv, _ = blocks.m.shape
    n = rows * dv
    m, b = blocks.m.reshape(n, -1), blocks.b.reshape(n, -1)
    x_gram, q_gram = blocks.x @ blocks.x.T, blocks.q @ blocks.q.T
    py_gram = blocks.py @ blocks.py.T
    gram = m.new_empty(n, n)
    size = max(1, (CACHE_BYTES if lower else CHUNK_BYTES) // (m.element_size() * n * dv))
    for at in range(0, rows, size):
        end = min(at + size, rows)
        some, lines = slice(at, end), slice(at * dv, end * dv)
        stop = end if lower else rows
        part = gram[lines, : stop * dv]
        torch.matmul(m[lines], m[: stop * dv].T, out=part)
        blockwise = part.view(end - at, dv, stop, dv)
        blockwise.mul_(x_gram[some, None, :stop, None])
        of_keys = (b[lines] @ b[: stop * dv].T).view_as(blockwise)
        blockwise.addcmul_(of_keys, q_gram[some, None, :stop, None])
        blockwise.diagonal(dim1=1, dim2=3).add_(py_gram[some, :stop, None])
    return gram


def parameter_gram(blocks: Blocks) -> Tensor:
    """J^T J of the wide Jacobian, in the (compressed) parameters."""
    x, q, py, m, b = blocks.x, blocks.q, blocks.py, blocks.m, blocks.b
    rows, dv, d = m.shape
    Dx, Dy, Dv = x.shape[1], b.shape[2], py.shape[1]
    nq, nk, nv = Dx * d, Dy * d, Dv * dv
    gram = x.new_empty(nq + nk + nv, nq + nk + nv)
    to_q, to_k, to_v = slice(0, nq), slice(nq, nq + nk), slice(nq + nk, None)

    def put(first: slice, second: slice, block: Tensor) -> None:
        """Entries (i, j, i', j') of a block with rows (i, j) and columns (i', j')."""
        i, j, k, m = block.shape
        gram[first, second].unflatten(1, (k, m)).unflatten(0, (i, j)).copy_(block)
        if first != second:
            gram[second, first].unflatten(1, (i, j)).unflatten(0, (k, m)).copy_(block.permute(2, 3, 0, 1))

    def table(left: Tensor, right: Tensor) -> Tensor:
        """Rows (r) of all products left_r[i] right_r[j]."""
        return (left[:, :, None] * right[:, None, :]).flatten(1)

    def contract(left: Tensor, right: Tensor) -> Tensor:
        return left.T @ right

    # Q^T Q: [a a'] x [c c'] -> (a c) x (a' c')
    qq = contract(table(x, x), (m.mT @ m).flatten(1)).view(Dx, Dx, d, d)
    put(to_q, to_q, qq.permute(0, 2, 1, 3))
    kk = contract((b.mT @ b).flatten(1), table(q, q)).view(Dy, Dy, d, d)
    put(to_k, to_k, kk.permute(0, 2, 1, 3))
    eye = torch.eye(dv, dtype=x.dtype, device=x.device)
    put(to_v, to_v, contract(py, py)[:, None, :, None] * eye[:, None, :])
    qk = contract(table(x, q), (m.mT @ b).flatten(1)).view(Dx, d, d, Dy)  # [a c'] x [c a']
    put(to_q, to_k, qk.permute(0, 2, 3, 1))
    qv = contract(table(x, py), m.flatten(1)).view(Dx, Dv, dv, d)  # [a a'] x [o c]
    put(to_q, to_v, qv.permute(0, 3, 1, 2))
    kv = contract(table(q, py), b.flatten(1)).view(d, Dv, dv, Dy)  # [c a'] x [o a]
    put(to_k, to_v, kv.permute(3, 0, 1, 2))
    return gram


def stack_gram(blocks: Blocks) -> Tensor:
    """H = J_Q^T J_Q + J_K^T J_K + J_V^T J_V, the Gram matrix of the papers' stacked [J_Q; J_K; J_V] (Dd, Dd).

    It needs one identification of the three parameter spaces: equal widths, and the same order (a, c) in all of them.
    """
    x, q, py, m, b = blocks.x, blocks.q, blocks.py, blocks.m, blocks.b
    rows, dv, d = m.shape
    D = x.shape[1]
    if not (dv == d and b.shape[2] == py.shape[1] == D):
        raise ValueError("the stacked convention needs query, key and value parameters of one shape, without biases")
    gram = x.new_empty(D, d, D, d)
    mm = (m.mT @ m).flatten(1)
    qq = (q[:, :, None] * q[:, None, :]).flatten(1)
    size = max(1, CHUNK_BYTES // (8 * D * (d * d + rows)))
    for at in range(0, D, size):
        some = slice(at, min(at + size, D))
        part = gram[some]  # (a c) x (a' c') from [a a'] x [c c']
        part.copy_(((x[:, some, None] * x[:, None, :]).flatten(1).T @ mm).view(-1, D, d, d).transpose(1, 2))
        part.add_(((b[:, :, some].mT @ b).flatten(1).T @ qq).view(-1, D, d, d).transpose(1, 2))
    gram.diagonal(dim1=1, dim2=3).add_((py.T @ py)[:, :, None])
    return gram.view(D * d, D * d)


def explicit_jacobian(blocks: Blocks) -> Tensor:
    """J itself (R dv, parameters), for the small and the ill-conditioned: nothing is squared."""
    rows, dv, d = blocks.m.shape
    j_q = torch.einsum("ra,roc->roac", blocks.x, blocks.m).reshape(rows * dv, -1)
    j_k = torch.einsum("roa,rc->roac", blocks.b, blocks.q).reshape(rows * dv, -1)
    eye = torch.eye(dv, dtype=blocks.x.dtype, device=blocks.x.device)
    j_v = torch.einsum("ra,ok->roak", blocks.py, eye).reshape(rows * dv, -1)
    return torch.cat([j_q, j_k, j_v], dim=1)

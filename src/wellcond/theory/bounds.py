r"""Bounds on the singular values of the parameter Jacobian that hold. Both conventions, masks allowed.

wide = [J_Q J_K J_V], the Jacobian (N dv x ...); stack = [J_Q; J_K; J_V], the papers' dimension count, for dv = d. With
the factorised blocks (legend in `wellcond/head.py`) J J^T (wide) and J^T J (stack) are sums of three PSD terms,

    wide:  J J^T = bd(M_i)(X X^T (x) I) bd(M_i)^T + bd(B_i)(Q Q^T (x) I) bd(B_i)^T + P X X^T P^T (x) I
    stack: J^T J = (X (x) I)^T bd(M_i^T M_i) (X (x) I) + ... + X^T P^T P X (x) I

and lambda_min(A + B) >= lambda_min(A) + lambda_min(B), lambda_max(A + B) <= lambda_max(A) + lambda_max(B). The bounds
involve norms of W and P, not kappa(W): no bound in kappa(W) alone can exist (Wq -> tWq, Wk -> Wk/t).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.errors import check_choice
from wellcond.jacobian.head import Blocks, Head, build_blocks
from wellcond.linalg.records import Convention
from wellcond.linalg.spectrum import default_rtol, resolve_rank, singular_values, spectrum, where_decomposed
from wellcond.theory.ranks import contains_ones
from wellcond.theory.statement import Bound, Hypothesis, Relation, all_hold, check_single, ours, settle
from wellcond.theory.surrogate import softmax_spectrum

LambdaNorm = Literal["actual", "half"]


def lower_parts(blocks: Blocks, rank: int, *, less_rounding: bool = False) -> dict[str, float]:
    """Factors of (L) at rank r of the tokens; zero where there are fewer than r singular values.

    `less_rounding` takes the rounding of the SVD off, so that dependent rows get no positive bound.
    """

    def sigma_r(matrix: Tensor, sigma: Tensor) -> float:
        if rank > len(sigma):
            return 0.0
        return max(0.0, float(sigma[rank - 1]) - rounding(matrix) * float(sigma[0]))

    def rounding(matrix: Tensor) -> float:
        return default_rtol(tuple(matrix.shape)) if less_rounding else 0.0

    # bd(M_i) bd(M_i)^T >= min_i sigma_dv(M_i)^2, and sigma_dv = 0 for a tall M_i (d < dv).
    tall = blocks.m.shape[2] < blocks.m.shape[1]
    of_m = blocks.m_values
    m = 0.0 if tall else max(0.0, float((of_m[:, -1] - rounding(blocks.m) * of_m[:, 0]).min()))
    of_x, of_px = sigma_r(blocks.x, blocks.x_values), sigma_r(blocks.py, blocks.py_values)
    return {"sigma_r(X)": of_x, "min sigma_min(M_i)": m, "sigma_r(PX)": of_px}


def upper_parts(blocks: Blocks) -> dict[str, float]:
    """Factors of (U1)."""
    return {
        "||X||": float(blocks.x_values[0]),
        "max ||M_i||": float(blocks.m_values[:, 0].max()),
        "||Q||": float(blocks.together("||Q||", lambda stack: _norms(stack.q))),
        "max ||B_i||": float(blocks.together("||B_i||", lambda stack: _norms(stack.b)).max()),
        "||PX||": float(blocks.py_values[0]),
    }


def _norms(matrices: Tensor) -> Tensor:
    """Of each matrix; squaring loses nothing of a largest singular value."""
    return torch.linalg.eigvalsh(where_decomposed(matrices @ matrices.mT))[..., -1].clamp_min(0).sqrt()


def lower_square(parts: Mapping[str, float]) -> float:
    """(L) from its factors."""
    x, m, px = parts.values()
    return (x * m) ** 2 + px**2


def upper_square(parts: Mapping[str, float]) -> float:
    """(U1) from its factors."""
    x, m, q, b, px = parts.values()
    return (x * m) ** 2 + (q * b) ** 2 + px**2


def log10_kappa_bound(head: Head, blocks: Blocks, *, convention: Convention = "wide") -> float | None:
    """log10 of `kappa_bound`, from blocks that are there already; None where that says nothing but rounding."""
    rank = int(resolve_rank(blocks.x_values, tuple(head.x.shape)))
    if rank == 0 or (convention == "wide" and rank < head.num_tokens):
        return None
    lower = lower_square(lower_parts(blocks, rank, less_rounding=True))
    return None if lower == 0 else (math.log10(upper_square(upper_parts(blocks))) - math.log10(lower)) / 2


def lower_bound(head: Head, *, convention: Convention = "wide", strict: bool = True) -> Bound:
    r"""(L), a lower bound on the squared least singular value.

    .. math:: \sigma_{\min}(J)^2 \ge \sigma_r(X)^2 \min_i \sigma_{\min}(M_i)^2 + \sigma_r(PX)^2, \ r = \mathrm{rank}(X)

    For the stack it concerns sigma_{dr}, the least one on the row space of X (the strict sigma_min if r = D). It is
    informative only if rank PX = r or every M_i is non-singular; it is 0 otherwise, and true.

    Raises: HypothesisError unless r = N (wide), or dv = d and X is not zero (stack).
    """
    r, n = spectrum(head.x).rank, head.num_tokens
    if convention == "wide":
        needed = Hypothesis("N = rank X", r == n, {"N": n, "rank X": r})
    else:
        needed = Hypothesis("X is not zero", r > 0, {"rank X": r})
    hypotheses = (*_exists(head, convention), needed)
    value, parts = None, dict[str, float]()
    if all_hold(hypotheses):
        parts = lower_parts(build_blocks(head), r)
        value = lower_square(parts)
    quantity = "sigma_min(J_wide)^2" if convention == "wide" else "sigma_dr(J_stack)^2"
    return _bound("lower_bound", value, hypotheses, "(L)", quantity, ">=", parts, strict)


def upper_bound(head: Head, *, convention: Convention = "wide", strict: bool = True) -> Bound:
    r"""(U1), an upper bound on the squared norm of J, for any shape.

    .. math:: \sigma_1(J)^2 \le \|X\|^2 \max_i \|M_i\|^2 + \|Q\|^2 \max_i \|B_i\|^2 + \|PX\|^2

    Raises: HypothesisError for the stack with dv != d, which does not exist.
    """
    hypotheses = _exists(head, convention)
    value, parts = None, dict[str, float]()
    if all_hold(hypotheses):
        parts = upper_parts(build_blocks(head))
        value = upper_square(parts)
    return _bound("upper_bound", value, hypotheses, "(U1)", "sigma_max(J)^2", "<=", parts, strict)


def norm_upper_bound(
    head: Head, *, lambda_norm: LambdaNorm = "actual", convention: Convention = "wide", strict: bool = True
) -> Bound:
    r"""(U2), the bound (U1) with the blocks replaced by norms of the weights.

    .. math:: \sigma_1(J)^2 \le s^2 L^2 \|X\|^6 \|W_v\|^2 (\|W_q\|^2 + \|W_k\|^2) + \|PX\|^2

    since ||M_i|| <= s ||V|| ||Lambda_i|| ||K|| and ||B_i|| <= s ||V|| ||Lambda_i|| ||X||.

    Args:
        head: one head.
        lambda_norm: ``actual``, L = max_i ||Lambda_i||, or ``half``, L = 1/2, which needs no eigenvalue.
        convention: wide or stack.
        strict: raise outside the hypotheses.

    Raises: HypothesisError for the stack with dv != d.
    """
    check_choice("lambda_norm", lambda_norm, get_args(LambdaNorm))
    hypotheses = _exists(head, convention)
    value, parts = None, dict[str, float]()
    if all_hold(hypotheses):
        parts = {
            "s": head.scale,
            "L": softmax_spectrum(head).norm if lambda_norm == "actual" else 0.5,
            "||X||": float(singular_values(head.x)[0]),
            "||Wq||": float(singular_values(head.w_q)[0]),
            "||Wk||": float(singular_values(head.w_k)[0]),
            "||Wv||": float(singular_values(head.w_v)[0]),
            "||PX||": float(singular_values(head.probabilities()[0] @ head.x)[0]),
        }
        s, lam, x, wq, wk, wv, px = parts.values()
        value = (s * lam * x**3 * wv) ** 2 * (wq**2 + wk**2) + px**2
    return _bound("norm_upper_bound", value, hypotheses, "(U2)", "sigma_max(J)^2", "<=", parts, strict)


def kappa_bound(head: Head, *, convention: Convention = "wide", strict: bool = True) -> Bound:
    r"""Upper bound on the condition number of J.

    .. math:: \kappa(J) \le \sqrt{U_1 / L}

    Strict kappa for wide; for the stack the pseudo kappa sigma_1/sigma_{dr} (strict if r = D).

    Raises: HypothesisError outside the hypotheses of (L), or if L = 0, where it promises nothing.
    """
    low = lower_bound(head, convention=convention, strict=False)
    positive = Hypothesis("L > 0", bool(low.value), {"L": low.value or 0.0})
    hypotheses = (*low.hypotheses, positive)
    value, parts = None, dict[str, float]()
    if all_hold(hypotheses) and low.value is not None:
        up = upper_bound(head, convention=convention).value
        assert up is not None
        value, parts = math.sqrt(up / low.value), {"U1": up, "L": low.value}
    return _bound("kappa_bound", value, hypotheses, "U1 / L", f"kappa(J_{convention})", "<=", parts, strict)


def exact_case(head: Head, *, strict: bool = True) -> Bound:
    r"""The least singular value of J_wide when the values can express a constant.

    .. math:: \mathbf 1 \in \mathrm{range}(V), N \le D \Rightarrow \sigma_{\min}(J_\mathrm{wide}) = \sigma_{\min}(PX)

    J J^T >= P X X^T P^T (x) I gives >=. With Vu = 1 we have M_i^T u = 0 and B_i^T u = 0, because Lambda_i 1 = 0, so
    J J^T (w (x) u) = (P X X^T P^T w) (x) u gives equality. N <= d with V of full row rank is enough.

    Raises: HypothesisError.
    """
    check_single(head)
    n, v = head.num_tokens, head.values()
    hypotheses = (
        Hypothesis("N <= D", n <= head.width, {"N": n, "D": head.width}),
        Hypothesis("1 is in range(V)", contains_ones(v), {"N": n, "rank V": spectrum(v).rank}),
    )
    value = float(singular_values(head.probabilities()[0] @ head.x)[-1]) if all_hold(hypotheses) else None
    return _bound("exact_case", value, hypotheses, "exact case", "sigma_min(J_wide)", "=", {}, strict)


def sigma_min_upper_bound(head: Head) -> Bound:
    r"""Cheap upper bound on the least singular value of J_wide, for any head.

    .. math:: \sigma_{\min}(J)^2 \le \lambda_{\min}\Bigl(\sum_{ij} v_i v_j G_{ij}\Bigr), \quad G = J J^T

    where v is the last left singular vector of PX: the Rayleigh quotient of G over vectors v (x) u, d_v x d_v.
    """
    check_single(head)
    blocks = build_blocks(head)
    left, s, _ = torch.linalg.svd(blocks.py, full_matrices=True)
    v = left[:, -1]
    px = float(s[-1]) if head.num_tokens <= head.width else 0.0
    # G_ij = (x_i.x_j) M_i M_j^T + (q_i.q_j) B_i B_j^T + (P X X^T P^T)_ij I, so the sum over i and j is
    #     T T^T + sigma_N(PX)^2 I   with   T = sum_i v_i [M_i (x) x_i^T, B_i (x) q_i^T],
    # and the singular values of T avoid squaring.
    t_q = torch.einsum("i,ioc,ia->oca", v, blocks.m, blocks.x).flatten(1)
    t_k = torch.einsum("i,ioa,ic->oca", v, blocks.b, blocks.q).flatten(1)
    t = torch.cat([t_q, t_k], 1)
    tail = float(singular_values(t)[-1]) if t.shape[1] >= t.shape[0] else 0.0
    parts = {"tail": tail, "sigma_N(PX)": px}
    value = math.hypot(tail, px)
    return _bound("sigma_min_upper_bound", value, (), "cheap upper bound", "sigma_min(J_wide)", "<=", parts, True)


def _exists(head: Head, convention: Convention) -> tuple[Hypothesis, ...]:
    """The hypothesis under which J in this convention exists at all."""
    check_single(head)
    check_choice("convention", convention, get_args(Convention))
    d, dv = head.head_dim, head.value_dim
    return () if convention == "wide" else (Hypothesis("the stack needs dv = d", d == dv, {"d": d, "dv": dv}),)


def _bound(
    name: str,
    value: float | None,
    hypotheses: tuple[Hypothesis, ...],
    equation: str,
    quantity: str,
    relation: Relation,
    parts: Mapping[str, float],
    strict: bool,
) -> Bound:
    statement = Bound(
        name=name,
        value=value,
        hypotheses=hypotheses,
        reference=ours(f"section 6, {equation}"),
        quantity=quantity,
        relation=relation,
        parts=parts,
    )
    return settle(statement, strict=strict)

"""Numbered heads with known spectra. Weights are the papers' D x d."""

import math

import torch

from theory.reference import F64, causal_mask, head, tensor
from wellcond.theory import Head

ROOT_HALF = 1 / math.sqrt(2)

G1_X = [[1, 0, 0, 1], [0, 1, 0, -1], [0, 0, 1, 1]]
G1_WQ = [[1, 0], [0, 1], [1, -1], [0, 1]]
G1_WK = [[0, 1], [1, 0], [1, 1], [-1, 0]]
G1_WV = [[1, -1], [0, 2], [1, 0], [1, 1]]


def g1(s: float = ROOT_HALF, causal: bool = False) -> Head:
    return head(G1_X, G1_WQ, G1_WK, G1_WV, s, causal_mask(3) if causal else None)


def g2() -> Head:
    x = [[1, 0], [0, 1], [1, 1], [1, -1], [2, 1]]
    return head(x, [[1, 0], [1, 1]], [[0, 1], [1, -1]], [[1, 1], [0, 1]], ROOT_HALF)


def g3() -> Head:
    wq, wk, wv = [[1, 0], [0, 1], [1, 0]], [[1, 1], [0, 1], [-1, 0]], [[2, 0], [0, 1], [1, 1]]
    return head([[1, 0, 1], [0, 1, -1]], wq, wk, wv, ROOT_HALF)


def two_tokens(wq: float, wk: float, wv: float, x=(1, 2)) -> Head:
    """N = 2, D = d = 1, s = 1: T2 and T5."""
    return head([[x[0]], [x[1]]], [[wq]], [[wk]], [[wv]], 1.0)


def scaling_family(t: float) -> Head:
    """T3: P, A and the papers' bound do not depend on t."""
    return head(torch.eye(2, dtype=F64), tensor([1, 2]) * t, tensor([1, -1]) / t, [1, 0.5], 1.0)


def stack_counterexamples() -> list[Head]:
    """T7: full column rank, kappa(J_stack) above the papers' bound."""
    return [
        head([[2.761, 0.687], [-2.7, 2.19], [-1.207, -3.328]], [1.971, 2.412], [-0.022, -0.027], [-2.362, 0.08], 1.0),
        head(
            [[0.808, 0.713, 0.261], [1.008, -0.546, 0.016], [-2.262, 0.45, -3.134]],
            [[0.024, -0.045], [0.037, 0.008], [-0.013, 0.042]],
            [[-1.806, 1.541], [-0.207, -0.646], [-0.715, 4.333]],
            [[-2.844, 2.158], [-0.427, -0.241], [-0.089, 2.892]],
            1.0,
        ),
        head(
            [[-0.44, 1.236, 1.046], [1.37, -0.587, -0.321], [-0.414, 1.016, -1.94], [-0.867, -1.368, -0.418]],
            [0.395, -1.917, 0.448],
            [0.188, -0.407, 0.062],
            [-0.185, 0.024, 4.103],
            1.0,
        ),
    ]

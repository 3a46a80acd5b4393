"""`jacobian_spectrum`: singular values of an attention head's parameter Jacobian."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.arguments import check_biases, check_choice, check_int, check_number, check_tensor
from wellcond.errors import WeightError
from wellcond.jacobian.head import Head
from wellcond.jacobian.operator import JacobianOperator
from wellcond.jacobian.problem import Convention, JacobianSpectrum
from wellcond.jacobian.softmax import SoftmaxJacobian, stacked_jacobian
from wellcond.jacobian.solve import operator_spectrum
from wellcond.linalg.spectrum import to_float64


def jacobian_spectrum(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    kv_tokens: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    convention: Convention = "wide",
    method: Literal["auto", "dense", "gram", "cholesky", "implicit"] = "auto",
    rtol: float | None = None,
    memory_limit: int | None = None,
) -> JacobianSpectrum:
    r"""Singular values of the Jacobian of one head's output with respect to W_Q, W_K, W_V.

    .. math:: J = \partial\, \mathrm{vec}(P V) / \partial (W_Q, W_K, W_V)

    Args:
        x: tokens (N, D).
        w_q: (d, D), or (g, d, D) for g query heads that share a key/value head.
        w_k: (d, E).
        w_v: (dv, E).
        scale: logit scale; 1/sqrt(d) if None.
        mask: added to the logits (N, N): -inf, position biases; or boolean, True where attention is allowed.
        kv_tokens: tokens (M, E) of keys and values under cross attention; x if None.
        biases: of q, k, v; they count as parameters.
        convention: ``wide``, the Jacobian (outputs x parameters), or ``stack``, the papers' [J_Q; J_K; J_V].
        method: see `wellcond.jacobian.solve`.
        rtol: singular values up to rtol * sigma_max count as zero; max(shape) * eps if None.
        memory_limit: bytes that may be used; what is free if None.

    Returns: a `JacobianSpectrum`; its status says whether the numbers are exact.

    Raises:
        TypeError: something else than dense tensors of real numbers, or than a number where one is expected.
        ValueError: shapes that do not fit, empty tensors, a mask that hides everything from some token, a scale or a
            tolerance that is NaN or out of range.
        WeightError: NaN or infinite tokens or weights.
        MemoryLimitError: the method asked for does not fit.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> one = torch.ones(1, 1)
        >>> round(jacobian_spectrum(x, one, one, one, scale=1.0).condition_number, 3)
        753.489
    """
    check_choice("convention", convention, get_args(Convention))
    check_tensor("x", x, (2,))
    check_tensor("w_q", w_q, (2, 3))
    for name, weight in (("w_k", w_k), ("w_v", w_v)):
        check_tensor(name, weight, (2,))
    if kv_tokens is not None:
        check_tensor("kv_tokens", kv_tokens, (2,))
    if mask is not None:
        check_tensor("mask", mask, (2, 3))
        mask = to_float64(mask).log() if mask.dtype == torch.bool else mask
    b_q, b_k, b_v = check_biases(biases)
    rtol = None if rtol is None else check_number("rtol", rtol, at_least=0, below=1)
    memory_limit = None if memory_limit is None else check_int("memory_limit", memory_limit, at_least=1)
    head = Head(
        x,
        w_q,
        w_k,
        w_v,
        w_k.shape[0] ** -0.5 if scale is None else check_number("scale", scale),
        y=kv_tokens,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        mask=mask,
    )
    if convention == "stack" and biases is not None:
        raise ValueError("the stacked convention is defined without biases")
    operator: JacobianOperator = SoftmaxJacobian(head, biases is not None)
    if convention == "stack":
        operator = stacked_jacobian(operator)
    try:
        return operator_spectrum(operator, convention=convention, method=method, rtol=rtol, memory_limit=memory_limit)
    except torch.linalg.LinAlgError as error:
        raise WeightError(
            "tokens or weights are too large: squares of the Jacobian leave float64; rescale them"
        ) from error

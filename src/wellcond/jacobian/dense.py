"""The Jacobian by automatic differentiation: the reference for small sizes, never optimised."""

from __future__ import annotations

import torch
from torch import Tensor

from wellcond.head import Head


def dense_jacobian(head: Head, *, biases: bool = False) -> dict[str, Tensor]:
    """Blocks J_Q, J_K, J_V (R dv, parameters) with parameters flattened as the D x d matrix row by row.

    A bias is the last row of its block.
    """
    g, d = head.num_query_heads, head.head_dim

    def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.mT if bias is None or not biases else torch.cat([weight.mT, bias[..., None, :]], dim=-2)

    def output(wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        def project(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if bias is not None and biases:
                return tokens @ weight[..., :-1, :] + weight[..., -1:, :]
            return tokens @ weight + (0.0 if bias is None else bias[..., None, :])

        q, k = project(head.x, wq, head.query_biases), project(head.memory, wk, head.b_k)
        v = project(head.memory, wv, head.b_v)
        logits = head.scale * q @ k.mT
        logits = logits if head.mask is None else logits + head.mask
        return logits.softmax(-1) @ v

    weights = (
        with_bias(head.query_weights, head.query_biases),
        with_bias(head.w_k, head.b_k),
        with_bias(head.w_v, head.b_v),
    )
    jacobians = torch.func.jacrev(output, argnums=(0, 1, 2))(*weights)
    assert output(*weights).shape == (g, head.num_tokens, head.value_dim) and weights[1].shape[-1] == d
    return {name: j.reshape(head.num_outputs, -1) for name, j in zip("qkv", jacobians, strict=True)}

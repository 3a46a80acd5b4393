r"""Starts of whole blocks, attention and MLP, that others have proposed: baselines of what is set here for Q, K, V.

T-Fixup (Huang et al., ICML 2020) draws every matrix by Xavier's rule and shrinks what adds to the stream,

.. math:: W_V, W_O, W_{MLP} \gets 0.67 \, N^{-1/4} \, W, \qquad E \gets (9N)^{-1/4} E, \; E \sim N(0, 1/D),

in a model of N blocks, so that it trains without norms and without warm-up. Small initialisation (arXiv:2606.17945)
draws every matrix with standard deviation :math:`\mathrm{fan}_{in}^{-\gamma}`, :math:`\gamma` above the usual 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from wellcond.attention.blocks import block_matrices
from wellcond.init.options import PositiveFloat
from wellcond.init.plan import InitContext, ParameterWrite, Write, head_write, register_init
from wellcond.init.tokens import embedding_layers
from wellcond.linalg.orthogonal import draw_normal


@register_init("small")
def small(context: InitContext, *, gamma: PositiveFloat = 0.8) -> Iterator[Write]:
    """Every matrix of the blocks Gaussian with standard deviation fan_in^-gamma; biases, norms and tokens stay.

    Args:
        context: the model and its sites.
        gamma: 0.5 is the usual scale.

    Raises: WellcondError for an attention that stands in no list of blocks.
    """
    for matrix in block_matrices(context.model, context.sites):
        drawn = draw_normal(tuple(matrix.parameter.shape), generator=context.generator)
        yield ParameterWrite(matrix.name, matrix.parameter, drawn * matrix.fan_in**-gamma)


@register_init("t_fixup")
def t_fixup(context: InitContext) -> Iterator[Write]:
    """Xavier's rule for every matrix of the blocks; V, W_O, MLPs and word embeddings shrunk with depth; biases stay.

    Norms and warm-up, which the paper leaves out, are the model's and the schedule's. Embeddings of patches stay.

    Raises: WellcondError for an attention that stands in no list of blocks.
    """
    matrices = list(block_matrices(context.model, context.sites))
    depth = len(context.sites)
    shrink = 0.67 * depth**-0.25
    held = set[int]()
    for site in context.sites:
        for role, slot in site.slots.items():
            held.add(id(slot.parameter))
            rows = slot.num_heads * slot.head_dim
            fan_in, fan_out = (rows, slot.out_features) if role == "o" else (slot.in_features, rows)
            shape = (slot.num_heads, fan_out, slot.head_dim) if role == "o" else (*slot.rows.shape, fan_in)
            scale = math.sqrt(2 / (fan_in + fan_out)) * (shrink if role in ("o", site.roles["value"]) else 1.0)
            yield head_write(site, role, draw_normal(shape, generator=context.generator) * scale)
    for matrix in matrices:
        if id(matrix.parameter) not in held:
            drawn = draw_normal(tuple(matrix.parameter.shape), generator=context.generator)
            scale = shrink * math.sqrt(2 / (matrix.fan_in + matrix.fan_out))
            yield ParameterWrite(matrix.name, matrix.parameter, drawn * scale)
    for name, layer in embedding_layers(context.model):
        if isinstance(layer, nn.Embedding):
            drawn = draw_normal(tuple(layer.weight.shape), generator=context.generator)
            scale = (9 * depth) ** -0.25 * layer.embedding_dim**-0.5
            yield ParameterWrite(f"{name}.weight", layer.weight, drawn * scale)

"""The start of the attention in nanochat (Karpathy, 2025): Q, K, V of unit scale, and no output until W_O has moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from wellcond.attention.site import Slot
from wellcond.errors import UnsupportedLayoutError
from wellcond.init.plan import InitContext, Write, head_write, register_init
from wellcond.linalg.orthogonal import draw_normal

Distribution = Literal["uniform", "normal"]


@register_init("nanochat")
def nanochat(context: InitContext, *, distribution: Distribution = "uniform") -> Iterator[Write]:
    """Q, K and V independent of standard deviation 1/sqrt(D), W_O zero; biases stay.

    Args:
        context: the model and its sites.
        distribution: ``uniform``, as nanochat draws (within sqrt(3/D)), or ``normal``.

    Raises: UnsupportedLayoutError for an attention without an output projection.
    """
    for site in context.sites:
        if site.o is None:
            raise UnsupportedLayoutError(
                site.name,
                "nanochat's initialisation sets the output projection W_O to zero, but this attention has none. "
                "Choose another method, or leave the site out with sites=...",
                class_name=type(site.module).__name__,
            )
        for role in "qkv":
            yield head_write(site, role, _draw(site.slots[role], distribution, context))
        yield head_write(site, "o", torch.zeros(site.o.num_heads, site.o.out_features, site.o.head_dim))


def _draw(slot: Slot, distribution: Distribution, context: InitContext) -> Tensor:
    shape = (*slot.rows.shape, slot.in_features)
    if distribution == "normal":
        return draw_normal(shape, generator=context.generator) * slot.in_features**-0.5
    source = "cpu" if context.generator is None else context.generator.device
    uniform = torch.rand(shape, generator=context.generator, device=source)
    return (2 * uniform - 1) * (3 / slot.in_features) ** 0.5

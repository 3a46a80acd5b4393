"""Contract of an adapter: the q, k and v that a site describes are the ones the model's own forward multiplies.

Use: `call = watch(site, lambda: model(x))`, then `assert_heads_multiplied(site, call, tokens)`. Models are tiny, in
float64 and evaluation mode, with random weights and biases (`randomise_`) and batch size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention.record import SiteRecord, observe
from wellcond.attention.site import AttentionSite
from wellcond.attention.structure import proportional


def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter (biases, tables, norms too) random values of moderate size; float64, evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / fan_in**0.5)
    return model


def watch(site: AttentionSite, run: Callable[[], Any]) -> SiteRecord:
    """Run the model and record what happens inside the first call of the site's module."""
    with observe(site.module, [site], ("arguments", "products", "logits", "output")) as found:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            run()
    [call] = found.sites
    assert call.seen, f"{site.name} was never called"
    return call


def heads_of(site: AttentionSite, role: str, x: Tensor) -> Tensor:
    """The site's account of one role on tokens x (..., N, D): (leading * num_heads, N, head_dim)."""
    slot = site.slots[role]
    x_LND = x.reshape(-1, *x.shape[-2:])
    heads = torch.einsum("lnc,hdc->lhnd", x_LND, slot.read())
    bias = slot.read_bias()
    if bias is not None:
        heads = heads + bias[None, :, None, :]
    heads = heads.repeat_interleave(site.num_heads // slot.num_heads, dim=1)
    return heads.flatten(0, 1)


@torch.no_grad()
def appears(operands: list[Tensor], expected: Tensor, tokens: slice = slice(None)) -> bool:
    """Whether some recorded operand (or its transpose) is `expected`, up to one factor, on the chosen tokens."""
    for operand in operands:
        for candidate in (operand, operand.mT):
            if (
                candidate.shape == expected.shape
                and proportional(candidate[:, tokens], expected[:, tokens]) is not None
            ):
                return True
    return False


def assert_heads_multiplied(
    site: AttentionSite,
    call: SiteRecord,
    x: Tensor,
    memory: Tensor | None = None,
    *,
    roles: str = "qkv",
    tokens: slice = slice(None),
) -> None:
    """Assert that the model multiplied exactly the site's q, k, v on input tokens x (..., N, D).

    `memory` is where keys and values come from under cross attention. `tokens` restricts the comparison of q and k to
    tokens that a rotary embedding leaves alone (position 0).
    """
    operands = [side for product in call.products for side in product]
    for role in roles:
        source = x if role == "q" or memory is None else memory
        chosen = slice(None) if role == "v" else tokens
        expected = heads_of(site, role, source)
        assert appears(operands, expected, chosen), (
            f"{site.name}: the model did not multiply what the site calls {role}"
        )

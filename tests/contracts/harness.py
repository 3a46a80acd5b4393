"""Contract of an adapter: the q, k and v that a site describes are the ones the model's own forward multiplies.

Use: `call = watch(site, lambda: model(x))`, then `assert_heads_multiplied(site, call, tokens)`. Models are tiny, in
float64 and evaluation mode, with random weights and biases (`randomise_`) and batch size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention.layout import head_rows
from wellcond.attention.record import SiteRecord, observe
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
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


@dataclass(frozen=True)
class Call:
    """How an attention module was called inside its model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Seen:
    """One forward pass: how a site's module was called, and what went through its projections, in the first call."""

    def __init__(self, case: Any, model: nn.Module, site: AttentionSite) -> None:
        self.case, self.site = case, site
        self.call: Call | None = None
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        hooks = [site.module.register_forward_pre_hook(self._keep_call, with_kwargs=True)]
        watched = {site.module, self.head_reader, *(slot.owner for slot in site.slots.values())} - {None}
        hooks += [module.register_forward_hook(self._keep) for module in watched]
        try:
            torch.manual_seed(0)
            with torch.no_grad():
                case.run(model)
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def head_reader(self) -> nn.Module | None:
        """The module that reads the concatenated heads; None where the attention returns them."""
        if self.case.reader is not None:
            return self.case.reader(self.site.module)
        return None if self.site.o is None else self.site.o.owner

    def _keep_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.call = self.call or Call(args, kwargs)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor):
            self.inputs.setdefault(module, args[0])
        self.outputs.setdefault(module, output)

    def as_tokens(self, x: Tensor, *, is_map: bool) -> Tensor:
        """Anything that a projection reads or writes, as (leading, tokens, width)."""
        if is_map:
            return x.flatten(2).transpose(1, 2)
        if self.case.regroup is not None:
            return self.case.regroup(self.site.module, x)
        if x.dim() == 2:  # a class token alone
            return x[:, None]
        token_dims = min(self.case.token_dims, x.dim() - 2)
        return x.flatten(-1 - token_dims, -2).reshape(-1, x.shape[-1 - token_dims :][:-1].numel(), x.shape[-1])

    def read_by(self, slot: Slot) -> Tensor:
        """Tokens that this slot's projection read. BEiT uses its weight without calling the module."""
        assert self.call is not None
        x = self.inputs.get(slot.owner, self.call.args[0] if self.call.args else None)
        return self.as_tokens(x, is_map=isinstance(slot.owner, (nn.Conv2d, nn.Conv1d)))

    def concatenated_heads(self) -> Tensor:
        """What the model itself hands to O, or returns where there is no O: (leading, tokens, width)."""
        x = self.outputs[self.site.module] if self.head_reader is None else self.inputs[self.head_reader]
        owners = (nn.Conv2d, nn.ConvTranspose2d, type(None))
        return self.as_tokens(x, is_map=x.dim() == 4 and isinstance(self.head_reader, owners))


def columns(site: AttentionSite) -> Tensor:
    """Columns of the concatenated heads that belong to each head."""
    if site.o is not None:
        return site.o.rows
    return head_rows(site.num_heads, site.by_role("value").head_dim)

"""Small models for tests: plain modules in several styles, none of which wellcond knows by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NanoGPTAttention(nn.Module):
    """`c_attn` holds [Q|K|V]; causal; as in nanoGPT, with its buffer when flash is off."""

    def __init__(self, width: int = 12, num_heads: int = 3, *, flash: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd, self.flash = num_heads, width, flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class StrangeAttention(NanoGPTAttention):
    """The same parameters in an order that nobody expects: [V|K|Q]."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        v, k, q = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class HeadsFastest(NanoGPTAttention):
    """The same parameters with heads that change fastest along the rows, which no builder expresses."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, -1, self.n_head).permute(0, 3, 1, 2) for t in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class XTransformersAttention(nn.Module):
    """`to_q`, `to_k`, `to_v`, `heads`, as in x-transformers; grouped queries on request."""

    def __init__(self, width: int = 12, heads: int = 4, kv_heads: int | None = None, dim_head: int = 5) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim_head = heads, kv_heads or heads, dim_head
        self.to_q = nn.Linear(width, heads * dim_head, bias=False)
        self.to_k = nn.Linear(width, self.kv_heads * dim_head, bias=False)
        self.to_v = nn.Linear(width, self.kv_heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, -1, self.dim_head).transpose(1, 2) for t in (self.to_q(x), self.to_k(x), self.to_v(x)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.to_out(y.transpose(1, 2).reshape(B, T, -1))


class FusedWithMask(NanoGPTAttention):
    """A fused weight whose forward needs an argument that a probe cannot invent."""

    def forward(self, x: Tensor, table: dict[str, Tensor], position: int) -> Tensor:
        return super().forward(x) + table["shift"][position]


class Block(nn.Module):
    """Pre-norm residual block around any attention."""

    def __init__(self, attention: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def stack(make=NanoGPTAttention, depth: int = 2, width: int = 12, **kwargs) -> nn.Sequential:
    return nn.Sequential(*(Block(make(width, **kwargs), width) for _ in range(depth)), nn.Linear(width, 3))


@contextlib.contextmanager
def changes(model: nn.Module) -> Iterator[set[str]]:
    """Names of the weights and buffers that are others at the end of the context."""
    before, found = {name: value.clone() for name, value in model.state_dict().items()}, set()
    yield found
    now = model.state_dict()
    assert now.keys() == before.keys()
    found |= {name for name, value in now.items() if not torch.equal(value, before[name])}


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Every weight and buffer is the same at the end of the context."""
    with changes(model) as found:
        yield
    assert not found

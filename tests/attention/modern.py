"""Attention modules written as people write them today, each for what it does to a reading of its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


@torch.library.custom_op("wellcond_tests::attention", mutates_args=())
def opaque_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A kernel that shows neither products nor a softmax to anybody."""
    logits = (q @ k.mT / q.shape[-1] ** 0.5).numpy()
    weights = torch.from_numpy(logits).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Grouped(nn.Module):
    """Grouped queries with rotary positions; options change what a symmetry may move."""

    def __init__(self, *, kernel="sdpa", norm=None, gate=False, cap=False, rotary=True, causal=True, out_norm=False,
                 bias=True, strided=False, num_kv_heads=2):  # fmt: skip
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, num_kv_heads, 8
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias), nn.Linear(32, 32, bias)
        self.k_proj, self.v_proj = (nn.Linear(32, num_kv_heads * 8, bias) for _ in range(2))
        self.gate = nn.Linear(32, 32) if gate else None
        self.kernel, self.norm, self.cap, self.rotary, self.causal = kernel, norm, cap, rotary, causal
        self.out_norm, self.strided = out_norm, strided

    def forward(self, x):
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (part(x) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm == "all heads":
            q, k = (F.rms_norm(part, part.shape[-1:]) for part in (q, k))
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        if self.norm == "head":
            q, k = (F.rms_norm(part, part.shape[-1:]) for part in (q, k))
        if self.rotary:
            angles = torch.arange(x.shape[1]).to(x)[:, None] * 10.0 ** -torch.arange(self.head_dim // 2).to(x)
            q, k = (rotate(part, angles.cos(), angles.sin()) for part in (q, k))
        y = self.attend(q, self.repeated(k), self.repeated(v))
        if self.out_norm:
            y = F.rms_norm(y, y.shape[-1:])
        y = y.transpose(1, 2).flatten(2)
        return self.o_proj(y if self.gate is None else y * self.gate(x).sigmoid())

    def repeated(self, part):
        times = self.num_heads // self.num_kv_heads
        return part.repeat(1, times, 1, 1) if self.strided else part.repeat_interleave(times, 1)

    def attend(self, q, k, v):
        if self.kernel == "flex":
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu")
            return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j), block_mask=mask)
        if self.kernel == "opaque":
            return opaque_attention(q, k, v)
        if self.cap:
            return (5 * torch.tanh(q @ k.mT / 5 / self.head_dim**0.5)).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class NormInside(nn.Module):
    """Fused weights, its norm inside, heads taken apart by hand (vit-pytorch)."""

    def __init__(self, order="qkv", arrangement="blocks"):
        super().__init__()
        self.heads, self.order, self.arrangement = 3, order, arrangement
        self.norm, self.to_qkv = nn.LayerNorm(24), nn.Linear(24, 72, bias=False)
        self.to_out = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.1))

    def forward(self, x):
        fused = self.to_qkv(self.norm(x))
        if self.arrangement == "blocks":
            parts = [part.unflatten(-1, (3, 8)) for part in fused.chunk(3, -1)]
        else:
            parts = fused.unflatten(-1, (3, 3, 8)).unbind(-2)
        named = dict(zip(self.order, parts, strict=True))
        q, k, v = (named[letter].transpose(1, 2) for letter in "qkv")
        y = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.to_out(y.transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Heads that are mixed before and after the softmax (CaiT)."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_q, self.to_kv, self.to_out = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.before, self.after = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        p = torch.einsum("bhij,hg->bgij", q @ k.mT / 8**0.5, self.before).softmax(-1)
        return self.to_out((torch.einsum("bhij,hg->bgij", p, self.after) @ v).transpose(1, 2).flatten(2))


class NanochatAttention(nn.Module):
    """c_q, c_k, c_v, rotary tables from outside, norms without parameters (nanochat)."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = 4, 2, 8
        self.c_q, self.c_proj = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.c_k, self.c_v = (nn.Linear(32, 16, bias=False) for _ in range(2))

    def forward(self, x, cos_sin, kv_cache):
        assert kv_cache is None
        q, k, v = (part(x).unflatten(-1, (-1, 8)) for part in (self.c_q, self.c_k, self.c_v))
        q, k = (F.rms_norm(rotate(part, *cos_sin).to(x), (8,)) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )


class Nanochat(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([NanochatAttention(), NanochatAttention()])
        angles = torch.outer(torch.arange(64.0), 10.0 ** -torch.arange(4.0))
        self.register_buffer("cos", angles.cos()[None, :, None].bfloat16())
        self.register_buffer("sin", angles.sin()[None, :, None].bfloat16())

    def forward(self, x):
        for layer in self.h:
            x = x + layer(x, (self.cos[:, : x.shape[1]], self.sin[:, : x.shape[1]]), None)
        return x


class Stack(nn.Module):
    """Q, K, V and O in one parameter (modded-nanogpt), in one of the shapes that it has had."""

    def __init__(self, shape=(4, 32, 32), output="(out, in)"):
        super().__init__()
        self.num_heads, self.head_dim, self.output = 4, 8, output
        self.qkvo_w = nn.Parameter(torch.zeros(shape))  # W_O starts at zero there, so that the output is zero

    def forward(self, x):
        weights = self.qkvo_w.view(4, 32, 32)
        q, k, v = F.linear(x, weights[:3].flatten(0, 1)).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
        q, k = (F.rms_norm(part, (8,)) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12).transpose(1, 2).flatten(2)
        return F.linear(y, weights[3]) if self.output == "(out, in)" else y @ weights[3]


class PerHead(nn.Module):
    """One matrix (width, head width) per head, by einsum (TransformerLens)."""

    def __init__(self):
        super().__init__()
        self.n_heads = 4
        for letter in "QKV":
            setattr(self, f"W_{letter}", nn.Parameter(torch.randn(4, 32, 8)))
            setattr(self, f"b_{letter}", nn.Parameter(torch.randn(4, 8)))
        self.W_O, self.b_O = nn.Parameter(torch.randn(4, 8, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        q, k, v = (
            torch.einsum("bnc,hcd->bhnd", x, getattr(self, f"W_{letter}")) + getattr(self, f"b_{letter}")[:, None]
            for letter in "QKV"
        )
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        p = (q @ k.mT / 8**0.5).masked_fill(hidden, -1e5).softmax(-1)
        return torch.einsum("bhnd,hdc->bnc", p @ v, self.W_O) + self.b_O


class HeldElsewhere(nn.Module):
    """Projections in a part of their own without a head count, behind flex attention (torchtitan)."""

    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.head_dim, self.wqkv = 8, nn.Linear(32, 64, bias=False)

        def forward(self, x):
            fused = self.wqkv(x).unflatten(-1, (-1, 4, 8))
            return fused[..., :2, :].flatten(2, 3), fused[..., 2, :], fused[..., 3, :]

    def __init__(self):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 8
        self.qkv_linear, self.wo = self.Projections(), nn.Linear(32, 32, bias=False)

    def forward(self, x, attention_masks, positions=None):
        q, k, v = (part.transpose(1, 2) for part in self.qkv_linear(x))
        y = flex_attention(q, k, v, block_mask=attention_masks, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class TwoStreams(nn.Module):
    """Text and images attend to each other, each with projections of its own (Flux, SD3)."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(32, 32), nn.Dropout(0.0)])
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(24, 32) for _ in range(3))
        self.to_add_out = nn.Linear(32, 24)

    def forward(self, hidden_states, encoder_hidden_states=None):
        own = [part(hidden_states) for part in (self.to_q, self.to_k, self.to_v)]
        added = [part(encoder_hidden_states) for part in (self.add_q_proj, self.add_k_proj, self.add_v_proj)]
        both = (torch.cat(pair, 1).unflatten(-1, (4, 8)).transpose(1, 2) for pair in zip(own, added, strict=True))
        y = F.scaled_dot_product_attention(*both).transpose(1, 2).flatten(2)
        y, z = y.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return self.to_out[0](y), self.to_add_out(z)

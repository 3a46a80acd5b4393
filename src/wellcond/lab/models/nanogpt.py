"""GPT-2 as Karpathy's nanoGPT builds it: no biases by default, GELU without approximation, tied embeddings.

Names are those of nanoGPT; the output layer is the table of tokens itself, so that there is no `lm_head` beside it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from wellcond.lab.settings import Settings

STD = 0.02


class NanoGPTOptions(Settings):
    """Options of `nanogpt`; sizes by default are those of its smallest configuration, for a processor."""

    vocab_size: PositiveInt
    context: PositiveInt = 64
    """Tokens of the longest sequence."""
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    width: PositiveInt = 128
    bias: bool = False
    """Of linear maps and norms."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of embeddings, attention maps and the output of every part."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> NanoGPTOptions:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be shared by {self.heads} heads")
        return self


class CausalSelfAttention(nn.Module):
    """Softmax attention to what came before, from one projection [3, heads, head width]."""

    def __init__(self, options: NanoGPTOptions) -> None:
        super().__init__()
        self.n_head, self.dropout = options.heads, options.dropout
        self.c_attn = nn.Linear(options.width, 3 * options.width, bias=options.bias)
        self.c_proj = nn.Linear(options.width, options.width, bias=options.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        query, key, value = self.c_attn(tokens).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, options: NanoGPTOptions) -> None:
        super().__init__()
        self.c_fc = nn.Linear(options.width, 4 * options.width, bias=options.bias)
        self.c_proj = nn.Linear(4 * options.width, options.width, bias=options.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        return self.c_proj(gelu(self.c_fc(tokens)))


class Block(nn.Module):
    """Norm and attention, norm and MLP, each added to its input."""

    def __init__(self, options: NanoGPTOptions) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(options.width, bias=options.bias)
        self.attn = CausalSelfAttention(options)
        self.ln_2 = nn.LayerNorm(options.width, bias=options.bias)
        self.mlp = MLP(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        tokens = tokens + self.dropout(self.attn(self.ln_1(tokens)))
        return tokens + self.dropout(self.mlp(self.ln_2(tokens)))


class NanoGPT(nn.Module):
    """Logits of the next token."""

    def __init__(self, options: NanoGPTOptions) -> None:
        super().__init__()
        self.options = options
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(options.vocab_size, options.width),
                "wpe": nn.Embedding(options.context, options.width),
                "drop": nn.Dropout(options.dropout),
                "h": nn.ModuleList(Block(options) for _ in range(options.layers)),
                "ln_f": nn.LayerNorm(options.width, bias=options.bias),
            }
        )
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * options.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Logits (batch, tokens, vocabulary) of token ids (batch, tokens); there is no cache to use."""
        length = input_ids.shape[1]
        if length > self.options.context:
            raise ValueError(
                f"this model takes sequences of at most {self.options.context} tokens, found {length}; set "
                "task.context or model.arguments.context"
            )
        parts: Any = self.transformer
        positions = torch.arange(length, device=input_ids.device)
        tokens = parts["drop"](parts["wte"](input_ids) + parts["wpe"](positions))
        for block in parts["h"]:
            tokens = block(tokens)
        return linear(parts["ln_f"](tokens), parts["wte"].weight)

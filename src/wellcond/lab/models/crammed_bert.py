"""Crammed BERT (Geiping and Goldstein, ICML 2023) as released, for pre-training and for classification.

A pre-norm encoder without biases in its linear maps, with gated feed-forward parts, scaled sinusoidal positions and a
decoder tied to the embeddings. Parameters bear the names of the release.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from wellcond.attention.find import register_adapter
from wellcond.attention.layout import build_site
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.lab.settings import Settings

Dropout = Annotated[float, Field(ge=0, lt=1)]
Even = Annotated[int, Field(gt=0, multiple_of=2)]
POOLER_WIDTH, NORM_EPS = 1024, 1e-12  # of the release


class CrammedBertOptions(Settings):
    """Options of `crammed_bert`; defaults are those of the release."""

    vocab_size: PositiveInt
    pad_token_id: NonNegativeInt | None = 0
    """Its embedding is zero; null where no token is padding."""
    length: PositiveInt = 128
    """Tokens of the longest sequence."""
    layers: PositiveInt = 16
    width: Even = 768
    heads: PositiveInt = 12
    feed_forward: Even = 3072
    """Width of the feed-forward part before its gate, which halves it."""
    dropout: Dropout = 0.0
    """Of embeddings, attention maps and the output of every part; the release pre-trains without."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> CrammedBertOptions:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be shared by {self.heads} heads")
        return self


class CrammedBertClassifierOptions(CrammedBertOptions):
    """Options of `crammed_bert_classifier`."""

    num_labels: PositiveInt
    """1 for a regression."""
    dropout: Dropout = 0.1
    """As in pre-training, and of the pooled token."""


class Embedding(nn.Module):
    """Tokens, and sines and cosines of the position times one learned number, normalised."""

    def __init__(self, options: CrammedBertOptions) -> None:
        super().__init__()
        width = options.width
        self.word_embedding = nn.Embedding(options.vocab_size, width, padding_idx=options.pad_token_id)
        self.pos_embedding = nn.ParameterDict({"scale_factor": nn.Parameter(torch.tensor([width**-0.5]))})
        frequencies = 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / -width)
        angles = torch.arange(options.length)[:, None] * frequencies
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, width)."""
        positions = self.pos_embedding["scale_factor"] * self.get_buffer("table")[: input_ids.shape[1]]
        return self.dropout(self.norm(self.word_embedding(input_ids) + positions))


class CrammedSelfAttention(nn.Module):
    """Softmax attention from one projection that holds query, key and value of each head one after the other."""

    def __init__(self, options: CrammedBertOptions) -> None:
        super().__init__()
        self.num_heads, self.dropout = options.heads, options.dropout
        self.query_key_value = nn.Linear(options.width, 3 * options.width, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same; `mask` (batch, 1, 1, tokens) is true where a token may be seen."""
        heads = self.query_key_value(tokens).unflatten(-1, (self.num_heads, 3, -1))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, mask, dropout).transpose(1, 2).flatten(2)


@register_adapter(CrammedSelfAttention)
def crammed_self_attention(place: ModuleContext) -> AttentionSite:
    """Rows [heads, 3, head width]."""
    module = place.module
    assert isinstance(module, CrammedSelfAttention)
    return build_site(
        place,
        {"qkv": module.query_key_value},
        num_heads=module.num_heads,
        arrangement="groups",
        output=place.parent["dense"] if isinstance(place.parent, nn.ModuleDict) else None,
        scale=(module.query_key_value.in_features // module.num_heads) ** -0.5,
    )


class Layer(nn.Module):
    """Norm and attention, norm and gated feed-forward part, each added to its input."""

    def __init__(self, options: CrammedBertOptions) -> None:
        super().__init__()
        width, inner = options.width, options.feed_forward
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        mixing, dense = CrammedSelfAttention(options), nn.Linear(width, width, bias=False)
        self.attn = nn.ModuleDict({"self_attention": mixing, "dense": dense})
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        dense_in, dense_out = nn.Linear(width, inner, bias=False), nn.Linear(inner // 2, width, bias=False)
        self.ffn = nn.ModuleDict({"dense_in": dense_in, "dense_out": dense_out})
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same."""
        mixed = self.attn["self_attention"](self.norm1(tokens), mask)
        tokens = tokens + self.dropout(self.attn["dense"](mixed))
        values, gate = self.ffn["dense_in"](self.norm2(tokens)).chunk(2, dim=-1)
        return tokens + self.dropout(self.ffn["dense_out"](values * gelu(gate)))


class CrammedEncoder(nn.Module):
    """The encoder of both models."""

    def __init__(self, options: CrammedBertOptions) -> None:
        super().__init__()
        self.length = options.length
        self.embedding = Embedding(options)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))
        self.final_norm = nn.LayerNorm(options.width, eps=NORM_EPS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) of token ids (batch, tokens) and a mask that is 1 for tokens and 0 for padding."""
        if input_ids.shape[1] > self.length:
            raise ValueError(
                f"this model takes sequences of at most {self.length} tokens, found {input_ids.shape[1]}; set "
                "task.length or model.arguments.length"
            )
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        tokens = self.embedding(input_ids)
        for layer in self.layers:
            tokens = layer(tokens, mask)
        return self.final_norm(tokens)


class CrammedBertForMaskedLM(nn.Module):
    """Logits of the tokens at given positions."""

    def __init__(self, options: CrammedBertOptions) -> None:
        super().__init__()
        self.options = options
        self.encoder = CrammedEncoder(options)
        self.apply(_initialise)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits (batch, tokens, vocabulary), or (positions, vocabulary) of flat positions, batch * tokens + token."""
        tokens = self.encoder(input_ids, attention_mask)
        if positions is not None:
            tokens = tokens.flatten(0, 1)[positions]
        return linear(tokens, self.encoder.embedding.word_embedding.weight)


class CrammedBertClassifier(nn.Module):
    """Logits of sequences, from their first token; weights of pre-training have the same names under `encoder`."""

    def __init__(self, options: CrammedBertClassifierOptions) -> None:
        super().__init__()
        self.options = options
        self.encoder = CrammedEncoder(options)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(options.width, POOLER_WIDTH)})
        self.dropout = nn.Dropout(options.dropout)
        self.head = nn.Linear(POOLER_WIDTH, options.num_labels)
        self.apply(_initialise)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(batch, labels)."""
        first = self.encoder(input_ids, attention_mask)[:, 0]
        return self.head(self.dropout(torch.tanh(self.pooler["dense"](first))))


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        module.weight[module.padding_idx].zero_()

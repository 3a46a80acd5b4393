"""The model of the Long Range Arena as the Nystromformer's release has it: a pre-norm encoder, mean pooling, a head."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from wellcond.errors import MissingExtraError
from wellcond.lab.models.registry import ArchitectureOptions, register_architecture


class LongRangeOptions(ArchitectureOptions):
    """Options of `long_range`; defaults are those of the release where it has any."""

    vocab_size: PositiveInt
    num_labels: PositiveInt
    length: PositiveInt
    """Tokens of a sequence, with its padding; the model takes no other length."""
    pad_token_id: Literal[0] = 0
    width: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 2
    feed_forward: PositiveInt = 128
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Acts on softmax attention only, as in the release."""
    attention: Literal["nystrom", "softmax"] = "nystrom"
    landmarks: PositiveInt = 64
    convolution: PositiveInt | None = 35
    """Kernel of the depth-wise convolution of the values, an odd number; null for none."""
    masking: Literal["release", "hugging_face"] = "release"
    """Whether masked tokens also leave the landmarks and the convolution alone."""
    inverse_scale: Literal["batch", "matrix"] = "batch"
    """What the first guess of the pseudo-inverse is scaled by: the largest column sum of the whole batch (the release;
    a prediction then depends a little on its batch), or of each matrix."""
    pairs: bool = False
    """Two sequences through the same encoder, and a head on both."""
    word_deviation: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the word embeddings at the start. At the release's 0.02 they are no larger than the
    positions, which say nothing of a text: short training of pairs then does not find what two texts share."""

    @model_validator(mode="after")
    def _fits_together(self) -> LongRangeOptions:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be shared by {self.heads} heads")
        if self.attention == "nystrom" and (self.length % self.landmarks or self.landmarks >= self.length):
            raise ValueError(
                f"landmarks are means of equal segments: expected landmarks that divide the length {self.length} and "
                f"are fewer, found {self.landmarks}. Change landmarks, or pad to another length (task.pad_to)"
            )
        if self.convolution is not None and self.convolution % 2 == 0:
            raise ValueError(f"expected an odd convolution, whose window has a middle, found {self.convolution}")
        return self


class LongRangeBlock(nn.Module):
    """Norm, attention, norm, feed-forward, each added to its input."""

    def __init__(self, attention: nn.Module, options: LongRangeOptions) -> None:
        """Around an attention."""
        super().__init__()
        width, inner = options.width, options.feed_forward
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.dropout = nn.Dropout(options.dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner),
            nn.GELU(),
            nn.Dropout(options.dropout),
            nn.Linear(inner, width),
            nn.Dropout(options.dropout),
        )

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same."""
        tokens = tokens + self.dropout(self.attention(self.norm1(tokens), mask))
        return tokens + self.mlp(self.norm2(tokens))


class LongRangeClassifier(nn.Module):
    """Logits of sequences, or of pairs of sequences."""

    def __init__(self, options: LongRangeOptions) -> None:
        """Freshly initialised: embeddings normal, positions with deviation 0.02, the rest as torch does."""
        super().__init__()
        self.options = options
        width = options.width
        self.word_embeddings = nn.Embedding(options.vocab_size, width)
        self.position_embeddings = nn.Embedding(options.length, width)
        nn.init.normal_(self.word_embeddings.weight, std=options.word_deviation)
        nn.init.normal_(self.position_embeddings.weight, std=0.02)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(LongRangeBlock(_attention(options), options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(
            nn.Linear(4 * width if options.pairs else width, options.feed_forward),
            nn.ReLU(),
            nn.Linear(options.feed_forward, options.num_labels),
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, labels) of token ids (batch, length) and masks that are 1 for tokens and 0 for padding."""
        pooled = self.encode(input_ids, attention_mask)
        if not self.options.pairs:
            return self.head(pooled)
        if pair_input_ids is None:
            raise ValueError("a model of pairs needs pair_input_ids, the tokens of the second sequence")
        other = self.encode(pair_input_ids, pair_attention_mask)
        return self.head(torch.cat([pooled, other, pooled * other, pooled - other], dim=-1))

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Mean (batch, width) over all positions; those of padding count as zero, as in the release."""
        length = input_ids.shape[1]
        if length != self.options.length:
            raise ValueError(
                f"this model takes sequences of {self.options.length} tokens, found {length}; set task.length or "
                "task.pad_to, or model.arguments.length"
            )
        tokens = self.dropout(self.word_embeddings(input_ids) + self.position_embeddings.weight)
        mask = None if attention_mask is None else attention_mask.to(tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens, self._mask_of_attention(mask))
        tokens = self.norm(tokens)
        return (tokens if mask is None else tokens * mask.unsqueeze(-1)).mean(dim=1)

    def _mask_of_attention(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or self.options.masking == "release":
            return mask
        from wellcond.lab.models.nystrom import MASKED

        return (MASKED * (1 - mask))[:, None, None, :]


def _attention(options: LongRangeOptions) -> nn.Module:
    try:
        from transformers import NystromformerConfig
        from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
    except ImportError as error:
        raise MissingExtraError("transformers", "text") from error
    from wellcond.lab.models.nystrom import MaskedNystromAttention, NystromAttention

    full = options.attention == "softmax"
    config = NystromformerConfig(
        hidden_size=options.width,
        num_attention_heads=options.heads,
        num_landmarks=options.length if full else options.landmarks,
        segment_means_seq_len=options.length,
        conv_kernel_size=options.convolution or 1,
        attention_probs_dropout_prob=options.attention_dropout,
    )
    kind = MaskedNystromAttention if options.masking == "release" else NystromformerSelfAttention
    convolve = options.convolution is not None and not full
    return NystromAttention(config, kind, convolve=convolve, exact_scale=options.inverse_scale == "matrix")


@register_architecture("long_range", LongRangeOptions)
def long_range(options: LongRangeOptions) -> LongRangeClassifier:
    """Classifier of long sequences by Nystrom or full attention."""
    return LongRangeClassifier(options)

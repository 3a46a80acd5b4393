"""The Long Range Arena model as the Nystromformer's release has it: a pre-norm encoder, mean pooling and a head."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import softmax
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import wellcond.lab.nystrom  # noqa: F401  (its heads have an operator of their own)
from wellcond.attention.families import table_of
from wellcond.attention.find import register_adapter
from wellcond.lab.settings import Settings

Dropout = Annotated[float, Field(ge=0, lt=1)]

MASKED = -1e9  # finite: a sequence that is masked altogether gets equal probabilities, not NaN
LONGEST_BANDED = 512
"""Up to which a banded product is faster on a processor than a depth-wise convolution: with its gradient 28 ms against
69 ms for 32 x 2 heads of 256 x 32 (one thread), 633 against 359 ms at 1,024 tokens."""


class LongRangeOptions(Settings):
    """Options of `long_range`; defaults are those of the release where it has any."""

    vocab_size: PositiveInt
    num_labels: PositiveInt
    length: PositiveInt
    """Tokens of a sequence, with its padding; the model takes no other length."""
    width: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 2
    feed_forward: PositiveInt = 128
    dropout: Dropout = 0.1
    landmarks: PositiveInt = 64
    convolution: PositiveInt = 35
    """Kernel of the depth-wise convolution of the values, an odd number."""
    pairs: bool = False
    """Two sequences through the same encoder, and a head on both."""
    word_deviation: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the word embeddings at the start. At the release's 0.02 they are no larger than the
    positions, which say nothing of a text: short training of pairs then does not find what two texts share."""

    @model_validator(mode="after")
    def _fits_together(self) -> LongRangeOptions:
        if self.length % self.landmarks or self.landmarks >= self.length:
            raise ValueError(
                f"landmarks are means of equal segments: expected landmarks that divide the length {self.length} and "
                f"are fewer, found {self.landmarks}. Change landmarks, or pad to another length (task.pad_to)"
            )
        if self.convolution % 2 == 0:
            raise ValueError(f"expected an odd convolution, whose window has a middle, found {self.convolution}")
        return self


class MaskedNystromAttention(NystromformerSelfAttention):
    """Masked tokens take part in nothing: neither landmarks, nor keys, nor the convolution see them.

    Hugging Face's own mask acts on the keys of the third kernel only, so that masked tokens still move the landmarks
    and leak through the convolution. Without masked tokens both are the same function.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, ...]:
        """(batch, tokens, width) to a tuple of the same, as Hugging Face has it; the mask is 0 for padding."""
        # As in the release, attention is computed in float32 under automatic mixed precision.
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = hidden_states.to(self.query.weight.dtype)
            query, key, value = (
                linear(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
                for linear in (self.query, self.key, self.value)
            )
            # A quarter root on each side: landmarks are means of scaled queries and keys.
            root = self.attention_head_size**-0.25
            query, key, hidden, convolved = query * root, key * root, None, value
            if attention_mask is not None:
                mask = attention_mask.to(hidden_states.dtype)
                rows = mask[:, None, :, None]
                query, key, convolved = query * rows, key * rows, value * rows
                hidden = (MASKED * (1 - mask))[:, None, None, :]
            context = self._approximate(query, key, value, hidden) + self._convolve(convolved)
            return (context.transpose(1, 2).flatten(2),)

    def _approximate(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        # P ~ softmax(Q L_K^T) softmax(L_Q L_K^T)^+ softmax(L_Q K^T) with L the means over segments of tokens.
        segments = (self.num_landmarks, self.seq_len // self.num_landmarks)
        q_landmarks, k_landmarks = (heads.unflatten(2, segments).mean(dim=3) for heads in (query, key))
        scores = q_landmarks @ key.mT
        if hidden is not None:
            scores = scores + hidden
        tokens_to_landmarks = softmax(query @ k_landmarks.mT, dim=-1)
        between_landmarks = softmax(q_landmarks @ k_landmarks.mT, dim=-1)
        return tokens_to_landmarks @ self.iterative_inv(between_landmarks) @ (softmax(scores, dim=-1) @ value)

    def _convolve(self, value: Tensor) -> Tensor:
        if value.device.type != "cpu" or self.seq_len > LONGEST_BANDED:
            return self.conv(value)
        # The same sums as a product with the banded matrix T[i, j] = kernel[j - i + half].
        kernels = self.conv.weight.flatten(1)  # (heads, kernel)
        position = torch.arange(self.seq_len)
        offset = position - position[:, None] + self.conv_kernel_size // 2
        inside = (offset >= 0) & (offset < self.conv_kernel_size)
        return torch.where(inside, kernels[:, offset.clamp(0, self.conv_kernel_size - 1)], 0.0) @ value


_READ_AS = f"{NystromformerSelfAttention.__module__}.{NystromformerSelfAttention.__qualname__}"
register_adapter(MaskedNystromAttention)(table_of("transformers")[_READ_AS])


class LongRangeBlock(nn.Module):
    """Norm, attention, norm, feed-forward, each added to its input."""

    def __init__(self, options: LongRangeOptions) -> None:
        super().__init__()
        width, inner = options.width, options.feed_forward
        config = NystromformerConfig(
            hidden_size=width,
            num_attention_heads=options.heads,
            num_landmarks=options.landmarks,
            segment_means_seq_len=options.length,
            conv_kernel_size=options.convolution,
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Under the names that Hugging Face gives them.
        attention, output = MaskedNystromAttention(config), nn.ModuleDict({"dense": nn.Linear(width, width)})
        self.attention = nn.ModuleDict({"self": attention, "output": output})
        self.dropout = nn.Dropout(options.dropout)
        first, second = nn.Linear(width, inner), nn.Linear(inner, width)
        self.mlp = nn.Sequential(first, nn.GELU(), nn.Dropout(options.dropout), second, nn.Dropout(options.dropout))

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same."""
        (mixed,) = self.attention["self"](self.norm1(tokens), mask)
        tokens = tokens + self.dropout(self.attention.get_submodule("output.dense")(mixed))
        return tokens + self.mlp(self.norm2(tokens))


class LongRangeClassifier(nn.Module):
    """Logits of sequences, or of pairs of sequences."""

    def __init__(self, options: LongRangeOptions) -> None:
        super().__init__()
        self.options, width = options, options.width
        self.word_embeddings = nn.Embedding(options.vocab_size, width)
        self.position_embeddings = nn.Embedding(options.length, width)
        nn.init.normal_(self.word_embeddings.weight, std=options.word_deviation)
        nn.init.normal_(self.position_embeddings.weight, std=0.02)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(LongRangeBlock(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width)
        first = nn.Linear(4 * width if options.pairs else width, options.feed_forward)
        self.head = nn.Sequential(first, nn.ReLU(), nn.Linear(options.feed_forward, options.num_labels))

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
        if input_ids.shape[1] != self.options.length:
            raise ValueError(
                f"this model takes sequences of {self.options.length} tokens, found {input_ids.shape[1]}; set "
                "task.length or task.pad_to, or model.arguments.length"
            )
        tokens = self.dropout(self.word_embeddings(input_ids) + self.position_embeddings.weight)
        mask = None if attention_mask is None else attention_mask.to(tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens, mask)
        tokens = self.norm(tokens)
        return (tokens if mask is None else tokens * mask.unsqueeze(-1)).mean(dim=1)

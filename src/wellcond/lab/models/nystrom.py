"""Nystrom attention of Hugging Face with the masks of the Long Range Arena release, or full softmax attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from wellcond.attention.adapters.hf_bert import nystromformer
from wellcond.attention.find import register_adapter

MASKED = -1e9  # finite: a sequence that is masked altogether gets equal probabilities, not NaN

# On a processor a depth-wise convolution is slow: with its gradient 69 ms against 28 ms for the banded product of
# 32 x 2 heads of 256 x 32 (one thread), 359 against 633 ms at 1,024 tokens.
LONGEST_BANDED = 512


class MaskedNystromAttention(NystromformerSelfAttention):
    """Masked tokens take part in nothing: neither landmarks, nor keys, nor the convolution see them.

    Hugging Face's own mask acts on the keys of the third kernel only, so that masked tokens still move the landmarks
    and leak through the convolution. Without masked tokens both are the same function.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, ...]:
        """Attend.

        Args:
            hidden_states: (batch, tokens, width)
            attention_mask: (batch, tokens), 1 for tokens and 0 for padding; None: all are tokens.
            output_attentions: not supported.

        Returns: (batch, tokens, width) of all heads side by side, in a tuple as Hugging Face does.
        """
        # As in the release, attention is computed in float32 under automatic mixed precision.
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = hidden_states.to(self.query.weight.dtype)
            mask = None if attention_mask is None else attention_mask.to(hidden_states.dtype)
            rows = None if mask is None else mask[:, None, :, None]
            # A quarter root on each side: landmarks are means of scaled queries and keys.
            root = self.attention_head_size**-0.25
            query, key, value = (self._heads(linear(hidden_states)) for linear in (self.query, self.key, self.value))
            query, key = query * root, key * root
            if rows is not None:
                query, key = query * rows, key * rows
            hidden = None if mask is None else (MASKED * (1 - mask))[:, None, None, :]
            if self.num_landmarks == self.seq_len:
                # The scale is in query and key already.
                dropout = self.dropout.p if self.training else 0.0
                context = scaled_dot_product_attention(query, key, value, hidden, dropout, scale=1.0)
            else:
                context = self._approximate(query, key, value, hidden)
            if self.conv_kernel_size is not None:
                context = context + self._convolve(value if rows is None else value * rows)
            return (context.transpose(1, 2).flatten(2),)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def _approximate(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        # P ~ softmax(Q L_K^T) softmax(L_Q L_K^T)^+ softmax(L_Q K^T) with L the means over segments of tokens.
        q_landmarks, k_landmarks = self._landmarks(query), self._landmarks(key)
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
        banded = torch.where(inside, kernels[:, offset.clamp(0, self.conv_kernel_size - 1)], 0.0)
        return banded @ value

    def _landmarks(self, heads: Tensor) -> Tensor:
        return heads.unflatten(2, (self.num_landmarks, self.seq_len // self.num_landmarks)).mean(dim=3)


register_adapter(MaskedNystromAttention)(nystromformer)


class NystromAttention(nn.Module):
    """Attention and its output projection, under the names Hugging Face gives them."""

    def __init__(
        self, config: Any, attention: type[NystromformerSelfAttention], *, convolve: bool, exact_scale: bool
    ) -> None:
        """A site of `config.num_attention_heads` heads.

        Two options of Hugging Face's class cannot be given to it: its configuration demands a convolution, and its
        constructor subscripts the configuration where it reads how to scale the first guess of the pseudo-inverse.
        """
        super().__init__()
        self.self = attention(config)
        self.self.init_option = "exact" if exact_scale else "original"
        if not convolve:
            self.self.conv_kernel_size = None
            del self.self.conv
        self.output = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.hidden_size)})

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same."""
        return self.output["dense"](self.self(tokens, mask)[0])

"""Samples of a stream of tokens: blocks to train on, and windows that score every token once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wellcond.lab.data.token_cache import TokenStream
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import Batch, SampleKey

IGNORED = -100
"""Target that is not scored, as in `cross_entropy`."""


class TokenBlocks:
    """Block k is the tokens from k * length on; with `overlap` 1 it also has the first token of the next block."""

    in_memory = True

    def __init__(self, stream: TokenStream, length: int, what: str, *, overlap: int = 0) -> None:
        """A rest shorter than a block is left out.

        Raises: RecipeError if there is not one block.
        """
        self.stream, self.length, self.overlap = stream, length, overlap
        self.count = max(0, len(stream) - overlap) // length
        if self.count == 0:
            raise RecipeError(
                f"{what}: expected at least {length + overlap} tokens, those of one block, found {len(stream)}"
            )

    def __len__(self) -> int:
        """Number of blocks."""
        return self.count

    def tokens(self, keys: Sequence[SampleKey]) -> Tensor:
        """Tokens of blocks, int64 of shape (blocks, length + overlap)."""
        places = np.array([index for index, _ in keys])[:, None] * self.length + np.arange(self.length + self.overlap)
        return torch.from_numpy(self.stream.tokens[places].astype(np.int64))

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens; with an overlap, those that are seen and those to predict from them."""
        tokens = self.tokens(keys)
        if not self.overlap:
            return {"input_ids": tokens}
        return {"input_ids": tokens[:, : -self.overlap], "targets": tokens[:, self.overlap :]}


class ScoredWindows:
    """Windows over a stream in which every token but the first is predicted exactly once.

    Window w sees the `context` tokens from w * stride on and predicts the one behind each. The first window scores all
    of them, so tokens 1 to context; window w >= 1 scores those of its last `stride` places, tokens
    context + 1 + (w - 1) stride to context + w stride, each from at least context - stride + 1 tokens before it. The
    last window ends with the stream.
    """

    in_memory = True

    def __init__(self, stream: TokenStream, context: int, stride: int, what: str) -> None:
        """Raises: RecipeError if there is nothing to predict."""
        if len(stream) < 2:
            raise RecipeError(f"{what}: expected at least 2 tokens, found {len(stream)}")
        self.stream, self.context, self.stride = stream, context, stride
        self.num_predicted = len(stream) - 1

    def __len__(self) -> int:
        """Number of windows."""
        return 1 + max(0, -(-(self.num_predicted - self.context) // self.stride))

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens, targets, and the share of each window in the words and bytes of the text.

        Shares are by the number of tokens that a window scores, so that their sum over all windows is the text's.
        """
        starts = torch.tensor([index for index, _ in keys]) * self.stride
        width = min(self.context, self.num_predicted)
        places = starts[:, None] + torch.arange(width)
        # Behind the end of the stream any token will do: it is not scored, and no token before it sees it.
        inside = places < self.num_predicted
        places = places.clamp(max=self.num_predicted - 1)
        targets = self._tokens(places + 1)
        scored = inside & ((starts[:, None] == 0) | (torch.arange(width) >= self.context - self.stride))
        share = scored.sum(1).double() / self.num_predicted
        counts = self.stream.counts
        return {
            "input_ids": self._tokens(places),
            "targets": targets.masked_fill(~scored, IGNORED),
            "words": share * counts.words,
            "bytes": share * counts.bytes,
        }

    def _tokens(self, places: Tensor) -> Tensor:
        return torch.from_numpy(self.stream.tokens[places.numpy()].astype(np.int64))

"""One attention as it was called: tokens, masks and probabilities, from which its heads are rebuilt in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellcond.attention.site import AttentionSite, Slot
from wellcond.errors import WeightError, WellcondError
from wellcond.jacobian.capture_watch import SiteCall
from wellcond.jacobian.head import SoftmaxHead
from wellcond.linalg.float64 import to_float64


class NotPlainError(WellcondError, ValueError):
    """An attention whose heads are not softmax(s Q K^T + bias) V of the tokens captured."""


@dataclass(frozen=True, eq=False)
class CapturedAttention:
    """One attention of one forward pass.

    L counts whatever shares the weights: samples of the batch, windows, grids. Where the attention is not plain, tokens
    and probabilities are what was seen, as far as it has this form, and nothing is checked. Weights are not copied:
    they are read from the model when a head is asked for, and an error says if they changed since the capture.
    """

    site: AttentionSite
    x: Tensor | None
    """Tokens (L, N, D) that the query projection read."""
    memory: Tensor | None
    """Tokens (L, M, E) that the key and value projections read; None where they are x."""
    logit_bias: Tensor | None
    """Added to the logits, (L or 1, H, N, M), float64; -inf where masked; None where nothing is added."""
    probabilities: Tensor | None
    """Output of the softmax (L, H, N, M), in the dtype in which the model computed it."""
    dtype: torch.dtype
    """Of the model's weights."""
    why_not_plain: str
    """Empty if every head is softmax(s Q K^T + bias) V, as the recorded products show."""
    note: str = ""
    scale: float | None = None
    """Logit scale; of a plain attention that was recognised by a trial run, to more digits than the site has."""
    call: SiteCall | None = field(default=None, repr=False)
    """What the module was called with; None if it was not called."""
    fingerprint: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether `head` gives the exact mathematics."""
        return not self.why_not_plain

    @property
    def num_samples(self) -> int:
        """L."""
        return 0 if self.x is None else len(self.x)

    @property
    def tokens_of_memory(self) -> Tensor | None:
        """Tokens of keys and values, x for self-attention."""
        return self.x if self.memory is None else self.memory

    def head(self, kv_head: int, sample: int = 0) -> SoftmaxHead:
        """The query heads of one key/value head on one sample or window.

        A query that may attend to nothing (padding under a causal mask) is left out: rows are then fewer than N.

        Raises:
            NotPlainError: the attention is not plain; use `wellcond.jacobian.generic.GenericHead`.
            IndexError: no such head or sample.
            ValueError: no query may attend to anything.
            WeightError: NaN or infinite numbers; weights that changed since the capture.
        """
        return self.stacked_head(kv_head, [sample])

    def stacked_head(self, kv_head: int, samples: Sequence[int] | None = None) -> SoftmaxHead:
        """Several samples or windows (all by default) in one head, which share the weights (theory.md, section 3).

        Tokens follow each other, and each sample sees its own keys only. Rows are ordered (query head, sample, token).

        Raises: as `head`.
        """
        self._check(kv_head, samples)
        chosen = list(range(self.num_samples)) if samples is None else list(samples)
        assert self.x is not None and self.scale is not None
        group = self.query_heads(kv_head)
        x, y = to_float64(self.x[chosen]).flatten(0, 1), None
        if self.memory is not None:
            y = to_float64(self.memory[chosen]).flatten(0, 1)
        bias = self._bias(group, chosen)
        if bias is not None:
            alive = ~(bias == -torch.inf).all(-1).all(0)
            if not bool(alive.any()):
                raise WeightError(f"{self.site.name}: no token of samples {chosen[:8]} may attend to anything")
            if not bool(alive.all()):
                x, y, bias = x[alive], (x if y is None else y), bias[:, alive]
        query, key, value = (self.site.by_role(role) for role in ("query", "key", "value"))
        b_q, b_k, b_v = (slot.read_bias() for slot in (query, key, value))
        return SoftmaxHead(
            x,
            to_float64(query.read())[group],
            to_float64(key.read())[kv_head],
            to_float64(value.read())[kv_head],
            self.scale,
            y=y,
            b_q=None if b_q is None else to_float64(b_q)[group],
            b_k=None if b_k is None else to_float64(b_k)[kv_head],
            b_v=None if b_v is None else to_float64(b_v)[kv_head],
            logit_bias=bias,
        )

    def query_heads(self, kv_head: int) -> slice:
        """Query heads of one key/value head."""
        group = self.site.num_heads // self.site.num_kv_heads
        return slice(kv_head * group, (kv_head + 1) * group)

    def _bias(self, group: slice, samples: list[int]) -> Tensor | None:
        """(g, S N, S M): each sample's own bias on the diagonal, -inf elsewhere."""
        if self.logit_bias is None and len(samples) == 1:
            return None
        assert self.probabilities is not None
        shape = self.probabilities[0, group].shape
        if self.logit_bias is None:
            own = [torch.zeros(shape, dtype=torch.float64)] * len(samples)
        else:
            own = [self.logit_bias[0 if len(self.logit_bias) == 1 else sample, group] for sample in samples]
        if len(samples) == 1:
            return own[0]
        count, (g, n, m) = len(samples), shape
        bias = own[0].new_full((g, count, n, count, m), -torch.inf)
        for at, block in enumerate(own):
            bias[:, at, :, at] = block
        return bias.view(g, count * n, count * m)

    def _check(self, kv_head: int, samples: Sequence[int] | None) -> None:
        if not self.is_plain:
            raise NotPlainError(
                f"{self.site.name or 'the attention'} is not plain softmax attention: {self.why_not_plain}. "
                "Use wellcond.jacobian.generic.GenericHead, which runs the module itself"
            )
        if not 0 <= kv_head < self.site.num_kv_heads:
            count = self.site.num_kv_heads
            raise IndexError(f"{self.site.name}: expected a key/value head below {count}, got {kv_head}")
        for sample in samples or ():
            if not 0 <= sample < self.num_samples:
                raise IndexError(f"{self.site.name}: expected a sample below {self.num_samples}, got {sample}")
        self.check_weights()

    def check_weights(self) -> None:
        """Raise if the weights are not those of the capture."""
        if self.fingerprint != fingerprint(self.site):
            raise WeightError(f"{self.site.name}: the weights changed since the capture; call capture_attention again")


def fingerprint(site: AttentionSite) -> tuple[Any, ...]:
    """What changes when a weight is written, replaced or conditioned."""

    def mark(slot: Slot) -> tuple[Any, ...]:
        stored = slot.parameter
        version = None if stored.is_inference() else stored._version
        return stored.data_ptr(), version, stored.dtype, type(slot.owner).__name__

    return tuple(mark(slot) for slot in (site.q, site.k, site.v))

"""Run a model once and take out, for every attention, what its Jacobian needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.find import find_attention
from wellcond.attention.record import Field, SiteRecord, record
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import NotPlainError, UnsupportedLayoutError, WeightError
from wellcond.jacobian.capture.align import align, candidates, head_views, is_map, logit_bias
from wellcond.jacobian.head import Head
from wellcond.linalg.spectrum import to_float64

NEEDED: tuple[Field, ...] = ("arguments", "tokens", "products", "logits", "probabilities", "heads", "output")


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
    call: SiteRecord | None = field(default=None, repr=False)
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

    def head(self, kv_head: int, sample: int = 0) -> Head:
        """The query heads of one key/value head on one sample or window.

        A query that may attend to nothing (padding under a causal mask) is left out: rows are then fewer than N.

        Raises:
            NotPlainError: the attention is not plain; use `wellcond.jacobian.module.ModuleJacobian`.
            IndexError: no such head or sample.
            ValueError: no query may attend to anything.
            WeightError: NaN or infinite numbers; weights that changed since the capture.
        """
        return self.stacked_head(kv_head, [sample])

    def stacked_head(
        self, kv_head: int, samples: Sequence[int] | None = None, *, query_head: int | None = None
    ) -> Head:
        """Several samples or windows (all by default) in one head, which share the weights (theory.md, section 3.5).

        Tokens follow each other, and each sample sees its own keys only. Rows are ordered (query head, sample, token).
        `query_head` takes one of the query heads by itself.

        Raises: as `head`.
        """
        return self.stacked_heads([(kv_head, query_head)], samples)[0]

    def stacked_heads(
        self, wanted: Sequence[tuple[int, int | None]], samples: Sequence[int] | None = None
    ) -> list[Head]:
        """`stacked_head` of several (key/value head, query head); tokens are shared and weights are read once."""
        for kv_head, _ in wanted:
            self._check(kv_head, samples)
        self.check_weights()
        chosen = list(range(self.num_samples)) if samples is None else list(samples)
        assert self.x is not None and self.scale is not None
        x = to_float64(self.x[chosen]).flatten(0, 1)
        y = None if self.memory is None else to_float64(self.memory[chosen]).flatten(0, 1)
        slots = [self.site.by_role(role) for role in ("query", "key", "value")]
        weights, biases = [slot.read() for slot in slots], [slot.read_bias() for slot in slots]
        heads = []
        for kv_head, query_head in wanted:
            group = self.query_heads(kv_head, query_head)
            rows, keys, bias = x, y, self._bias(group, chosen)
            if bias is not None:
                alive = ~(bias == -torch.inf).all(-1).all(0)
                if not bool(alive.any()):
                    raise WeightError(f"{self.site.name}: no token of samples {chosen[:8]} may attend to anything")
                if not bool(alive.all()):
                    rows, keys, bias = x[alive], (x if y is None else y), bias[:, alive]
            at: tuple[slice | int, ...] = (group, kv_head, kv_head)
            w_q, w_k, w_v = (to_float64(weight[index]) for weight, index in zip(weights, at, strict=True))
            b_q, b_k, b_v = (None if b is None else to_float64(b[index]) for b, index in zip(biases, at, strict=True))
            heads.append(Head(rows, w_q, w_k, w_v, self.scale, y=keys, b_q=b_q, b_k=b_k, b_v=b_v, mask=bias))
        return heads

    def query_heads(self, kv_head: int, query_head: int | None = None) -> slice:
        """Query heads of one key/value head, or one of them.

        Raises: IndexError if the key/value head is not that of `query_head`.
        """
        group = self.site.num_heads // self.site.num_kv_heads
        first, end = kv_head * group, (kv_head + 1) * group
        if query_head is None:
            return slice(first, end)
        if not first <= query_head < end:
            raise IndexError(f"{self.site.name}: expected a query head from {first} to {end - 1}, got {query_head}")
        return slice(query_head, query_head + 1)

    def _bias(self, group: slice, samples: list[int]) -> Tensor | None:
        """(g, S N, S M): each sample's own bias on the diagonal, -inf elsewhere."""
        if self.logit_bias is None and len(samples) == 1:
            return None
        assert self.probabilities is not None
        shape = self.probabilities[0, group].shape
        if self.logit_bias is None:
            own = [torch.zeros(shape, dtype=torch.float64, device=self.probabilities.device)] * len(samples)
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
                "Use wellcond.jacobian.module.ModuleJacobian, which runs the module itself"
            )
        if not 0 <= kv_head < self.site.num_kv_heads:
            count = self.site.num_kv_heads
            raise IndexError(f"{self.site.name}: expected a key/value head below {count}, got {kv_head}")
        for sample in samples or ():
            if not 0 <= sample < self.num_samples:
                raise IndexError(f"{self.site.name}: expected a sample below {self.num_samples}, got {sample}")

    def check_weights(self) -> None:
        """Raise if the weights are not those of the capture."""
        if self.fingerprint != fingerprint(self.site):
            raise WeightError(
                f"{self.site.name}: its weights are not those that the forward pass used: they were written since, or "
                "some library puts others in their place around every forward pass (offloading?). Measure again, or "
                "measure the plain model."
            )


def fingerprint(site: AttentionSite) -> tuple[Any, ...]:
    """What changes when a weight is written, replaced or conditioned."""

    def mark(slot: Slot) -> tuple[Any, ...]:
        stored = slot.parameter
        version = None if stored.is_inference() else stored._version
        return stored.data_ptr(), version, stored.dtype, type(slot.owner).__name__

    return tuple(mark(slot) for slot in (site.q, site.k, site.v))


def capture_attention(
    model: nn.Module, batch: Any, *, sites: Sequence[AttentionSite] | None = None, max_samples: int | None = None
) -> list[CapturedAttention]:
    """Run the model's own forward pass once and keep what each attention read, multiplied and put out.

    The pass is in evaluation mode and without gradients; training flags, hooks, gradients and the random state are left
    as they were. Of a module that is called several times (ALBERT's shared layer), the first call is kept, with a note.

    Args:
        model: any model, in any floating point dtype.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments of `model`.
        sites: only these attentions (from `find_attention(model)`); by default all that are recognised.
        max_samples: keep at most so many samples or windows of each attention; the first ones.

    Returns: one `CapturedAttention` per site, in the order of the sites. One that the batch never reaches has no
        tokens, and says so.

    Raises:
        AttentionNotFoundError: nothing was recognised.
        WeightError: NaN or infinite tokens, logits or probabilities, with the name of the layer.
        ValueError: no site is reached by this batch, or one that was asked for is not.

    Example:
        >>> from torch import nn
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> [captured] = capture_attention(attention, (x, x, x))
        >>> captured.is_plain, captured.head(0).output().shape
        (True, torch.Size([1, 5, 4]))
    """
    if sites is None:
        return capture_sites(model, batch, find_attention(model, strict=False), max_samples=max_samples, required=False)
    return capture_sites(model, batch, sites, max_samples=max_samples)


def capture_sites(
    model: nn.Module,
    batch: Any,
    sites: Sequence[AttentionSite],
    *,
    max_samples: int | None = None,
    required: bool = True,
) -> list[CapturedAttention]:
    """`capture_attention` of sites that are known; unless `required`, some of them may not be reached by the batch."""
    captured: dict[int, CapturedAttention] = {}

    def keep(call: SiteRecord) -> None:
        _check_finite(call.site, call)
        captured[id(call)] = _describe(call.site, call, max_samples)

    found = record(model, batch, sites, NEEDED, each=keep)
    missing = found.not_called
    if missing and (required or len(missing) == len(sites)):
        raise ValueError(f"the forward pass on this batch never calls {', '.join(missing[:5])}")
    return [_with_note(captured[id(c)], c.count) if id(c) in captured else _not_watched(c) for c in found.sites]


def _with_note(captured: CapturedAttention, count: int) -> CapturedAttention:
    if count == 1:
        return captured
    note = f"called {count} times, the first call is kept"
    return replace(captured, note=f"{captured.note}; {note}" if captured.note else note)


def _not_watched(call: SiteRecord) -> CapturedAttention:
    site, why = call.site, call.not_seen["arguments"]
    return CapturedAttention(site, None, None, None, None, site.q.parameter.dtype, why, why)


def why_site_is_not_plain(site: AttentionSite) -> str:
    """What the site itself says against softmax(s Q K^T + bias) V; empty if nothing."""
    if site.kind != "softmax":
        return f"its kind is {site.kind}"
    if site.evidence == "structure":
        return "only the place of its projections is known, not what it computes"
    reasons = {
        "queries and keys are rotated (rotary)": site.rotary,
        f"queries and keys are normalised ({site.qk_norm})": site.qk_norm is not None,
        "heads are mixed (talking heads)": site.talking_heads,
    }
    said = [reason for reason, holds in reasons.items() if holds]
    said += site.modifiers
    if not said and site.scale is None:
        said = ["its scale is not known"]
    return "; ".join(said)


def _describe(site: AttentionSite, call: SiteRecord, max_samples: int | None) -> CapturedAttention:
    some, mark = slice(None, max_samples), fingerprint(site)
    dtype, why = site.q.parameter.dtype, why_site_is_not_plain(site)
    if not why:
        aligned = align(site, call)
        if not isinstance(aligned, str):
            seen = logit_bias(site, aligned)
            bias = None if seen.bias is None else seen.bias[some].clone()
            memory = None if _equal(aligned.x, aligned.y) else aligned.y[some].clone()
            x, p = aligned.x[some].clone(), aligned.probabilities[some].clone()
            return CapturedAttention(site, x, memory, bias, p, dtype, seen.doubt, "", seen.scale, call, mark)
        if site.evidence == "declared" and call.softmaxes:
            raise UnsupportedLayoutError(
                site.name,
                f"its adapter declares plain softmax attention on these heads, and {aligned} on this batch.",
                class_name=type(site.module).__name__,
                advice="Correct what the adapter declares, or name what changes the heads in modifiers=(...); see "
                "docs/layouts.md.",
            )
        why = aligned
    x_, y_, p_ = (None if tensor is None else tensor[some].clone() for tensor in _as_seen(site, call))
    note = "tokens and probabilities are as seen, not checked against each other"
    return CapturedAttention(site, x_, y_, None, p_, dtype, why, note, site.scale, call, mark)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _as_seen(site: AttentionSite, call: SiteRecord) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Tokens and probabilities of an attention that is not plain, in the form of a plain one as far as they have it."""
    softmaxes = [p for _, p in call.softmaxes] if site.kind == "softmax" else []
    views = (view(p) for p in softmaxes for view in head_views(p, site.num_heads))
    probabilities = next(views, None)

    def tokens(role: str, axis: int) -> Tensor | None:
        slot = site.by_role(role)
        possible = list(candidates(call, role, slot))
        if not possible:
            return None
        # F.linear flattens what it reads; the module's own argument may be the same before that.
        same = [t for t in possible if t.dim() > 2 and _equal(t.reshape(-1, t.shape[-1]), possible[0])]
        seen = same[0] if same else possible[0]
        if is_map(slot, seen):
            return seen.flatten(2).mT
        if seen.dim() == 2 and role in call.inputs:
            return seen[:, None]
        seen = seen.reshape(-1, *seen.shape[-2:])
        count = seen.shape[1] if probabilities is None else probabilities.shape[axis]
        # (N, B, D), where the softmax shows N
        return seen.transpose(0, 1) if seen.shape[0] == count != seen.shape[1] else seen

    x, y = tokens("query", -2), tokens("key", -1)
    if x is not None and y is not None and _equal(x, y):
        y = None
    return x, y, probabilities


def _check_finite(site: AttentionSite, call: SiteRecord) -> None:
    name = site.name or type(site.module).__name__
    for role, tokens in call.inputs.items():
        if not bool(torch.isfinite(tokens).all()):
            raise WeightError(f"{name}: the {role} projection reads NaN or infinite numbers on this batch")
    for logits, p in call.softmaxes:
        if bool(torch.isnan(logits).any()) or bool((logits == torch.inf).any()):
            raise WeightError(f"{name}: its logits are NaN or infinite on this batch")
        if bool(torch.isnan(p).any()):
            raise WeightError(f"{name}: its softmax gives NaN on this batch; is some token masked from everything?")

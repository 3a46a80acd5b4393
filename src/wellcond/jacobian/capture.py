r"""From a model and a batch to what the Jacobian of every attention needs: one forward pass, and what it multiplied.

The site's account of which tokens were multiplied is believed only where the recorded operands agree with it.

A projection reads tokens in the shape its module likes: (B, N, D), (N, B, D), (B, D, h, w), (B, nh, nw, w, w, D). The
products are batched over samples, windows and heads, in an order of the module's own. Both are tried in their usual
forms, and a form is accepted if, for every window l, head h and token,

    left = c_q (x_l W_q^T + b_q),   right^T = c_k (y_l W_k^T + b_k),   values = y_l W_v^T + b_v

with one number c_q and one c_k. The logits cannot serve for this: what does not fit would count as a bias. What the
softmax saw beyond s q . k is a mask, a position bias, or nothing:

    bias = logits - s q k^T,   with q, k recomputed in float64

exact up to the rounding of the model's own q, k and logits. Differences below that rounding are zero.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.evaluation import first_tensor
from wellcond.attention.find import find_attention
from wellcond.attention.kernels import is_masked
from wellcond.attention.record import Field, SiteRecord, record, same_numbers
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import NotPlainError, UnsupportedLayoutError, WeightError
from wellcond.jacobian.head import Head
from wellcond.linalg.spectrum import to_float64

NEEDED: tuple[Field, ...] = ("arguments", "tokens", "products", "logits", "probabilities", "heads", "output")
View = Callable[[Tensor], Tensor]
TOLERANCE = 1e-5
EPS_FACTOR = 4  # roundings that meet in one entry of a product


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

    def head(self, kv_head: int, samples: int | Sequence[int] | None = 0, *, query_head: int | None = None) -> Head:
        """The query heads of one key/value head on one sample or window, on several, or on all of them (None).

        Several share the weights (theory.md, section 3.5): tokens follow each other, and each sample sees its own keys
        only. Rows are ordered (query head, sample, token). A query that may attend to nothing (padding under a causal
        mask) is left out: rows are then fewer than N. `query_head` takes one of the query heads by itself.

        Raises:
            NotPlainError: the attention is not plain; use `wellcond.jacobian.module.ModuleJacobian`.
            IndexError: no such head or sample.
            WeightError: NaN or infinite numbers; weights that changed since the capture; no query may attend to
                anything.
        """
        return self.heads([(kv_head, query_head)], [samples] if isinstance(samples, int) else samples)[0]

    def heads(self, wanted: Sequence[tuple[int, int | None]], samples: Sequence[int] | None = None) -> list[Head]:
        """`head` of several (key/value head, query head); tokens are shared and weights are read once."""
        if not self.is_plain:
            raise NotPlainError(
                f"{self.site.name or 'the attention'} is not plain softmax attention: {self.why_not_plain}. "
                "Use wellcond.jacobian.module.ModuleJacobian, which runs the module itself"
            )
        groups = [self.query_heads(*heads) for heads in wanted]
        for sample in samples or ():
            if not 0 <= sample < self.num_samples:
                raise IndexError(f"{self.site.name}: expected a sample below {self.num_samples}, got {sample}")
        self.check_weights()
        chosen = list(range(self.num_samples)) if samples is None else list(samples)
        assert self.x is not None and self.scale is not None
        x = to_float64(self.x[chosen]).flatten(0, 1)
        y = None if self.memory is None else to_float64(self.memory[chosen]).flatten(0, 1)
        slots = [self.site.by_role(role) for role in ("query", "key", "value")]
        weights, biases = [slot.read() for slot in slots], [slot.read_bias() for slot in slots]
        heads = []
        for (kv_head, _), group in zip(wanted, groups, strict=True):
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

        Raises: IndexError if there is no such key/value head, or it is not that of `query_head`.
        """
        if not 0 <= kv_head < self.site.num_kv_heads:
            count = self.site.num_kv_heads
            raise IndexError(f"{self.site.name}: expected a key/value head below {count}, got {kv_head}")
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
    model: nn.Module,
    batch: Any,
    sites: Sequence[AttentionSite] | None = None,
    *,
    max_samples: int | None = None,
    required: bool | None = None,
) -> list[CapturedAttention]:
    """Run the model's own forward pass once and keep what each attention read, multiplied and put out.

    The pass is in evaluation mode and without gradients; training flags, hooks, gradients and the random state are left
    as they were. Of a module that is called several times (ALBERT's shared layer), the first call is kept, with a note.

    Args:
        model: any model, in any floating point dtype.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments of `model`.
        sites: only these attention layers (from `find_attention(model)`); by default all that are recognised.
        max_samples: keep at most so many samples or windows of each layer; the first ones.
        required: every site has to be reached by the batch; so it is for `sites` by default.

    Returns: one `CapturedAttention` per site, in the order of the sites. One that the batch never reaches has no
        tokens, and says so.

    Raises:
        AttentionNotFoundError: nothing was recognised.
        WeightError: NaN or infinite tokens, logits or probabilities, with the name of the layer.
        ValueError: no site is reached by this batch, or one that is required is not.

    Example:
        >>> from torch import nn
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> [captured] = capture_attention(attention, (x, x, x))
        >>> captured.is_plain, captured.head(0).output().shape
        (True, torch.Size([1, 5, 4]))
    """
    required = sites is not None if required is None else required
    sites = find_attention(model, strict=False) if sites is None else sites
    captured: dict[int, CapturedAttention] = {}

    def keep(call: SiteRecord) -> None:
        _check_finite(call.site, call)
        captured[id(call)] = _describe(call.site, call, max_samples)

    found = record(model, batch, sites, NEEDED, each=keep)
    missing = found.not_called
    if missing and (required or len(missing) == len(sites)):
        raise ValueError(f"the forward pass on this batch never calls {', '.join(missing[:5])}")
    result = []
    for call in found.sites:
        of_site = captured.get(id(call))
        if of_site is None:
            why = call.not_seen["arguments"]
            of_site = CapturedAttention(call.site, None, None, None, None, call.site.q.parameter.dtype, why, why)
        elif call.count > 1:
            notes = [of_site.note, f"called {call.count} times, the first call is kept"]
            of_site = replace(of_site, note="; ".join(filter(None, notes)))
        result.append(of_site)
    return result


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
    against = [reason for reason, holds in reasons.items() if holds]
    against += site.modifiers
    if not against and site.scale is None:
        against = ["its scale is not known"]
    return "; ".join(against)


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


# --- which tokens were multiplied, and what was added to their products ----------------------------------------------


@dataclass(frozen=True, eq=False)
class Alignment:
    """Tokens x (L, N, D) and y (L, M, E); logits and probabilities (L, H, N, M) of the same windows, in that order."""

    x: Tensor
    y: Tensor
    logits: Tensor
    probabilities: Tensor
    operand_dtype: torch.dtype


def align(site: AttentionSite, call: SiteRecord) -> Alignment | str:
    """The tokens that this attention multiplied, or the reason why they are not known."""
    if not call.softmaxes:
        return call.not_seen.get("logits", "no softmax was visible")
    reason = "its forward pass multiplies something else than the projected tokens"
    products = [pair for a, b in call.products for pair in ((a, b), (b.mT, a.mT))]
    for logits, p in call.softmaxes:
        for weights, values in products:
            if not same_numbers(weights, p):
                continue
            for left, right in products:
                if left.shape[:2] != weights.shape[:2] or right.mT.shape != (*values.shape[:2], site.head_dim):
                    continue
                for view in head_views(p, site.num_heads):
                    found = _tokens_of(site, call, view(left), view(right.mT), view(values))
                    if not isinstance(found, str):
                        return Alignment(*found, view(logits), view(p), left.dtype)
                    reason = found or reason
    return reason


def head_views(p: Tensor, num_heads: int) -> Iterator[View]:
    """Ways to read the leading dimensions of a softmax as windows and heads: tensors (..., n, m) -> (L, H, n, m)."""
    lead = tuple(p.shape[:-2])
    if not lead and num_heads == 1:
        lead = (1,)
    splits = [(lead, axis) for axis, size in enumerate(lead) if size == num_heads]
    for axis, size in enumerate(lead):
        if size != num_heads and size % num_heads == 0:
            rest = size // num_heads
            splits.append(((*lead[:axis], rest, num_heads, *lead[axis + 1 :]), axis + 1))
            splits.append(((*lead[:axis], num_heads, rest, *lead[axis + 1 :]), axis))
    for shape, axis in splits:
        yield functools.partial(_view_heads, shape=shape, axis=axis)


def _view_heads(tensor: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    matrix = tensor.shape[-2:]
    return tensor.reshape(*shape, *matrix).movedim(axis, -3).reshape(-1, shape[axis], *matrix)


def _tokens_of(
    site: AttentionSite, call: SiteRecord, q_LHNd: Tensor, k_LHMd: Tensor, v_LHMd: Tensor
) -> tuple[Tensor, Tensor] | str:
    """Tokens x and y behind these operands; an empty string if they are something else, a reason if one is known.

    Weights of zero agree with any order of the tokens; the order of another role is then taken, if it is among them.
    """
    reason = ""
    for y, _ in _matching(site, call, "key", k_LHMd):
        for z, factor in _matching(site, call, "value", v_LHMd):
            if not _equal(z, y):
                reason = "keys and values are made of different tokens"
            elif abs(factor - 1) > tolerance(v_LHMd.dtype, site.by_role("value").parameter.dtype):
                reason = f"values are multiplied by {factor:.6g}"
            else:
                first = None
                for x, _ in _matching(site, call, "query", q_LHNd):
                    first = x if first is None else first
                    if x.shape != y.shape or torch.equal(x, y):
                        return x, y
                return "" if first is None else (first, y)
    return reason


def _matching(site: AttentionSite, call: SiteRecord, role: str, heads: Tensor) -> Iterator[tuple[Tensor, float]]:
    slot = site.by_role(role)
    for tokens in candidates(call, role, slot):
        for arranged in arrangements(tokens, slot, heads.shape[0], heads.shape[2]):
            factor = agreement(heads, slot, arranged, site.num_heads)
            if factor is not None:
                yield arranged, factor


def candidates(call: SiteRecord, role: str, slot: Slot) -> Iterator[Tensor]:
    """Tensors that this projection may have read, the surest first."""
    if role in call.inputs:
        yield call.inputs[role]
        return
    if isinstance(slot.owner, nn.MultiheadAttention):  # its arguments are named after the roles
        bound = inspect.signature(slot.owner.forward).bind(*call.args, **call.kwargs)
        yield bound.arguments[role]
        return
    # F.linear(x, self.qkv.weight): the product whose right side is the weight.
    weight = slot.as_matrix(getattr(slot.owner, slot.weight_name).detach())
    for left, right in call.products:
        if right.shape == (1, *weight.T.shape) and torch.equal(right[0], weight.T.to(right.dtype)):
            yield left[0]
    for value in (*call.args, *call.kwargs.values()):
        tensor = first_tensor(value)
        if tensor is not None and tensor.is_floating_point() and tensor.shape[-1:] == (slot.in_features,):
            yield tensor


def is_map(slot: Slot, tokens: Tensor) -> bool:
    """Whether these tokens are a map (B, D, h, w) or (B, D, n), read by a 1x1 convolution."""
    return isinstance(slot.owner, (nn.Conv1d, nn.Conv2d)) and tokens.dim() > 2


def arrangements(tokens: Tensor, slot: Slot, num_windows: int, num_tokens: int) -> Iterator[Tensor]:
    """Ways to read what a projection read as tokens (L, N, D)."""
    if is_map(slot, tokens):
        tokens = tokens.flatten(2).mT
    L, N, D = num_windows, num_tokens, slot.in_features
    if tokens.shape[-1] != D:
        return
    if tokens.numel() == L * N * D:
        yield tokens.reshape(L, N, D)
        if tokens.dim() == 2:  # flattened by F.linear; perhaps from (N, B, D)
            yield tokens.reshape(N, L, D).transpose(0, 1)
        else:
            yield tokens.transpose(0, 1).reshape(L, N, D)  # (N, B, D)
            B = tokens.shape[0]
            if L % B == 0:  # windows of every (L / B)-th token
                yield tokens.reshape(B, N, L // B, D).transpose(1, 2).reshape(L, N, D)
    elif tokens.numel() == N * D:  # projected once, used in every window
        yield tokens.reshape(1, N, D).expand(L, N, D)


def project(slot: Slot, x_LND: Tensor, num_heads: int) -> Tensor:
    """The site's account of one projection in float64, (L, H, N, d); key/value heads repeated for their group."""
    heads = torch.einsum("lnc,hdc->lhnd", to_float64(x_LND), to_float64(slot.read()))
    bias = slot.read_bias()
    if bias is not None:
        heads = heads + to_float64(bias)[None, :, None, :]
    return heads.repeat_interleave(num_heads // slot.num_heads, dim=1)


def tolerance(*dtypes: torch.dtype) -> float:
    """Relative error up to which two computations of one thing in these dtypes agree."""
    return max(TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in dtypes))


def agreement(found: Tensor, slot: Slot, tokens: Tensor, num_heads: int) -> float | None:
    """The factor c with found = c * (the projected tokens), to rounding, or None."""
    expected = project(slot, tokens, num_heads)
    if found.shape != expected.shape:
        return None
    error, found = tolerance(found.dtype, slot.parameter.dtype), to_float64(found)
    square = float((expected * expected).sum())
    if square == 0:
        return 1.0 if not bool(found.any()) else None
    factor = float((found * expected).sum()) / square
    off = float((found - factor * expected).norm())
    return factor if factor != 0 and off <= error * float(found.norm()) else None


@dataclass(frozen=True, eq=False)
class LogitBias:
    """What is added to s q . k, (L or 1, H, N, M) with -inf where masked, None if nothing; and s itself.

    `doubt` says why this is not believed; it is empty if it is.
    """

    bias: Tensor | None
    scale: float
    doubt: str


def logit_bias(site: AttentionSite, aligned: Alignment) -> LogitBias:
    """Masks and biases behind the logits of a recorded softmax.

    A bias is believed where the site declares one (`relative_position_bias`) or leaves the mask to its caller
    (`causal` None). Elsewhere the logits must be s q . k, masked or not.
    """
    assert site.scale is not None
    query, key = site.by_role("query"), site.by_role("key")
    q, k = project(query, aligned.x, site.num_heads), project(key, aligned.y, site.num_heads)
    logits, product, hidden = to_float64(aligned.logits), q @ k.mT, is_masked(aligned.logits)
    scale = site.scale if site.evidence == "adapter" else _refined(site.scale, logits[~hidden], product[~hidden])
    product = scale * product
    noise = abs(scale) * rounding(site, aligned, q, k) + EPS_FACTOR * _eps(aligned) * (logits.abs() + product.abs())
    bias = (logits - product).masked_fill(hidden, 0.0)
    bias = torch.where(bias.abs() <= noise, 0.0, bias)
    doubt = ""
    if bool(bias.any()) and not site.relative_position_bias and site.causal is not None:
        # A number added to a whole row (a subtracted maximum) changes no probability and no derivative.
        seen = (~hidden).sum(-1, keepdim=True).clamp_min(1)
        rest = (bias - bias.sum(-1, keepdim=True) / seen).masked_fill(hidden, 0.0)
        if bool((rest.abs() > 8 * noise).any()):
            doubt = (
                f"its logits differ from s q.k by up to {float(rest.abs().max()):.3g}, and nothing declared says why"
            )
        bias = torch.zeros_like(bias)
    bias = bias.masked_fill(hidden, -torch.inf)
    if not bool(bias.any()):
        return LogitBias(None, scale, doubt)
    shared = len(bias) > 1 and bool((bias == bias[:1]).all())
    return LogitBias(bias[:1].clone() if shared else bias, scale, doubt)


def _refined(scale: float, logits: Tensor, product: Tensor) -> float:
    """A scale that was measured in a trial run is known to seven digits; the logits tell the others."""
    square = float((product * product).sum())
    fitted = float((logits * product).sum()) / square if square else scale
    return fitted if abs(fitted - scale) <= 1e-6 * abs(scale) else scale


def _eps(aligned: Alignment) -> float:
    dtypes = (aligned.x.dtype, aligned.operand_dtype, aligned.logits.dtype, aligned.probabilities.dtype)
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def rounding(site: AttentionSite, aligned: Alignment, q: Tensor, k: Tensor) -> Tensor:
    r"""How far the model's own q k^T may be from the exact one, entry by entry.

    An entry of q = W x is off by eps |q| (it is stored) and by u |w||x| (it is summed, in float32 or better):

        |d(q.k)| <= dq . |k| + |q| . dk
    """
    eps = _eps(aligned)
    summed = min(eps, torch.finfo(torch.float32).eps)

    def off(role: str, tokens: Tensor, heads: Tensor) -> Tensor:
        slot = site.by_role(role)
        sizes = to_float64(slot.read()).norm(dim=-1).repeat_interleave(site.num_heads // slot.num_heads, dim=0)
        lengths = to_float64(tokens).norm(dim=-1)
        return eps * heads.abs() + EPS_FACTOR * summed * lengths[:, None, :, None] * sizes[None, :, None, :]

    dq, dk = off("query", aligned.x, q), off("key", aligned.y, k)
    return dq @ k.abs().mT + q.abs() @ dk.mT

r"""Tokens and weights set to each other on a batch of data: the whole attention Jacobian is controlled at the start.

Both papers condition W, while their own bound grows with the third power of the condition number of the tokens. On a
batch, in the order of the forward pass, this initialisation sets

    words        root mean square of an embedding's entries: length / sqrt(D)
    positions    root mean square of learned positions, relative to the spread of the embeddings around their mean
    Q, K         standard deviation of each head's logits over the keys that a token may see; of normalised queries and
                 keys, by their gains
    W_O, MLP     root mean square of what attention and MLP add, relative to the stream that they add to

What a layer receives depends on the layers before it, so a few rounds over the whole model take the place of one pass
layer by layer (layer-sequential unit-variance initialisation, Mishkin and Matas, 2016): the dependence is triangular.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellcond.arguments import PositiveFloat
from wellcond.attention.checks import Rollback
from wellcond.attention.gains import Gain, find_gains
from wellcond.attention.record import HOW_TO_SEE, Field, ForwardRecord, record, root_mean_square
from wellcond.attention.sharding import broadcast_from_rank_zero, full_tensor, is_distributed, to_local
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import WeightError
from wellcond.init.apply import InitContext, Write, register_init
from wellcond.init.tokens import Position, embedding_layers, embedding_spread, position_tables, position_writes
from wellcond.linalg.orthogonal import draw_normal, random_semi_orthogonal

Start = Literal["gaussian", "semi_orthogonal", "keep"]
SCALES: tuple[Field, ...] = ("spread", "stream")
ROUNDS = 12
CLOSE = 0.02
"""Factors within this of 1 end the rounds."""
LARGEST_STEP = 1e3


@register_init("calibrated")
def calibrated(
    context: InitContext,
    *,
    batch: Any = None,
    start: Start = "gaussian",
    logits: PositiveFloat | None = 1.0,
    share: PositiveFloat | None = 0.15,
    words: PositiveFloat | None = 0.55,
    positions: PositiveFloat | None = 0.5,
    position: Position = "keep",
) -> Iterator[Write]:
    """Embeddings, positions, Q, K, W_O and the MLP's last matrix at scales that fit each other on a batch.

    Args:
        context: the model and its sites.
        batch: what the model is called with: a tensor, a mapping of keyword arguments, a tuple of arguments, or a
            function that calls the model. A few samples suffice.
        start: Q and K before they are scaled: Gaussian, semi-orthogonal, or as they are.
        logits: standard deviation of the logits over keys; None leaves Q and K as they are. Attention layers that
            normalise queries and keys get it by the gains of their norms, as a mean over the heads that share a gain;
            without gains they keep theirs.
        share: what attention and MLP each add, relative to the stream; None leaves W_O and the MLP as they are. Blocks
            with learned scales of their own (LayerScale) are left as they are.
        words: length of a word embedding; 0.55 is that of GPT-2 and BERT at their width of 768. None leaves them.
            Embeddings of patches are left as they are.
        positions: learned positions relative to the spread of the embeddings; None leaves them. Rotary and relative
            positions have no such scale.
        position: also replace learned positions: ``sincos2d`` (vision) or ``sincos1d`` (sequences).

    Raises:
        ValueError: no batch.
        WeightError: numbers that are not finite on this batch; a layer that the batch does not reach, or whose logits
            cannot be seen because a kernel computes its softmax inside. Nothing is changed then.
    """
    if batch is None:
        raise ValueError("'calibrated' needs batch=..., what the model is called with: a tensor, a mapping or a tuple")
    model, sites = context.model, context.sites
    _check_seen(record(model, batch, sites, SCALES), logits, share)
    with _Draft(model, context.rollback) as draft:
        for write in position_writes(model, position):
            draft.set_(write.parameter, write.values)
        _scale_tokens(model, batch, sites, draft, words, positions)
        for site in sites:
            if logits is not None and start != "keep" and not _normalises(site):
                for role in ("query", "key"):
                    _draw(site.by_role(role), start, context, draft)
        for _ in range(ROUNDS):
            found = record(model, batch, sites, SCALES)
            factors = [*_logit_factors(found, logits, draft), *_share_factors(found, share, draft)]
            if all(abs(math.log(factor)) <= CLOSE for factor in factors):
                break
    yield from draft.planned


class _Draft(contextlib.AbstractContextManager["_Draft"]):
    """Changes that are tried on the model itself, and taken back at the end: other processes may hold parts of it."""

    def __init__(self, model: nn.Module, rollback: Rollback) -> None:
        self.rollback = rollback
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.planned: list[Write] = []

    def __exit__(self, kind: Any, *rest: Any) -> None:
        """Note what was reached, unless something failed, and put everything back."""
        if kind is None:
            for parameter, _ in self.rollback.numbers.values():
                name = self.names.get(id(parameter), "a parameter")
                self.planned.append(Write(name, parameter, full_tensor(parameter).detach().clone()))
        self.rollback.restore_numbers()

    @torch.no_grad()
    def set_(self, parameter: Tensor, values: Tensor) -> None:
        """Whole new values."""
        self.rollback.keep(parameter)
        Write("", parameter, _shared(values, parameter)).commit_()

    @torch.no_grad()
    def scale_(self, parameter: Tensor | None, factor: float) -> None:
        """Multiply a parameter."""
        if parameter is not None:
            self.rollback.keep(parameter)
            to_local(parameter).mul_(factor)

    def set_gain_(self, gain: Gain, factors: Tensor) -> None:
        """Multiply the gain of normalised queries or keys."""
        for parameter, values in gain.scaled(factors):
            self.set_(parameter, values)

    def scale_heads_(self, slot: Slot, factors: Tensor) -> None:
        """Multiply the weight and the bias of every head."""
        self.rollback.keep(slot.parameter)
        slot.write_(slot.read_raw() * factors[:, None, None].to(slot.parameter))
        bias = slot.stored_bias()
        values = slot.read_bias()
        if bias is not None and values is not None:
            self.rollback.keep(bias)
            slot.write_bias_(values * factors[:, None].to(values))


def _shared(values: Tensor, parameter: Tensor) -> Tensor:
    return broadcast_from_rank_zero(values, parameter) if is_distributed(parameter) else values


def _scale_tokens(
    model: nn.Module,
    batch: Any,
    sites: list[AttentionSite],
    draft: _Draft,
    words: float | None,
    positions: float | None,
) -> None:
    layers = embedding_layers(model)
    if words is not None:
        for _, layer in layers:
            if isinstance(layer, nn.Embedding):
                size = root_mean_square(full_tensor(layer.weight))
                draft.scale_(layer.weight, _factor(words * layer.embedding_dim**-0.5, size, "the word embeddings"))
    tables = dict(position_tables(model, sites))
    if positions is None or not tables or not layers:
        return
    seen = record(model, batch, (), (), outputs=[name for name, _ in layers]).outputs
    spreads = [embedding_spread(tensor, layer) for name, layer in layers if (tensor := seen.get(name)) is not None]
    if not spreads:
        return
    spread = math.sqrt(math.fsum(s * s for s in spreads))
    for name, table in tables.items():
        factor = _factor(positions * spread, root_mean_square(full_tensor(table)), name)
        draft.scale_(table, _agreed(factor, table))


def _normalises(site: AttentionSite) -> bool:
    """Whether the size of Q and K does not reach the logits."""
    return site.qk_norm is not None or site.kind == "cross_covariance"


def _draw(slot: Slot, start: Start, context: InitContext, draft: _Draft) -> None:
    count, rows, columns = (*slot.rows.shape, slot.in_features)
    device = slot.parameter.device
    if start == "gaussian":
        values = draw_normal((count, rows, columns), generator=context.generator, device=device) * columns**-0.5
    else:
        values = random_semi_orthogonal(count, rows, columns, generator=context.generator, device=device, source="svd")
    draft.rollback.keep(slot.parameter)
    slot.write_(_shared(values, slot.parameter))


def _check_seen(found: ForwardRecord, logits: float | None, share: float | None) -> None:
    if found.not_called and (logits is not None or share is not None):
        raise WeightError(
            f"{_some(found.not_called)}: not called on this batch, so that nothing of it can be calibrated; give a "
            "batch that reaches every attention layer, or those that it reaches as sites=. Nothing was changed"
        )
    hidden = [one for one in found.sites if one.why_logits_hidden and not _normalises(one.site)]
    if hidden and logits is not None:
        names = [one.site.name for one in hidden]
        raise WeightError(
            f"{_some(names)}: its logits cannot be calibrated, since {hidden[0].why_logits_hidden}. To initialise, "
            f"{HOW_TO_SEE}; or leave Q and K as they are: logits=None. Nothing was changed"
        )


def _some(names: Sequence[str]) -> str:
    """The first by name, the others by number."""
    rest = len(names) - 1
    return (names[0] or "the attention layer") + (f" and {rest} more attention layer{'s' * (rest > 1)}" * bool(rest))


def _logit_factors(found: ForwardRecord, target: float | None, draft: _Draft) -> Iterator[float]:
    """Scale Q and K of every head by the same factor; of query heads that share a key, the key by their mean factor."""
    for one in found.sites:
        site, spread = one.site, one.spread
        gains, _ = find_gains(site)
        if target is None or spread is None or (_normalises(site) and not gains):
            continue
        spread = _shared(spread, site.q.parameter).cpu().double()
        if not bool(torch.isfinite(spread).all()):
            raise WeightError(f"{site.name}: its logits are not finite on this batch; nothing was changed")
        factors = (target / spread.clamp_min(target / LARGEST_STEP)).clamp_max(LARGEST_STEP)
        if any(gain.num_heads == 1 for gain in gains.values()):
            factors = factors.log().mean().exp()[None]
            for gain in gains.values():
                draft.set_gain_(gain, factors.sqrt())
            yield from factors.tolist()
            continue
        query, key = site.by_role("query"), site.by_role("key")
        of_keys = factors.log().view(key.num_heads, -1).mean(1).div(2).exp()
        of_queries = factors / of_keys.repeat_interleave(query.num_heads // key.num_heads)
        if gains:
            draft.set_gain_(gains["key"], of_keys)
            draft.set_gain_(gains["query"], of_queries)
            yield from factors.tolist()
            continue
        draft.scale_heads_(key, of_keys)
        draft.scale_heads_(query, of_queries)
        yield from factors.tolist()


def _share_factors(found: ForwardRecord, share: float | None, draft: _Draft) -> Iterator[float]:
    for block in found.blocks:
        if share is None or block.stream is None or not bool(block.stream) or block.scales_itself:
            continue
        target = share * float(block.stream)
        for site in block.sites:
            added = float(block.attention.get(site.name, 0.0))
            if site.o is not None and added:
                factor = _agreed(_factor(target, added, site.name), site.o.parameter)
                draft.scale_(site.o.parameter, factor)
                draft.scale_(site.o.stored_bias(), factor)
                yield factor
        if block.mlp is not None and block.mlp_added is not None and bool(block.mlp_added):
            weight, bias = block.mlp._parameters["weight"], block.mlp._parameters.get("bias")
            assert weight is not None
            factor = _agreed(_factor(target, float(block.mlp_added), block.name), weight)
            draft.scale_(weight, factor)
            draft.scale_(bias, factor)
            yield factor


def _agreed(factor: float, parameter: Tensor) -> float:
    """The factor of rank 0, where the parameter is sharded."""
    return float(_shared(torch.tensor(factor, dtype=torch.float64), parameter))


def _factor(target: float, found: float, what: str) -> float:
    if not math.isfinite(found):
        raise WeightError(f"{what}: not finite on this batch; nothing was changed")
    return min(target / max(found, target / LARGEST_STEP), LARGEST_STEP)

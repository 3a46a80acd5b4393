r"""QK-Clip: after a step, heads whose logits grew beyond a limit get smaller queries and keys.

With S_h the largest logit of head h in this step's batch, :math:`\gamma_h = \min(1, \tau / S_h)`,

.. math:: W_{Q,h} \leftarrow \gamma_h^{\alpha} W_{Q,h}, \qquad W_{K,h} \leftarrow \gamma_h^{1 - \alpha} W_{K,h}

biases included, so that the logits of the same tokens are multiplied by gamma_h (Kimi K2, arXiv 2507.20534). Where
several query heads share a key head, the smallest gamma of the group acts on all of them, unless alpha is 1. Where keys
are not the only partner of a query (a term of position and query, learned keys), alpha is 1 for that layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wellcond.arguments import check_flag, check_mapping, describe
from wellcond.attention.checks import Chosen, check_writable
from wellcond.attention.gains import Gain, find_gains
from wellcond.attention.sharding import full_tensor, reduce_
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot, corrections_of
from wellcond.errors import ConditioningError, OptionError, UnsupportedLayoutError
from wellcond.training.monitor import AttentionMonitor
from wellcond.training.rows import AfterStep, RowFactors, check_from_zero, heads_of_bias, heads_of_weight

LOGGER = logging.getLogger("wellcond")
VERB = "wellcond.QKClip"
ON_QUERIES_ALONE = ("query position term", "extra keys")
"""Modifiers of a layer whose logits have a term that only the queries scale."""
UNREACHABLE: Mapping[str, str] = {
    "logit softcap": "its logits are capped by the model itself, and W_Q and W_K do not scale them",
    "clipped qkv": "its projected queries and keys are clamped, so that their weights do not scale the logits",
}
LEAVE_OUT = "Leave it out with sites=..., as in QKClip(model, optimizer, sites='blocks.*')."


class LogitSource(Protocol):
    """What `QKClip` asks of a monitor."""

    def max_logits(self, *, reduce: bool) -> Mapping[str, Tensor]:
        """The largest logit of every head since the last step, by name of the layer: exact, or a bound from above.

        It is asked with ``reduce=False``: `QKClip` itself takes the maximum over all processes.
        """


@dataclass(frozen=True, eq=False)
class _Layer:
    """How the heads of one layer are clipped."""

    site: AttentionSite
    first: int
    """Position of its first query head among all of the model's."""
    alpha: float
    query_groups: Tensor
    """For each query head, its group: the smallest gamma of a group acts on all its heads."""
    key_groups: Tensor


class QKClip(AfterStep):
    """Hold every head's largest logit at `tau`, by scaling its queries and keys after the step that passed it.

    A hook of the optimiser: nothing has to be called. All of it runs on the device, nothing is read by the host. Heads
    below `tau` stay as they are, bit for bit; so do heads whose largest logit is not positive, not finite, or was not
    seen in this step. `records` tells which these are. Momentum and other state of the optimiser is not changed.

    In a distributed run the largest logits are reduced over all processes, so that replicas stay equal and heads that
    live on other processes (tensor parallelism) are clipped everywhere; shards of FSDP2 and of tensor parallelism are
    scaled where they are stored.

    Args:
        model: the model, wrapped (DDP, fully_shard) if it is going to be.
        optimizer: made after the model was wrapped; or a list of several, in the order of their steps.
        tau: the largest logit that is left alone; 100 in Kimi K2.
        alpha: share of the queries in the correction; 1 for the queries alone, exact per query head also where they
            share keys.
        log_only: only keep the records.
        monitor: where the largest logits come from: an `AttentionMonitor` with ``every=1``, of which `step` is called
            after the optimiser's; by default one of its own that reads nothing else.
        sites: only these layers, from `find_attention(model)`, or a pattern of paths; all by default.
        masters: for optimisers that hold float32 copies of the model's 16-bit weights: the copy of each parameter.
        process_group: whose processes see different batches of the same weights; all by default.

    Raises:
        OptionError: tau or alpha out of range; an optimiser that does not hold the weights.
        UnsupportedLayoutError: a layer whose logits W_Q and W_K do not scale (a QK-norm whose gain all heads share, a
            cap on the logits), with the reason.
        ConditioningError: a conditioned layer whose correction does not scale with the weight.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> clip = QKClip(layer, optimizer, tau=50.0)

    Reference: Kimi Team, Kimi K2: Open Agentic Intelligence, arXiv 2507.20534, section 2.1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        tau: float = 100.0,
        alpha: float = 0.5,
        log_only: bool = False,
        *,
        monitor: LogitSource | None = None,
        sites: Chosen | None = None,
        masters: Mapping[Tensor, Tensor] | None = None,
        process_group: Any = None,
    ) -> None:
        check_from_zero(VERB, tau=tau, alpha=alpha)
        if tau == 0 or alpha > 1:
            raise OptionError(f"{VERB}: expected tau above 0 and alpha from 0 to 1, got tau={tau:g}, alpha={alpha:g}")
        check_flag("log_only", log_only)
        super().__init__(VERB, model, optimizer, sites)
        self.tau, self.alpha, self.log_only, self.process_group = float(tau), float(alpha), log_only, process_group
        for site in self._sites:
            _refuse_unreachable(site)
        check_writable(self._inner, self._sites, "qk", VERB, conditioned_too=True)
        for site in self._sites:
            _check_correction(site)
        gains = {site.name: _gains(site) for site in self._sites if site.qk_norm is not None}
        self.layers = list(_layers(self._sites, self.alpha))
        masters = {} if masters is None else masters
        check_mapping("masters", masters)
        if not log_only:
            self._check_held(_held(self.layers, gains, masters), "; with float32 copies in it, give masters=...")
        device = self.layers[0].site.by_role("query").parameter.device
        targets, exponents, self._rows = _plan(self.layers, gains, masters)
        self._targets, self._exponents = targets.to(device), exponents.to(device)
        self._groups = torch.cat([layer.query_groups for layer in self.layers]).to(device)
        self._own_monitor: AttentionMonitor | None = None
        if monitor is None:
            monitor = self._own_monitor = AttentionMonitor(
                model, every=1, columns=["max_logit"], weights=False, sites=self._sites, group=process_group
            )
        _check_monitor(monitor)
        self.monitor: LogitSource = monitor
        self._unknown: set[str] = set()
        count = len(self._groups)
        self._kept = {
            "max_logit": torch.full((count,), math.nan, device=device),
            "smallest_gamma": torch.ones(count, device=device),
            "times_clipped": torch.zeros(count, dtype=torch.int64, device=device),
            "steps_seen": torch.zeros(count, dtype=torch.int64, device=device),
        }
        self._start(self._act)

    def __repr__(self) -> str:
        """One line: the limit, how it is shared, how many heads."""
        heads = sum(layer.site.num_heads for layer in self.layers)
        only = ", log_only=True" if self.log_only else ""
        return f"QKClip(tau={self.tau:g}, alpha={self.alpha:g}{only}: {heads} heads of {len(self.layers)} layers)"

    def remove(self) -> None:
        """End the clipping; the weights stay as they are."""
        super().remove()
        if self._own_monitor is not None:
            self._own_monitor.close()

    def records(self) -> list[dict[str, Any]]:
        """What happened to every head so far; this waits for the device.

        Returns: dictionaries with ``site``, ``head``, ``max_logit`` (of the last step, NaN where it was not seen),
            ``smallest_gamma``, ``times_clipped`` and ``steps_seen``; a head with no step seen was never clipped.
        """
        kept = {name: numbers.tolist() for name, numbers in self._kept.items()}
        heads = [(layer.site.name, head) for layer in self.layers for head in range(layer.site.num_heads)]
        return [
            {"site": site, "head": head} | {name: numbers[at] for name, numbers in kept.items()}
            for at, (site, head) in enumerate(heads)
        ]

    # The step

    @torch.no_grad()
    def _act(self) -> None:
        largest = self._largest_logits()
        seen = torch.isfinite(largest)
        gamma = torch.where(seen & (largest > self.tau), self.tau / largest, 1.0)
        kept = self._kept
        kept["max_logit"].copy_(largest)
        kept["smallest_gamma"].copy_(torch.minimum(kept["smallest_gamma"], gamma))
        kept["times_clipped"] += gamma < 1
        kept["steps_seen"] += seen
        if not self.log_only:
            self._rows.multiply_(self._factors(gamma))
        if self._own_monitor is not None:
            self._warn_once(
                {name: why["max_logit"] for name, why in self._own_monitor.not_seen.items() if "max_logit" in why}
            )
            self._own_monitor.discard()

    def _largest_logits(self) -> Tensor:
        """(all query heads), NaN where a head was not seen; the same on every process."""
        seen, device = self.monitor.max_logits(reduce=False), self._groups.device
        parts = []
        for layer in self.layers:
            found, heads = seen.get(layer.site.name), layer.site.num_heads
            if found is None:
                self._warn_once({layer.site.name: "the monitor does not name it"})
                found = torch.full((heads,), math.nan, device=device)
            if tuple(found.shape) != (heads,):
                raise OptionError(
                    f"{VERB}, {layer.site.name}: expected the largest logit of each of {heads} heads, got "
                    f"{describe(found)}"
                )
            parts.append(found.detach().to(device, torch.float32))
        # NaN on the process that has not seen a head must not hide what another has.
        largest = torch.cat(parts)
        largest = torch.where(torch.isnan(largest), -math.inf, largest)
        reduce_(largest, "MAX", self.process_group)
        return torch.where(largest == -math.inf, math.nan, largest)

    def _warn_once(self, reasons: Mapping[str, str]) -> None:
        for name, why in reasons.items():
            if name not in self._unknown:
                self._unknown.add(name)
                LOGGER.warning("QKClip: the largest logits of %s were not seen, so it is not clipped: %s", name, why)

    def _factors(self, gamma: Tensor) -> Tensor:
        """One factor for each projection's head, and 1 for what is no head's."""
        of_group = torch.ones_like(gamma).scatter_reduce(0, self._groups, gamma, "amin")
        factors = of_group[self._targets] ** self._exponents  # 1 to any power is 1
        return torch.cat([factors, factors.new_ones(1)])


def _check_monitor(monitor: LogitSource) -> None:
    if isinstance(monitor, AttentionMonitor) and (monitor.every > 1 or "max_logit" not in monitor.series.columns):
        raise OptionError(
            f"{VERB}: expected a monitor that reads max_logit at every step, found every={monitor.every} and columns "
            f"{', '.join(monitor.series.columns)}; make it with every=1, or leave monitor= out for one of its own"
        )


# Which layers


def _refuse_unreachable(site: AttentionSite) -> None:
    reason = next((UNREACHABLE[word] for word in site.modifiers if word in UNREACHABLE), None)
    if site.kind == "cross_covariance":
        reason = "its queries and keys are normalised over the tokens, so that W_Q and W_K do not scale the logits"
    if reason is not None:
        raise UnsupportedLayoutError(site.name, reason, class_name=type(site.module).__name__, advice=LEAVE_OUT)


def _gains(site: AttentionSite) -> dict[str, Gain]:
    """The gains of queries and keys, which have an entry for every channel of every head.

    Raises: UnsupportedLayoutError if all heads share a gain, or it cannot be found.
    """
    found, reason = find_gains(site)
    for gain in found.values():
        if gain.num_heads == 1:
            reason = f"the gain of its QK-norm, {gain.name} of {gain.weight.numel()} entries, is shared by all heads"
        elif gain.offset:
            reason = f"its QK-norm multiplies by 1 + its gain {gain.name}"
    if reason:
        raise UnsupportedLayoutError(
            site.name,
            f"{reason}; W_Q and W_K do not scale its logits.",
            class_name=type(site.module).__name__,
            advice=f"A norm bounds the logits by its gain: QK-Clip is not needed there. {LEAVE_OUT}",
        )
    return found


@torch.no_grad()
def _check_correction(site: AttentionSite) -> None:
    """W + C must scale head by head as W does: `polar` and `balanced` do, `identity` does not."""
    for role in ("query", "key"):
        slot = site.by_role(role)
        correction = corrections_of(slot.owner).get(slot.weight_name)
        if correction is None:
            continue
        raw = full_tensor(slot.parameter).detach()
        factors = torch.linspace(0.5, 0.9, slot.num_heads, device=raw.device, dtype=raw.dtype)[:, None, None]
        scaled = raw.clone()
        slot.put_heads_(scaled, factors * slot.take_heads(raw))
        expected = factors * slot.take_heads(correction.effective(slot.owner, raw))
        got = slot.take_heads(correction.effective(slot.owner, scaled))
        if float((got - expected).norm()) > 1e-2 * float(expected.norm()):
            raise ConditioningError(
                f"{site.name} ({role}) is conditioned, and W + C does not scale as W does, so that clipping W would "
                f"not clip the logits: expected a correction that does, as balanced or polar per head. {FOLD}"
            )


FOLD = "Call wellcond.fold_(model) first, or leave the layer out with sites=..."


# What is multiplied by what


def _layers(sites: list[AttentionSite], alpha: float) -> Iterator[_Layer]:
    """The groups of heads of every layer; layers that share queries or keys share their groups too."""
    first, num_groups = 0, 0
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for site in sites:
        query, key = site.by_role("query"), site.by_role("key")
        places = [(id(slot.parameter), tuple(slot.rows.flatten().tolist())) for slot in (query, key)]
        own = 1.0 if any(word in site.modifiers for word in ON_QUERIES_ALONE) else alpha
        own = 0.5 if places[0] == places[1] else own
        of_queries, of_keys = torch.arange(query.num_heads), torch.arange(key.num_heads)
        if site.talking_heads:  # the logits of a head are mixed from those of all
            of_queries, of_keys = torch.zeros_like(of_queries), torch.zeros_like(of_keys)
        elif own < 1:
            of_queries = of_queries // (query.num_heads // key.num_heads)
        begin = next((known[place] for place in places if place in known), num_groups)
        known.update(dict.fromkeys(places, begin))
        yield _Layer(site, first, own, of_queries + begin, of_keys + begin)
        first += query.num_heads
        num_groups = max(num_groups, begin + query.num_heads)


def _plan(
    layers: list[_Layer], gains: Mapping[str, Mapping[str, Gain]], masters: Mapping[Tensor, Tensor]
) -> tuple[Tensor, Tensor, RowFactors]:
    """The group and the exponent of every factor, and what the factors multiply."""
    rows, targets, exponents = RowFactors(), [], []
    count = 0
    for layer in layers:
        for role, groups, exponent in (
            ("query", layer.query_groups, layer.alpha),
            ("key", layer.key_groups, 1 - layer.alpha),
        ):
            if exponent == 0:
                continue
            slot = layer.site.by_role(role)
            numbers = count + torch.arange(slot.num_heads)
            for stored, heads in _stored(slot, gains.get(layer.site.name, {}).get(role)):
                rows.add(stored, heads, numbers)
                if stored in masters:
                    rows.add(masters[stored], heads, numbers)
            count += slot.num_heads
            targets.append(groups)
            exponents.append(torch.full((slot.num_heads,), exponent))
    return torch.cat(targets), torch.cat(exponents), rows


def _held(
    layers: list[_Layer], gains: Mapping[str, Mapping[str, Gain]], masters: Mapping[Tensor, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for layer in layers:
        for role in ("query", "key"):
            gain = gains.get(layer.site.name, {}).get(role)
            stored = layer.site.by_role(role).parameter if gain is None else gain.weight
            yield f"{layer.site.name} ({role})", masters.get(stored, stored)


def _stored(slot: Slot, gain: Gain | None) -> list[tuple[Tensor, Tensor]]:
    """The tensors whose entries scale with the heads of a projection, with the head of every entry."""
    if gain is not None:
        heads = torch.arange(slot.num_heads, dtype=torch.int16).repeat_interleave(slot.head_dim)
        return [(one, heads.view(one.shape)) for one in (gain.weight, gain.bias) if one is not None]
    bias = slot.stored_bias()
    return [(slot.parameter, heads_of_weight(slot))] + ([] if bias is None else [(bias, heads_of_bias(slot, bias))])

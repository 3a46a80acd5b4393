"""What the weights alone say: spectra and circuits of every head, and what changed between two checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.find import find_attention
from wellcond.attention.sharding import unwrap
from wellcond.attention.site import AttentionSite
from wellcond.doctor.records import defined
from wellcond.errors import DiagnosisError
from wellcond.linalg.circuits import circuit_numbers, gram_matrices
from wellcond.measurement.records import make_frame
from wellcond.pages import shorten

NO_BATCH = "tokens, logits and attention map: no batch was given"


def spectral_facts(site: AttentionSite) -> dict[str, Any]:
    """The worst condition number, lowest effective rank and SEC indices of W_Q, W_K, W_V and W_O of a layer."""
    numbers = head_numbers(site)
    kappas = [float(numbers[f"kappa_{role}"].max()) for role in site.slots]
    ranks = torch.stack([numbers[f"rank_{role}"] for role in site.slots])
    return {
        "kappa_weights": max((kappa for kappa in kappas if not math.isnan(kappa)), default=None),
        "effective_rank": defined(float(ranks.min())),
        "sec_qk": defined(float(numbers["sec_qk"].max())),
        "sec_ov": defined(float(numbers["sec_ov"].max())),
    }


@torch.no_grad()
def head_numbers(site: AttentionSite) -> dict[str, Tensor]:
    """Numbers of every query head of a layer (`wellcond.linalg.circuits`)."""
    grams = gram_matrices({role: slot.read() for role, slot in site.slots.items()})
    return circuit_numbers({role: gram.cpu() for role, gram in grams.items()}, site.num_heads)


@dataclass(frozen=True, kw_only=True)
class HeadChange:
    """One head in two checkpoints of a model."""

    layer: str
    head: int
    change_qk: float
    """Norm of the difference of W_Q^T W_K, relative to the larger of both."""
    change_ov: float
    """The same of W_O W_V; NaN without W_O."""
    kappa_q: tuple[float, float]
    rank_qk: tuple[float, float]
    sec_qk: tuple[float, float]
    sigma_max_qk: tuple[float, float]
    sigma_max_ov: tuple[float, float]


@dataclass(frozen=True)
class WeightComparison:
    """What changed between two checkpoints, head by head."""

    heads: tuple[HeadChange, ...]
    run: dict[str, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"WeightComparison({len(self.heads)} heads)"

    def to_frame(self) -> Any:
        """A row per head; pairs become two columns.

        Raises: MissingExtraError if pandas is not installed.
        """
        return make_frame([_flat(one) for one in self.heads], self.run)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def to_text(self, *, width: int = 100) -> str:
        """A line per layer with its most changed head, and the most changed heads of all."""
        layers = dict.fromkeys(one.layer for one in self.heads)
        room = max([5, *(len(name) for name in layers)])
        room = min(room, max(12, width - 66))
        lines = [f"{'layer':<{room}}  head   dQK    dOV    sec QK         rank QK        sigma QK"]
        shown = shorten(layers, room)
        for name in layers:
            inside = [one for one in self.heads if one.layer == name]
            worst = max(inside, key=lambda one: max(_number(one.change_qk), _number(one.change_ov)))
            pairs = "  ".join(_arrow(pair) for pair in (worst.sec_qk, worst.rank_qk, worst.sigma_max_qk))
            changes = f"{_short(worst.change_qk):>5}  {_short(worst.change_ov):>5}"
            lines.append(f"{shown[name] or '(model)':<{room}}  {worst.head:>4}  {changes}  {pairs}".rstrip())
        moved = sum(max(_number(one.change_qk), _number(one.change_ov)) > 0.01 for one in self.heads)
        most = max(self.heads, key=lambda one: _number(one.change_qk))
        lines += [
            "",
            f"{moved} of {len(self.heads)} heads changed by more than 1 %; most: {most.layer or '(model)'} head "
            f"{most.head} (W_Q^T W_K by {_short(most.change_qk)} of its norm).",
            "Each row is the head of a layer that changed most. dQK, dOV: norm of the difference of W_Q^T W_K and of "
            "W_O W_V, relative to the larger; a -> b: in the first and in the second checkpoint.",
        ]
        return "\n".join(lines)


def _flat(one: HeadChange) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in dataclasses.asdict(one).items():
        if isinstance(value, tuple):
            row |= {name: value[0], f"{name}_against": value[1]}
        else:
            row[name] = value
    return row


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.0e}"


def _arrow(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3g} -> {pair[1]:.3g}".ljust(14)


@torch.no_grad()
def compare_weights(model: nn.Module, other: nn.Module) -> WeightComparison:
    """What changed in every head between two checkpoints of one architecture, whatever factors the heads are stored in.

    W_Q -> M W_Q, W_K -> M^-T W_K is no change: what is compared are the products W_Q^T W_K and W_O W_V, by d x d
    matrices. Rotary embeddings stand between both factors; there it is the product without rotation.

    Args:
        model: the model with the first weights.
        other: the same architecture with the second ones.

    Raises: DiagnosisError where the attention layers of both do not correspond.

    Example:
        >>> import copy
        >>> first = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> second = copy.deepcopy(first)
        >>> _ = second.self_attn.in_proj_weight.data[:16].mul_(2)
        >>> [(round(one.change_qk, 3), round(one.change_ov, 3)) for one in compare_weights(first, second).heads]
        [(0.5, 0.0), (0.5, 0.0)]
    """
    first, second = (find_attention(unwrap(one), strict=False) for one in (model, other))
    if _shapes(first) != _shapes(second):
        raise DiagnosisError(
            f"expected two checkpoints of one architecture, found {_describe(first)} and {_describe(second)}"
        )
    rows: list[HeadChange] = []
    for a, b in zip(first, second, strict=True):
        rows += _changes(a, b)
    return WeightComparison(tuple(rows))


def _shapes(sites: Sequence[AttentionSite]) -> list[tuple[str, int, int, int]]:
    return [(site.name, site.num_heads, site.head_dim, site.in_features) for site in sites]


def _describe(sites: Sequence[AttentionSite]) -> str:
    return f"{len(sites)} layers of {sites[0].num_heads} heads x {sites[0].head_dim}"


def _changes(a: AttentionSite, b: AttentionSite) -> list[HeadChange]:
    before, after = head_numbers(a), head_numbers(b)
    weights = [{role: slot.read().double().cpu() for role, slot in site.slots.items()} for site in (a, b)]
    qk = _difference(a.num_heads, *((w["q"].mT, w["k"]) for w in weights))
    ov = torch.full((a.num_heads,), math.nan)
    if a.o is not None and b.o is not None and a.o.num_heads == a.num_heads:
        ov = _difference(a.num_heads, *((w["o"], w["v"]) for w in weights))

    def pair(name: str, head: int) -> tuple[float, float]:
        return float(before[name][head]), float(after[name][head])

    return [
        HeadChange(
            layer=a.name,
            head=head,
            change_qk=float(qk[head]),
            change_ov=float(ov[head]),
            kappa_q=pair("kappa_q", head),
            rank_qk=pair("rank_qk", head),
            sec_qk=pair("sec_qk", head),
            sigma_max_qk=pair("sigma_max_qk", head),
            sigma_max_ov=pair("sigma_max_ov", head),
        )
        for head in range(a.num_heads)
    ]


def _difference(num_heads: int, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """|A1 B1 - A2 B2| / max(|A1 B1|, |A2 B2|) for A (heads, D, d), B (heads, d, D), by d x d products."""

    def inner(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
        a, b, c, d = (part.repeat_interleave(num_heads // len(part), 0) for part in (*left, *right))
        return ((a.mT @ c) * (b @ d.mT)).sum((1, 2))

    aa, bb, ab = inner(first, first), inner(second, second), inner(first, second)
    return ((aa + bb - 2 * ab).clamp_min(0.0) / torch.maximum(aa, bb)).sqrt()

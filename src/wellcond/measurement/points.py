"""`TrackPoint`: what is recorded of one head at one step of a training."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wellcond.files import json_ready
from wellcond.linalg.records import show_kappas
from wellcond.measurement.records import HeadReport


@dataclass(frozen=True, kw_only=True)
class TrackPoint:
    """One head at one step.

    Condition numbers of the Jacobian are geometric means over samples; everything else about Jacobian, bounds and
    attention map is of the first sample. What is about the Jacobian (also norms and bounds) is None where only weights
    and attention maps were measured, and what is about the attention map where that is not known. A measurement
    that failed has the status ``failed``, its `problem`, and NaN for numbers. Of grouped queries, q is the worst.
    """

    step: int
    layer: str
    head: int
    condition_number: float | None = None
    pseudo_condition_number: float | None = None
    sigma_max: float | None = None
    sigma_rank: float | None = None
    rank: int | None = None
    nullity: int | None = None
    status: str | None = None
    norm_q: float | None = None
    norm_k: float | None = None
    norm_v: float | None = None
    kappa_q: float = math.nan
    kappa_k: float = math.nan
    kappa_v: float = math.nan
    sigma_max_q: float = math.nan
    sigma_max_k: float = math.nan
    sigma_max_v: float = math.nan
    sigma_min_q: float = math.nan
    sigma_min_k: float = math.nan
    sigma_min_v: float = math.nan
    raw_kappa_q: float = math.nan
    raw_kappa_k: float = math.nan
    raw_kappa_v: float = math.nan
    raw_sigma_max_q: float = math.nan
    raw_sigma_max_k: float = math.nan
    raw_sigma_max_v: float = math.nan
    raw_sigma_min_q: float = math.nan
    raw_sigma_min_k: float = math.nan
    raw_sigma_min_v: float = math.nan
    papers_bound_log10: float | None = None
    """Of the papers' surrogate, which is not a bound."""
    bound_log10: float | None = None
    """Of a bound that holds."""
    entropy: float | None = None
    normalised_entropy: float | None = None
    diagonal_mass: float | None = None
    max_probability: float | None = None
    logit_std: float | None = None
    dead: bool = False
    seconds: float = 0.0
    """Wall time, in equal shares where several heads were measured together; the only field that is not determined."""
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_json_dict(self) -> dict[str, Any]:
        """Plain data with infinities and NaN as text: `json.dumps` of it is standard JSON."""
        return json_ready(self.to_dict())

    def __repr__(self) -> str:
        """One line."""
        where = f"step {self.step}, {self.layer!r} head {self.head}"
        if self.status == "failed":
            return f"TrackPoint({where}, failed: {self.problem})"
        if self.condition_number is None or self.pseudo_condition_number is None:
            weights = ", ".join(f"{getattr(self, f'kappa_{role}'):.4g}" for role in "qkv")
            return f"TrackPoint({where}, kappa of q, k, v: {weights})"
        return f"TrackPoint({where}, {show_kappas(self.condition_number, self.pseudo_condition_number)}, {self.status})"

    def to_line(self, run: Mapping[str, str]) -> str:
        """One line of JSON, with what was measured: model, input and version."""
        return json.dumps(self.to_json_dict() | dict(run))


def numbers_of(head: HeadReport) -> dict[str, Any]:
    """Fields of a point from what was measured."""
    numbers: dict[str, Any] = {"dead": head.dead, "bound_log10": head.bound_log10,
                               "papers_bound_log10": head.papers_bound_log10}  # fmt: skip
    for prefix, weights in (("", head.weights), ("raw_", head.raw_weights)):
        for role, found in weights.items():
            numbers[f"{prefix}kappa_{role}"] = found.condition_number
            numbers[f"{prefix}sigma_max_{role}"] = found.sigma_max
            numbers[f"{prefix}sigma_min_{role}"] = found.sigma_min
    if head.jacobian is not None:
        numbers |= {name: getattr(head.jacobian, name) for name in JACOBIAN_FIELDS}
        numbers["condition_number"] = head.mean_kappa("strict")
        numbers["pseudo_condition_number"] = head.mean_kappa("pseudo")
    if head.diagnosis is not None:
        numbers |= {f"norm_{role}": getattr(head.diagnosis, f"norm_{role}") for role in "qkv"}
    if head.attention is not None:
        numbers |= dataclasses.asdict(head.attention)
    return numbers


JACOBIAN_FIELDS = ("sigma_max", "sigma_rank", "rank", "nullity", "status")
ATTENTION_FIELDS = ("entropy", "normalised_entropy", "diagonal_mass", "max_probability", "logit_std")
JACOBIAN_NUMBERS = ("condition_number", "pseudo_condition_number", "sigma_max", "sigma_rank", "norm_q", "norm_k",
                    "norm_v", "papers_bound_log10", "bound_log10")  # fmt: skip


def without_jacobian(numbers: dict[str, Any]) -> dict[str, Any]:
    """Fields of a point whose Jacobian, where there is one, is left out."""
    return {name: value for name, value in numbers.items() if name not in JACOBIAN_FIELDS + JACOBIAN_NUMBERS}


def failed_numbers(jacobian: bool) -> dict[str, Any]:
    """Fields of a point where the measurement failed; an integer has no NaN and stays None."""
    names = ATTENTION_FIELDS + (JACOBIAN_NUMBERS if jacobian else ())
    return {"status": "failed"} | dict.fromkeys(names, math.nan)

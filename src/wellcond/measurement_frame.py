"""A measurement as a table of pandas, one row per head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from wellcond.errors import MissingExtraError

JACOBIAN = ("sigma_max", "sigma_min", "sigma_rank", "rank", "nullity", "method")


def make_frame(report: Any) -> Any:
    """Heads of a `MeasurementReport` as a `pandas.DataFrame`; a layer that was not measured has a row with why.

    Raises: MissingExtraError if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("pandas", "train") from error  # which has it through datasets
    rows = [
        {"layer": layer.name, "kind": layer.kind, "num_tokens": layer.num_tokens} | found
        for layer in report.layers
        for found in [*map(_columns, layer.heads), *([{"problem": layer.problem}] if layer.problem else [])]
    ]
    frame = pandas.DataFrame(rows)
    if rows and "head" in frame:
        whole = [name for name in ("head", "rank", "nullity") if name in frame]
        frame = frame.astype(dict.fromkeys(whole, "Int64"))
    frame.attrs |= {"convention": report.convention, "kappa": report.kappa, "combine": report.combine, **report.run}
    return frame


def _columns(head: Any) -> dict[str, Any]:
    """One head; names as in `TrackPoint`, NaN or None where something was not measured or is not defined."""
    jacobian, diagnosis, attention = head.jacobian, head.diagnosis, head.attention
    row: dict[str, Any] = {
        "head": head.index,
        "kappa": head.mean_kappa(),
        "condition_number": head.mean_kappa("strict"),
        "pseudo_condition_number": head.mean_kappa("pseudo"),
        "why_not_finite": head.why_not_finite,
        "status": head.status,
        "verdict": head.verdict,
        "dead": head.dead,
    }
    row |= {name: None if jacobian is None else getattr(jacobian, name) for name in JACOBIAN}
    row |= {f"norm_{role}": _number(getattr(diagnosis, f"norm_{role}", None)) for role in "qkv"}
    row |= dataclasses.asdict(attention) if attention is not None else {}
    for prefix, weights in (("", head.weights), ("raw_", head.raw_weights)):
        row |= {f"{prefix}kappa_{role}": found.condition_number for role, found in weights.items()}
    row |= {name: _number(getattr(head, name)) for name in ("bound_log10", "papers_bound_log10")}
    return row | {"how": head.how, "problem": ""}


def _number(value: float | None) -> float:
    return math.nan if value is None else value

"""What ran, with which versions, on what machine and under which settings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.table import Table

MOST_SHOWN = 4


def data_of(comparison: Comparison) -> str:
    """The data that ran, in words."""
    data = next((run.part("data") for run in comparison.runs if run.part("data")), {})
    return str(data.get("description") or data.get("name") or "not recorded")


def provenance_table(comparison: Comparison) -> Table:
    """With which versions, on what, and with which settings the runs were made: what they share, where they differ."""
    runs = comparison.runs
    rows = [
        (f"{part}: {key}", plain_setting(value))
        for part in ("data", "model")
        for key, value in sorted(runs[0].part(part).items())
    ]
    sessions = [session for run in runs for session in run.sessions]
    skipped = ("started", "resumed_at_step")
    rows += [(f"session: {key}", text) for key, text in _shared(sessions) if key not in skipped]
    if resumed := sum(len(run.sessions) > 1 for run in runs):
        rows.append(("resumed runs", str(resumed)))
    rows += [(f"recipe: {key}", text) for key, text in _shared([run.part("config") for run in runs])]
    return Table("provenance", "Versions, machine and settings", ("item", "value"), tuple(rows), (), frozenset({0, 1}))


def _shared(mappings: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Settings of several runs with dotted names, and which of their values differ."""
    found, flat = [], [_flat(mapping) for mapping in mappings]
    for key in sorted({key for settings in flat for key in settings}):
        values = list(dict.fromkeys(settings.get(key, "not set") for settings in flat))
        more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
        differing = f"differs between runs: {'; '.join(values[:MOST_SHOWN])}{more}"
        found.append((key, values[0] if len(values) == 1 else differing))
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict) or not (value or not prefix):
        return {prefix: plain_setting(value)}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def plain_setting(value: Any) -> str:
    """Text of a value; of a path only its last part, since where things lay is nobody's business."""
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True)
    if re.match(r"(/|~|[A-Za-z]:[\\/]).*[^/\\]$", value):
        return "…/" + re.split(r"[/\\]", value)[-1]
    return value

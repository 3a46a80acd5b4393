"""Table of provenance: with which versions, on what, and with which settings the runs were made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.table import Table

MOST_SHOWN = 4


def data_of(comparison: Comparison) -> str:
    """The data that ran, in words."""
    found = [run.record["data"] for run in comparison.runs if run.record.get("data")]
    data = found[0] if found else {}
    return str(data.get("description") or data.get("name") or "not recorded")


def provenance_table(comparison: Comparison) -> Table:
    """What all runs share, and where they differ."""
    rows: list[tuple[str, str]] = []
    for run in comparison.runs[:1]:
        data, model = run.record.get("data") or {}, run.record.get("model") or {}
        rows += [(f"data: {key}", _plain(value)) for key, value in sorted(data.items())]
        rows += [(f"model: {key}", _plain(value)) for key, value in sorted(model.items())]
    sessions = [_flat(session) for run in comparison.runs for session in run.record.get("sessions") or ()]
    skipped = ("started", "resumed_at_step")
    rows += [(f"session: {key}", text) for key, text in _shared(sessions) if key not in skipped]
    resumed = sum(len(run.record.get("sessions") or ()) > 1 for run in comparison.runs)
    if resumed:
        rows.append(("resumed runs", str(resumed)))
    configs = [_flat(run.record.get("config") or {}) for run in comparison.runs]
    rows += [(f"recipe: {key}", text) for key, text in _shared(configs)]
    return Table("provenance", "Versions, machine and settings", ("item", "value"), tuple(rows), (), frozenset({0, 1}))


def session_differences(comparison: Comparison) -> list[str]:
    """Facts about machine or versions that are not the same in all runs, as text."""
    keys = ("device", "device_name", "threads", "processes", "precision", "torch", "wellcond")
    found = []
    for key in keys:
        values = {
            _plain(session.get(key)) for run in comparison.runs for session in run.record.get("sessions") or ()
        }  # fmt: skip
        if len(values) > 1:
            found.append(f"{key} ({', '.join(sorted(values))})")
    return found


def _shared(mappings: list[dict[str, str]]) -> Iterable[tuple[str, str]]:
    keys = sorted({key for mapping in mappings for key in mapping})
    for key in keys:
        values = list(dict.fromkeys(mapping.get(key, "not set") for mapping in mappings))
        if len(values) == 1:
            yield key, values[0]
        else:
            more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
            yield key, f"differs between runs: {'; '.join(values[:MOST_SHOWN])}{more}"


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings with dotted names."""
    if isinstance(value, dict) and (value or not prefix):
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: _plain(value)}


def _plain(value: Any) -> str:
    """Text of a value; of a path only its last part, since where things lay is nobody's business."""
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True)
    if re.match(r"(/|~|[A-Za-z]:[\\/]).*[^/\\]$", value):
        return "…/" + re.split(r"[/\\]", value)[-1]
    return value

"""Records of runs, which training writes and reports read: what one must hold, and checksums that show later changes.

A record without a checksum, as earlier versions wrote it, is checked for everything else.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from wellcond.files import to_json

SCHEMA = 1
STATES = ("running", "finished", "diverged", "failed", "interrupted")
COMPLETE = ("finished", "diverged")
LOGS = ("steps.jsonl", "evaluations.jsonl", "conditioning.jsonl")
CHECKSUM = "checksum"
CORRELATIONS = ("matthews", "pearson", "spearman")
"""Metrics that may be negative."""


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a checksum over its content, which does not depend on layout or the order of keys.

    Example:
        >>> sealed = seal({"seed": 3})
        >>> find_change(sealed), find_change(sealed | {"seed": 4})
        ('', 'was changed after it was written: its checksum does not match')
    """
    return record | {CHECKSUM: checksum(record)}


def find_change(record: dict[str, Any]) -> str:
    """How the checksum of a record shows a change; empty if it shows none."""
    if CHECKSUM not in record or record[CHECKSUM] == checksum(record):
        return ""
    return "was changed after it was written: its checksum does not match"


def checksum(record: dict[str, Any]) -> str:
    """SHA-256 over the content of a record, but for the checksum that it may hold."""
    content = {key: value for key, value in record.items() if key != CHECKSUM}
    as_read = json.loads(to_json(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode("ascii")).hexdigest()


def read_record(path: Path, kind: str) -> dict[str, Any]:
    """A record of a kind, without its checksum.

    Raises: OSError; ValueError for anything else, for a record that was changed or is of another version of wellcond,
        and for one of a run with scores that cannot be.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable JSON ({error})") from error
    if not isinstance(record, dict) or record.get("kind") != kind:
        raise ValueError(f"expected a record of kind {kind!r}, found something else")
    if record.get("schema") != SCHEMA:
        found = f"found {record.get('schema')!r}: it is of another version of wellcond, which can read it"
        raise ValueError(f"expected schema {SCHEMA}, {found}")
    if problem := find_problem(record) if kind == "wellcond-run" else find_change(record):
        raise ValueError(problem)
    return {key: value for key, value in record.items() if key != CHECKSUM}


def find_problem(record: dict[str, Any]) -> str:
    """What is wrong with the record of a run; empty if nothing is.

    Example:
        >>> accuracy = {"name": "accuracy", "higher_is_better": True, "percent": True}
        >>> record = {"method": "default", "seed": 0, "status": "finished", "metric": accuracy}
        >>> find_problem(record | {"final": {"accuracy": 1.7}})
        "expected 'final.accuracy' to be a number from 0 to 1, found 1.7"
    """
    if changed := find_change(record):
        return changed
    sessions = record.get("sessions") or []
    if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
        return "expected 'sessions' to be a list of mappings"
    wanted: dict[str, type] = {"method": str, "seed": int, "status": str}
    if record.get("metric") is not None or record.get("status") in COMPLETE:
        wanted["metric"] = dict  # a run that failed early has none
    for key, kind in wanted.items():
        if not isinstance(record.get(key), kind):
            return f"expected {key!r} to be {kind.__name__}, found {record.get(key)!r}"
    if record["status"] not in STATES:
        return f"expected a status of {', '.join(STATES)}, found {record['status']!r}"
    metric = record.get("metric") or {}
    if "metric" in wanted and not (isinstance(metric.get("name"), str) and "higher_is_better" in metric):
        return "expected 'metric' to have name and higher_is_better"
    if record["status"] == "finished" and record.get("final") is None:
        return "expected 'final' to be a mapping, found None, though the run is finished"
    if not _are_marks(record.get("logs", {})):
        return f"expected 'logs' to have bytes and sha256 of each log, found {record['logs']!r}"
    problems = (_score_problem(record, entry) for entry in ("final", "best", "test"))
    return next(filter(None, problems), "")


def _score_problem(record: dict[str, Any], entry: str) -> str:
    """What is wrong with the metric of an entry. An infinite perplexity is written as text, since JSON has none."""
    scores, metric = record.get(entry), record.get("metric")
    if scores is None or metric is None:
        return ""
    if not isinstance(scores, dict):
        return f"expected {entry!r} to be a mapping, found {scores!r}"
    name = metric["name"]
    lowest, highest = -1.0 if name in CORRELATIONS else 0.0, 1.0 if metric.get("percent") else math.inf
    value: Any = math.inf if scores.get(name) == "inf" else scores.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and lowest <= value <= highest:
        return ""
    found = f"found {scores[name]!r}" if name in scores else "but it is missing"
    return f"expected '{entry}.{name}' to be a number from {lowest:g} to {highest:g}, {found}"


def _are_marks(marks: Any) -> bool:
    return isinstance(marks, dict) and all(
        isinstance(mark, dict) and isinstance(mark.get("bytes"), int) and isinstance(mark.get("sha256"), str)
        for mark in marks.values()
    )


def log_mark(size: int, digest: hashlib._Hash) -> dict[str, Any]:
    """How a record notes what a log held when it was written; a log only grows from there."""
    return {"bytes": size, "sha256": digest.hexdigest()}


def matches(mark: dict[str, Any], content: bytes, *, complete: bool) -> bool:
    """Whether a log begins with what a mark notes; a complete one ends there as well."""
    size = mark["bytes"]
    if len(content) < size or (complete and len(content) > size):
        return False
    return hashlib.sha256(memoryview(content)[:size]).hexdigest() == mark["sha256"]

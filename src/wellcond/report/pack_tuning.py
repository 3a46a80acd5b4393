"""Runs of a tuning search, in one file: what differs in their settings, and what came out; no curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellcond.report.load_runs import TUNING
from wellcond.report.packed_records import PACKED, share
from wellcond.report.run_record import Run, RunRecordError, read_json

FILE = "tuning.json"
KIND = "wellcond-tuning"
KEPT = ("method", "seed", "status", "reason", "final", "best", "test", "config", "config_hash", "metric")


def pack_tuning(folder: Path) -> dict[str, Any] | None:
    """`tuning.json` of a comparison with the runs of its search inside; None if nothing was searched.

    Every run is at its folder below `tuning/`; what most of them share is stored once.

    Raises: RunRecordError if a record is broken or of a run that has not ended.
    """
    if not (folder / FILE).is_file():
        return None
    runs = {}
    for path in sorted((folder / TUNING).rglob("run.json")):
        run = Run(path.parent, read_json(path, "wellcond-run"))
        if run.outcome == "partial":
            raise RunRecordError(path, f"is of a run that is {run.status}", "Finish it, or delete its folder.")
        kept = {key: run.record[key] for key in KEPT if key in run.record}
        runs[path.parent.relative_to(folder / TUNING).as_posix()] = kept
    shared, rests = share(list(runs.values()))
    return read_json(folder / FILE, KIND) | {
        "packed": {"kind": PACKED, "shared": shared, "runs": dict(zip(runs, rests, strict=True))}
    }

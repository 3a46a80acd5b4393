"""`pack`: a comparison as one file of JSON lines, a line for each run, from which every table comes out the same.

What a table prints is kept: scores in full, and the first and the last measurement of every head. Curves have as many
digits and points as a plot shows: 60 training steps, and between the first and the last measurement one mean over the
weights and attention maps of all heads; the Jacobian of each head stays. `wellcond.lab.records` reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.files import to_json, write_atomically
from wellcond.lab.records import (
    ARITHMETIC,
    JACOBIAN,
    KAPPAS,
    LARGEST,
    MEASURED,
    ROLES,
    SCHEMA,
    SMALLEST,
    Comparison,
    Keys,
    Rows,
    Run,
    check_stays_inside,
    leaves_of,
    load_comparisons,
    log_mark,
    packed_path,
    read_packed,
    seal,
)
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.page import gather
from wellcond.lab.report.statistics import summarise_logs
from wellcond.lab.report.table import finite_mean, number, table_markdown

OWN = ("kind", "method", "seed", "status", "test", "final", "best", "samples", "fine_tuned")
"""Keys of a line of a run that are never shared: what it is and what came out."""
LEFT_OUT = ("schema", "kind", "slug", "config_hash", "logs", "samples")
"""Keys of the record of a run folder that follow from others, or are about the folder."""
IN_CURVES = ("epoch", "train_loss", "seconds")
"""Numbers of an evaluation that its curves have as well."""
MOST_POINTS = 60
CURVES = ("loss", *(f"grad_norm_{role}" for role in ROLES))


def pack(folder: Path, output: Path) -> list[Path]:
    """Write every comparison below a folder as one file: the one in FOLDER/a/b as OUTPUT/a/b.jsonl.

    Each is first written elsewhere and read again, and replaces what was there only if all tables keep their bytes.
    """
    folder, output = Path(folder).resolve(), Path(output)
    if output.resolve().is_relative_to(folder) or folder.is_relative_to(output.resolve()):
        raise RunRecordError(output, f"is {folder}, or in it, or above it", "Give another folder to write to.")
    found = load_comparisons(folder)
    for run in [run for comparison in found for run in comparison.runs]:
        if run.curves is not None:
            raise RunRecordError(run.file, "is packed already", "Give the folder of the full runs.")
        if run.outcome == "partial":
            raise RunRecordError(run.file, f"is of a run that is {run.status}", "Finish it, or delete its folder.")
    places = [output / comparison.folder.relative_to(folder) for comparison in found]
    places = [packed_path(place) for place in places]
    for place in places:  # before anything is written
        check_stays_inside(output if output in place.parents else output.parent, [place])
    return [_write(comparison, place) for comparison, place in zip(found, places, strict=True)]


def _write(comparison: Comparison, place: Path) -> Path:
    content = packed_lines(comparison)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / place.name
        copy.write_bytes(content)
        before, after = (gather(analyse(some), figures=False) for some in (comparison, read_packed(copy)))
    pairs = zip(before.tables, after.tables, strict=True)
    if changed := [old.name for old, new in pairs if table_markdown(old) != table_markdown(new)]:
        problem = f"packed, these tables would change: {', '.join(changed)}"
        raise RunRecordError(comparison.folder, problem, "This is a bug in wellcond.")
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(place, content)
    return place


def packed_lines(comparison: Comparison) -> bytes:
    """The file of a comparison: itself, its search, the runs of that, and its own runs by method and seed."""
    shown: dict[str, Run] = {}  # samples of other runs are shown nowhere
    for run in comparison.runs:
        if run.finished and run.record.get("samples"):
            shown.setdefault(run.method, run)
    runs = [run for method in comparison.methods for run in comparison.of(method)]
    shared, rests = share([_whole(run, with_samples=run is shown.get(run.method)) for run in runs])
    lines = [*_search_lines(comparison), *rests]
    rest = "".join(f"{to_json(line, compact=True)}\n" for line in lines).encode()
    # Runs of `train` have no record of a comparison; all but its name follows from them.
    stored = {"name": comparison.name} if comparison.stored is None else dict(comparison.stored)
    stored = {key: value for key, value in stored.items() if key not in ("schema", "kind", "settings_hash")}
    first = {"kind": "comparison", "schema": SCHEMA, **stored, "shared": shared}
    first["lines"] = log_mark(len(rest), hashlib.sha256(rest))
    return to_json(seal(first)).encode() + b"\n" + rest


def _search_lines(comparison: Comparison) -> list[dict[str, Any]]:
    """The search before a comparison, and a line for each value that it tried; no score where a run diverged."""
    if comparison.search is None:
        return []
    kept = {key: value for key, value in comparison.search.items() if key not in ("schema", "kind", "settings_hash")}
    methods = [{key: row[key] for key in ("label", "canonical", "at_edge") if key in row} for row in kept["methods"]]
    points = [
        {"kind": "tuning", "method": row["label"], "values": point["values"], "scores": point["scores"]}
        for row in kept["methods"]
        for point in row["points"]
    ]
    return [{"kind": "search", **kept, "methods": methods}, *points]


def _whole(run: Run, *, with_samples: bool) -> dict[str, Any]:
    """A record with its rows as columns."""
    kept = {"kind": "run", **_kept(run.record)}
    if tuned := run.fine_tuned():
        kept["fine_tuned"] = {f"{one.folder.parent.name}/seed-0": _kept(one.record) for one in tuned}
    if with_samples:
        kept["samples"] = run.record["samples"]
    curves = {
        "steps": pack_steps(run.steps),
        "evaluations": pack_evaluations(run.evaluations, run.metric.name),
        "conditioning": pack_heads(run.conditioning),
    }
    kept["curves"] = {name: columns for name, columns in curves.items() if columns}
    return kept


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what is left out; sessions by number, so that what is equal in them can be shared."""
    sessions = {str(at): session for at, session in enumerate(record.get("sessions") or ())}
    kept = {key: value for key, value in record.items() if key not in LEFT_OUT} | {"sessions": sessions}
    config = kept.get("config")
    if isinstance(config, dict) and isinstance(config.get("method"), dict):
        kept.pop("method_spec", None)
    for part in ("final", "best"):
        if isinstance(scores := kept.get(part), dict):
            kept[part] = {key: value for key, value in scores.items() if key not in IN_CURVES}
    return kept


def share(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all records have in common, and of each record the rest; `records.merge` puts them together again."""
    flat = [dict(leaves_of(record)) for record in runs]
    texts = [{path: json.dumps(leaf, sort_keys=True) for path, leaf in leaves.items()} for leaves in flat]
    shared = {
        path: leaf
        for path, leaf in flat[0].items()
        if path[0] not in OWN and all(leaves.get(path) == texts[0][path] for leaves in texts)
    }
    rests = [_nested({path: leaf for path, leaf in own.items() if path not in shared}) for own in flat]
    return _nested(shared), [{key: rest[key] for key in sorted(rest, key=_place)} for rest in rests]


def _place(key: str) -> int:
    """Where a key stands in a line: first what a run is and what came out, last what is long."""
    order = (*OWN[:7], "config", None, "samples", "fine_tuned", "curves")
    return order.index(key) if key in order else order.index(None)


def _nested(leaves: dict[Keys, Any]) -> dict[str, Any]:
    """Mappings of mappings from `leaves_of`."""
    made: dict[str, Any] = {}
    for path, leaf in leaves.items():
        place = made
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = leaf
    return made


def to_columns(rows: Rows, exact: Sequence[str] = (), digits: Mapping[str, int] = {}) -> dict[str, list[Any]]:
    """Rows as a list for each key, rounded unless it is to be exact; keys that no row has a value for are left out."""
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) if key in exact else _rounded(row.get(key), digits.get(key, 7)) for row in rows]
        if any(value is not None for value in values):
            columns[key] = values
    return columns


def pack_steps(rows: Rows) -> dict[str, list[Any]]:
    """Training rows; many of them as means over equal stretches, each placed at its end."""
    size = max(math.ceil(len(rows) / MOST_POINTS), 1)
    kept = []
    for part in [rows[start : start + size] for start in range(0, len(rows), size)]:
        means = {key: finite_mean(number(row.get(key)) for row in part) for key in CURVES}
        kept.append({"step": part[-1]["step"], "epoch": part[-1].get("epoch"), **means})
    return to_columns(kept, digits={"loss": 4, **dict.fromkeys(CURVES[1:], 3)})


def pack_evaluations(rows: Rows, metric: str) -> dict[str, list[Any]]:
    """Evaluations: the metric in full, since matching compares it."""
    keys = dict.fromkeys(("step", "epoch", metric, "loss", "seconds"))
    return to_columns([{key: row.get(key) for key in keys} for row in rows], exact=("epoch", metric))


def pack_heads(rows: Rows) -> dict[str, list[Any]]:
    """Measured heads: all of them where a quantity is first or last measured; the Jacobian everywhere; else means.

    Means are over heads and layers, geometric or arithmetic, of finite values; infinite if all are. The smallest
    singular value is left out, since it is the largest over the condition number.
    """
    ends: set[Any] = set()
    for key in (*JACOBIAN[:4], *ARITHMETIC, *KAPPAS):
        steps = [row["step"] for row in rows if row.get(key) is not None]
        ends |= {*steps[:1], *steps[-1:]}
    kept = []
    for step, group in groupby(rows, key=lambda row: row["step"]):
        heads = list(group)
        if step in ends:
            kept += [{key: row.get(key) for key in MEASURED if key not in SMALLEST} for row in heads]
            continue
        measured = [row for row in heads if any(row.get(key) is not None for key in JACOBIAN[:4])] or heads[:1]
        listed = [{key: row.get(key) for key in (*MEASURED[:4], *JACOBIAN)} for row in measured]
        means = {key: finite_mean(number(row.get(key)) for row in heads) for key in ARITHMETIC}
        for key in (*KAPPAS, *LARGEST):
            means[key] = summarise_logs(number(row.get(key)) for row in heads).geometric_mean
        kept += [listed[0] | means, *listed[1:]]
    return to_columns(kept)


def _rounded(value: Any, digits: int) -> Any:
    """A number with some significant digits: seven are enough for means that tables print; NaN is no value."""
    if not isinstance(value, float) or math.isinf(value):
        return value
    short = float(f"{value:.{digits}g}")
    return None if math.isnan(short) else int(short) if short == int(short) and abs(short) < 1e15 else short

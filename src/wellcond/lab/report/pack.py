"""`pack`: comparisons as one small file for each run, from which every table comes out the same.

What runs share is stored once for their comparison; rows are columns of rounded numbers. What a table prints is kept:
scores in full, and the first and the last measurement of every head. Between them, the weights and attention maps of
all heads are one mean, since that is what figures show; the Jacobian of each head stays. `records` reads it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellcond.files import to_json, write_atomically
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.glue import rebuild_glue
from wellcond.lab.report.load_runs import MARK, Comparison, load_comparisons
from wellcond.lab.report.page import gather, render_markdown
from wellcond.lab.report.records import (
    ARITHMETIC,
    COPIES,
    JACOBIAN,
    KAPPAS,
    LARGEST,
    MEASURED,
    PACKED,
    ROLES,
    SMALLEST,
    Rows,
    Run,
    RunRecordError,
    leaves_of,
    nested,
    read_json,
)
from wellcond.lab.report.statistics import summarise_logs
from wellcond.lab.report.table import finite_mean, number, table_markdown
from wellcond.lab.report.tuning import NAME as TUNING_FILE
from wellcond.run_records import SCHEMA, checksum, seal

LEFT_OUT = ("logs", "samples", "sessions")
SCORES = frozenset({"final", "best", "test"})
OWN = SCORES | {"schema", "kind", "method", "seed", "status", "samples"}
"""Fields of a record that are never shared: what a run is and what came out."""
MOST_POINTS = 60
DIGITS = 7
"""Significant digits of what is plotted, and of what tables print means of."""
STEPS = ("step", "epoch", "loss", *(f"grad_norm_{role}" for role in ROLES))


def pack(folder: Path, output: Path) -> list[Path]:
    """Write every comparison below a folder in packed form into another one, with `report/report.md` made from it.

    Each is written beside its place and read again; only if all tables come out with the same bytes does it take the
    place of what was there. The full runs stay as they are.

    Raises: RunRecordError if runs are broken, not complete, or packed already, or a table would change.
    """
    folder, output = Path(folder), Path(output)
    if output.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(output.resolve()):
        raise RunRecordError(output, f"is {folder}, or in it, or above it", "Give another folder to write to.")
    found = load_comparisons(folder)
    for run in [run for comparison in found for run in comparison.runs]:
        if run.packed is not None:
            raise RunRecordError(run.file, "is packed already", "Give the folder of the full runs.")
        if run.outcome == "partial":
            raise RunRecordError(run.file, f"is of a run that is {run.status}", "Finish it, or delete its folder.")
    return [_pack_one(comparison, output / comparison.folder.relative_to(folder)) for comparison in found]


def _pack_one(comparison: Comparison, home: Path) -> Path:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".packing-") as place:
        made = Path(place) / home.name
        for name, content in _files(comparison):
            if not (made / name).resolve().is_relative_to(made.resolve()):
                raise RunRecordError(comparison.folder, f"a run would be written to {name}", "Correct its slug.")
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(made / name, content)
        [packed] = load_comparisons(made)
        before, after = (gather(analyse(some), figures=False) for some in (comparison, packed))
        pairs = zip(before.tables, after.tables, strict=True)
        if changed := [old.name for old, new in pairs if table_markdown(old) != table_markdown(new)]:
            said = f"packed, these tables would change: {', '.join(changed)}"
            raise RunRecordError(comparison.folder, said, "This is a bug in wellcond.")
        (made / "report").mkdir()
        write_atomically(made / "report" / "report.md", render_markdown(after))
        if any(True for run in packed.runs for _ in run.fine_tuned()):
            rebuild_glue(made).with_suffix(".csv").unlink()
        _replace(home, made)
    return home


def _replace(home: Path, made: Path) -> None:
    """Put packed files into their place, and remove runs and a search that are no longer among them."""
    stored = home / "comparison.json"
    if stored.is_file() and "shared" not in read_json(stored, "wellcond-comparison"):
        raise RunRecordError(home, "holds a comparison that is not packed", "Give another folder to write to.")
    written = [path.relative_to(made) for path in sorted(made.rglob("*")) if path.is_file()]
    for name in written:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(made / name, home / name)
    for path in [*home.glob("*/seed*.json"), *home.glob(TUNING_FILE)]:
        if path.relative_to(home) not in written:
            path.unlink()


def _files(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Name below the folder, and content."""
    runs = comparison.runs
    written = [run for run in runs if run.finished and run.record.get("samples")]
    shown = {run.method: run for run in reversed(written)}
    shared, rests = share([_whole(run, with_samples=run is shown.get(run.method)) for run in runs])
    mark = checksum(shared)[:MARK]
    for run, rest in zip(runs, rests, strict=True):
        record, slug = rest | {"schema": SCHEMA, "kind": PACKED, "shared": mark}, run.record.get("slug")
        yield f"{slug or run.folder.parent.name}/seed{run.seed}.json", to_json(seal(record), compact=True) + "\n"
    # Runs of `train` have no comparison.json; all but its name follows from them.
    known: dict[str, Any] = {"schema": SCHEMA, "kind": "wellcond-comparison", "name": comparison.name}
    if (comparison.folder / "comparison.json").is_file():
        known = read_json(comparison.folder / "comparison.json", "wellcond-comparison")
    yield "comparison.json", to_json(seal(known | {"shared": shared}), compact=True) + "\n"
    if (comparison.folder / TUNING_FILE).is_file():  # has the score of every run of the search
        searched = read_json(comparison.folder / TUNING_FILE, "wellcond-tuning")
        yield TUNING_FILE, to_json(seal(searched), compact=True) + "\n"


def _whole(run: Run, *, with_samples: bool) -> dict[str, Any]:
    """A record with its rows as columns. Samples of other seeds are shown nowhere."""
    record = _without_logs(run.record)
    if with_samples:
        record["samples"] = run.record["samples"]
    packed = {
        "steps": pack_steps(run.steps),
        "evaluations": pack_evaluations(run.evaluations, run.metric.name),
        "conditioning": pack_heads(run.conditioning),
        "fine_tuned": {f"{one.folder.parent.name}/seed-0": _without_logs(one.record) for one in run.fine_tuned()},
    }
    return record | {"packed": {name: content for name, content in packed.items() if content}}


def _without_logs(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key not in LEFT_OUT}
    sessions = record.get("sessions") or ()
    return kept | {"sessions": {str(at): session for at, session in enumerate(sessions)}}


def share(records: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all records have in common, and of each record the rest; `merge` puts them together again."""
    flat = [dict(leaves_of(record)) for record in records]
    texts = [{path: json.dumps(leaf, sort_keys=True) for path, leaf in leaves.items()} for leaves in flat]
    shared = {
        path: leaf
        for path, leaf in flat[0].items()
        if path[0] not in OWN
        and not SCORES.intersection(path)
        and all(leaves.get(path) == texts[0][path] for leaves in texts)
    }
    return nested(shared), [nested({path: leaf for path, leaf in own.items() if path not in shared}) for own in flat]


def to_columns(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Rows as a list for each key, a single value if all are equal; keys that no row has a value for are left out."""
    columns: dict[str, Any] = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values):
            alike = len(rows) > 1 and all(value == values[0] and type(value) is type(values[0]) for value in values)
            columns[key] = values[0] if alike else values
    return {"rows": len(rows), **columns} if columns else {}


def pack_steps(rows: Rows) -> dict[str, Any]:
    """Training rows; many of them as means over equal stretches, each placed at its end."""
    size = max(math.ceil(len(rows) / MOST_POINTS), 1)
    kept = []
    for part in [rows[start : start + size] for start in range(0, len(rows), size)]:
        means = {key: finite_mean(number(row.get(key)) for row in part) for key in STEPS[2:]}
        kept.append({"step": part[-1]["step"], "epoch": part[-1].get("epoch"), **_rounded(means)})
    return to_columns(kept, STEPS)


def pack_evaluations(rows: Rows, metric: str) -> dict[str, Any]:
    """Evaluations: the metric in full, since matching compares it."""
    exact, others = ("step", "epoch", metric), [key for key in ("loss", "seconds") if key != metric]
    kept = [{key: row.get(key) for key in exact} | _rounded({key: row.get(key) for key in others}) for row in rows]
    return to_columns(kept, (*exact, *others))


def pack_heads(rows: Rows) -> dict[str, Any]:
    """Measured heads: all of them where a quantity is first or last measured; the Jacobian everywhere; else means."""
    ends: set[Any] = set()
    for key in (*JACOBIAN[:4], *ARITHMETIC, *KAPPAS):
        steps = [row["step"] for row in rows if row.get(key) is not None]
        ends |= {min(steps, key=number), max(steps, key=number)} if steps else set()
    by_step: dict[Any, Rows] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    kept = []
    for step, heads in by_step.items():
        if step in ends:
            kept += [_rounded({key: row.get(key) for key in MEASURED}) for row in heads]
            continue
        measured = [row for row in heads if any(row.get(key) is not None for key in JACOBIAN[:4])] or heads[:1]
        listed = [_rounded({key: row.get(key) for key in (*MEASURED[:4], *JACOBIAN)}) for row in measured]
        listed[0] |= _rounded(_means(heads))
        kept += listed
    # The smallest singular value is the largest over the condition number, and columns may be copies of others.
    columns = to_columns(kept, [key for key in MEASURED if key not in SMALLEST])
    copies = [key for key, source in COPIES.items() if key in columns and columns[key] == columns.get(source)]
    return {key: value for key, value in columns.items() if key not in copies} | ({"copies": copies} if copies else {})


def _means(heads: Rows) -> dict[str, float]:
    """Over heads and layers, geometric or arithmetic, of finite values; infinite if all are."""
    values = {key: [number(row.get(key)) for row in heads] for key in (*KAPPAS, *LARGEST, *ARITHMETIC)}
    means = {key: finite_mean(values[key]) for key in ARITHMETIC}
    for key in (*KAPPAS, *LARGEST):
        means[key] = summarise_logs(values[key]).geometric_mean
    return means


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with seven significant digits; NaN is no value."""
    made: dict[str, Any] = dict(values)
    for key, value in values.items():
        if isinstance(value, float):
            x = float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None if math.isnan(value) else str(value)
            made[key] = int(x) if isinstance(x, float) and x == int(x) and abs(x) < 1e15 else x
    return made

"""`pack`: comparisons as one small file for each run, from which every table comes out the same.

What runs share is stored once for their comparison; rows are columns of rounded numbers. What a table prints is kept:
scores in full, and the first and the last measurement of every head. Between them, the weights and attention maps of
all heads are one mean, since that is what figures show; the Jacobian of each head stays. `records` reads it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.files import to_json, write_atomically
from wellcond.lab.report import records
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.glue import rebuild_glue
from wellcond.lab.report.load_runs import MARK, Comparison, load_comparisons
from wellcond.lab.report.page import gather, render_markdown
from wellcond.lab.report.records import Rows, Run, leaves_of, nested, read_json
from wellcond.lab.report.statistics import summarise_logs
from wellcond.lab.report.table import finite_mean, number, table_markdown
from wellcond.lab.report.tuning import NAME as TUNING_FILE
from wellcond.lab.run_records import SCHEMA, checksum, seal

OWN = frozenset({"schema", "kind", "method", "seed", "status", "samples", "final", "best", "test"})
"""Keys of a record that are never shared: what a run is and what came out."""
MOST_POINTS = 60
CURVES = ("loss", *(f"grad_norm_{role}" for role in records.ROLES))


def pack(folder: Path, output: Path) -> list[Path]:
    """Write every comparison below a folder in packed form into another one, with `report/report.md` made from it.

    Each is first written elsewhere and read again, and replaces what was there only if all tables keep their bytes.
    """
    folder, output = Path(folder).resolve(), Path(output)
    if output.resolve().is_relative_to(folder) or folder.is_relative_to(output.resolve()):
        raise RunRecordError(output, f"is {folder}, or in it, or above it", "Give another folder to write to.")
    found = load_comparisons(folder)
    for run in [run for comparison in found for run in comparison.runs]:
        if run.packed is not None:
            raise RunRecordError(run.file, "is packed already", "Give the folder of the full runs.")
        if run.outcome == "partial":
            raise RunRecordError(run.file, f"is of a run that is {run.status}", "Finish it, or delete its folder.")
    homes = [output / comparison.folder.relative_to(folder) for comparison in found]
    for home in homes:  # before anything is written
        records.check_stays_inside(output, [home, *(path for path in home.rglob("*") if path.is_symlink())])
    return [_pack_one(comparison, home) for comparison, home in zip(found, homes, strict=True)]


def _pack_one(comparison: Comparison, home: Path) -> Path:
    stored = home / "comparison.json"
    if stored.is_file() and "shared" not in read_json(stored, "wellcond-comparison"):
        raise RunRecordError(home, "holds a comparison that is not packed", "Give another folder to write to.")
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / home.name
        for name, record in _records(comparison):
            if not (made / name).resolve().is_relative_to(made.resolve()):
                raise RunRecordError(comparison.folder, f"a run would be written to {name}", "Correct its slug.")
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_text(to_json(seal(record), compact=True) + "\n", "utf-8")
        [packed] = load_comparisons(made)
        before, after = (gather(analyse(some), figures=False) for some in (comparison, packed))
        pairs = zip(before.tables, after.tables, strict=True)
        if changed := [old.name for old, new in pairs if table_markdown(old) != table_markdown(new)]:
            said = f"packed, these tables would change: {', '.join(changed)}"
            raise RunRecordError(comparison.folder, said, "This is a bug in wellcond.")
        (made / "report").mkdir()
        (made / "report" / "report.md").write_text(render_markdown(after), "utf-8")
        if any(run.fine_tuned() for run in packed.runs):
            rebuild_glue(made).with_suffix(".csv").unlink()
        former = [*home.glob("*/seed*.json"), *home.glob(TUNING_FILE)] if stored.is_file() else []
        places = {home / path.relative_to(made): path for path in sorted(made.rglob("*")) if path.is_file()}
        for place, path in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, path.read_bytes())
        for path in set(former) - set(places):
            path.unlink()
    return home


def _records(comparison: Comparison) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name below the folder, and content."""
    runs = comparison.runs  # by seed; samples of later ones are shown nowhere
    shown = {run.method: run for run in reversed(runs) if run.finished and run.record.get("samples")}
    shared, rests = share([_whole(run, with_samples=run is shown.get(run.method)) for run in runs])
    known = {"schema": SCHEMA, "kind": records.PACKED, "shared": checksum(shared)[:MARK]}
    for run, rest in zip(runs, rests, strict=True):
        yield f"{run.record.get('slug') or run.folder.parent.name}/seed{run.seed}.json", rest | known
    # Runs of `train` have no comparison.json; all but its name follows from them.
    stored: dict[str, Any] = {"schema": SCHEMA, "kind": "wellcond-comparison", "name": comparison.name}
    if (comparison.folder / "comparison.json").is_file():
        stored = read_json(comparison.folder / "comparison.json", "wellcond-comparison")
    yield "comparison.json", stored | {"shared": shared}
    if (comparison.folder / TUNING_FILE).is_file():  # has the score of every run of the search
        yield TUNING_FILE, read_json(comparison.folder / TUNING_FILE, "wellcond-tuning")


def _whole(run: Run, *, with_samples: bool) -> dict[str, Any]:
    """A record with its rows as columns."""
    packed = {
        "steps": pack_steps(run.steps),
        "evaluations": pack_evaluations(run.evaluations, run.metric.name),
        "conditioning": pack_heads(run.conditioning),
        "fine_tuned": {f"{one.folder.parent.name}/seed-0": _kept(one.record) for one in run.fine_tuned()},
    }
    return _kept(run.record) | {"packed": packed} | ({"samples": run.record["samples"]} if with_samples else {})


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    """A record without logs and samples; sessions by number, so that what is equal in them can be shared."""
    sessions = {str(at): session for at, session in enumerate(record.get("sessions") or ())}
    return {key: value for key, value in record.items() if key not in ("logs", "samples")} | {"sessions": sessions}


def share(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all records have in common, and of each record the rest; `merge` puts them together again."""
    flat = [dict(leaves_of(record)) for record in runs]
    texts = [{path: json.dumps(leaf, sort_keys=True) for path, leaf in leaves.items()} for leaves in flat]
    shared = {
        path: leaf
        for path, leaf in flat[0].items()
        if not OWN.intersection(path) and all(leaves.get(path) == texts[0][path] for leaves in texts)
    }
    return nested(shared), [nested({path: leaf for path, leaf in own.items() if path not in shared}) for own in flat]


def to_columns(rows: Rows, exact: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Rows as a list for each key, rounded unless it is to be exact; keys that no row has a value for are left out."""
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) if key in exact else _rounded(row.get(key)) for row in rows]
        columns |= {key: values} if any(value is not None for value in values) else {}
    return columns


def pack_steps(rows: Rows) -> dict[str, list[Any]]:
    """Training rows; many of them as means over equal stretches, each placed at its end."""
    size = max(math.ceil(len(rows) / MOST_POINTS), 1)
    kept = []
    for part in [rows[start : start + size] for start in range(0, len(rows), size)]:
        means = {key: finite_mean(number(row.get(key)) for row in part) for key in CURVES}
        kept.append({"step": part[-1]["step"], "epoch": part[-1].get("epoch"), **means})
    return to_columns(kept)


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
    for key in (*records.JACOBIAN[:4], *records.ARITHMETIC, *records.KAPPAS):
        steps = [row["step"] for row in rows if row.get(key) is not None]
        ends |= {*steps[:1], *steps[-1:]}
    kept = []
    for step, group in groupby(rows, key=lambda row: row["step"]):
        heads = list(group)
        if step in ends:
            kept += [{key: row.get(key) for key in records.MEASURED if key not in records.SMALLEST} for row in heads]
            continue
        measured = [row for row in heads if any(row.get(key) is not None for key in records.JACOBIAN[:4])] or heads[:1]
        listed = [{key: row.get(key) for key in (*records.MEASURED[:4], *records.JACOBIAN)} for row in measured]
        means = {key: finite_mean(number(row.get(key)) for row in heads) for key in records.ARITHMETIC}
        for key in (*records.KAPPAS, *records.LARGEST):
            means[key] = summarise_logs(number(row.get(key)) for row in heads).geometric_mean
        kept += [listed[0] | means, *listed[1:]]
    columns = to_columns(kept)
    copies = [key for key, source in records.COPIES.items() if key in columns and columns[key] == columns.get(source)]
    return {key: column for key, column in columns.items() if key not in copies} | {"copies": copies}


def _rounded(value: Any) -> Any:
    """A number with seven significant digits, enough for plots and for means that tables print; NaN is no value."""
    if not isinstance(value, float) or math.isinf(value):
        return value
    short = float(f"{value:.7g}")
    return None if math.isnan(short) else int(short) if short == int(short) and abs(short) < 1e15 else short

"""`pack`: a comparison as one file of JSON lines, a line for each run, from which every table comes out the same.

What a table prints is kept: scores in full, and the first and the last measurement of every head. Curves have as many
digits and points as a plot shows: 60 training steps, and between the first and the last measurement one mean over the
weights and attention maps of all heads; the Jacobian of each head stays. `wellcond.lab.records` reads it.

Of the search before a comparison its scores are kept, and those runs, without curves, whose scores are not there yet. A
comparison that is not complete is packed as far as it is; `unpack` makes run folders of the file, in which `wellcond
compare` goes on with what is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.files import to_json, write_atomically
from wellcond.lab.records import (
    ARITHMETIC,
    CHECKSUM,
    COMPARISON,
    COMPLETE,
    JACOBIAN,
    KAPPAS,
    LARGEST,
    MEASURED,
    ROLES,
    RUN,
    SCHEMA,
    SMALLEST,
    TUNING,
    Comparison,
    Keys,
    Rows,
    Run,
    check_stays_inside,
    leaves_of,
    load_comparisons,
    log_mark,
    packed_path,
    packed_run,
    read_json,
    read_lines,
    read_packed,
    read_run,
    read_search,
    reading_packed,
    seal,
)
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.page import gather
from wellcond.lab.report.statistics import summarise_logs
from wellcond.lab.report.table import finite_mean, number, table_markdown
from wellcond.lab.report.tuning import TunedPoint

OWN = ("kind", "folder", "method", "seed", "status", "test", "final", "best", "samples", "fine_tuned")
"""Keys of a line of a run that are never shared: what it is and what came out."""
FIRST = ("schema", "kind", "shared", "by_method", "lines")
"""Keys of the first line of a file that no record of a comparison has, or has otherwise."""
LEFT_OUT = ("schema", "kind", "slug", "config_hash", "logs", "samples")
"""Keys of the record of a run folder that follow from others, or are about the folder."""
IN_CURVES = ("epoch", "train_loss", "seconds")
"""Numbers of an evaluation that its curves have as well."""
MOST_POINTS = 60
CURVES = ("loss", *(f"grad_norm_{role}" for role in ROLES))


def pack(folder: Path, output: Path) -> dict[Path, int]:
    """Write every comparison below a folder as one file: the one in FOLDER/a/b as OUTPUT/a/b.jsonl.

    Each is first written elsewhere and read again, and replaces what was there only if all tables keep their bytes.

    Returns: the files, and how many runs each is without because they had begun and are not complete.
    """
    folder, output = Path(folder).resolve(), Path(output)
    if output.resolve().is_relative_to(folder) or folder.is_relative_to(output.resolve()):
        raise RunRecordError(output, f"is {folder}, or in it, or above it", "Give another folder to write to.")
    found = {comparison.folder: comparison for comparison in load_comparisons(folder, needed=False)}
    for path in folder.rglob("comparison.json"):  # of which no run has begun, but perhaps its search
        found.setdefault(path.parent, _before_its_runs(path.parent))
    files: dict[Path, bytes] = {}
    left_out: dict[Path, int] = {}
    for home, comparison in sorted(found.items()):
        for run in comparison.runs:
            if run.file.name != "run.json":
                raise RunRecordError(run.file, "is packed already", "Give the folder of the full runs.")
        trials = [read_run(path) for path in sorted((home / "tuning").glob("*/*/seed*/run.json"))]
        whole = replace(comparison, runs=tuple(run for run in comparison.runs if run.outcome != "partial"))
        complete = [run for run in trials if run.status in COMPLETE]
        if whole.runs or complete:
            place = packed_path(output / home.relative_to(folder))
            check_stays_inside(output if output in place.parents else output.parent, [place])
            files[place] = packed_lines(whole, _without_recorded(comparison, complete))
            left_out[place] = len(comparison.runs) - len(whole.runs) + len(trials) - len(complete)
            if whole.runs:
                _check_tables(whole, place.name, files[place])
    if not files:
        raise RunRecordError(folder, "holds no run that is complete", "Make some: wellcond compare.")
    for place, content in files.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, content)
    return left_out


def _before_its_runs(home: Path) -> Comparison:
    stored = read_json(home / "comparison.json", COMPARISON)
    return Comparison(home, "", "", "", "", "", (), (), stored=stored, search=read_search(home))


def _without_recorded(comparison: Comparison, trials: Sequence[Run]) -> list[Run]:
    """Runs of a search whose scores its record does not have yet: with these it goes on without the runs."""
    search = comparison.search or {}
    if not search.get("settings_hash"):
        return list(trials)
    slugs = {method["label"]: method["slug"] for method in (comparison.stored or {}).get("methods", ())}
    recorded = set()
    for row in search["methods"]:
        home = comparison.folder / "tuning" / slugs.get(row["label"], "")
        for point in row["points"]:
            values = "-".join(f"{field}-{value!r}" for field, value in point["values"].items())
            recorded |= {home / values / f"seed{seed}" for seed in point["scores"]}
    return [run for run in trials if run.folder not in recorded]


def _check_tables(comparison: Comparison, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / name
        copy.write_bytes(content)
        before, after = (gather(analyse(some), figures=False) for some in (comparison, read_packed(copy)))
    pairs = zip(before.tables, after.tables, strict=True)
    if changed := [old.name for old, new in pairs if table_markdown(old) != table_markdown(new)]:
        problem = f"packed, these tables would change: {', '.join(changed)}"
        raise RunRecordError(comparison.folder, problem, "This is a bug in wellcond.")


def packed_lines(comparison: Comparison, trials: Sequence[Run] = ()) -> bytes:
    """The file of a comparison: itself, its search, the runs of that, and its own runs by method and seed."""
    shown: dict[str, Run] = {}  # samples of other runs are shown nowhere
    for run in comparison.runs:
        if run.finished and run.record.get("samples"):
            shown.setdefault(run.method, run)
    runs = [run for method in comparison.methods for run in comparison.of(method)]
    searched = [
        {"kind": "tuning-run", "folder": run.folder.relative_to(comparison.folder).as_posix(), **_kept(run.record)}
        for run in trials
    ]
    own = [_whole(run, with_samples=run is shown.get(run.method)) for run in runs]
    shared, rests = share([*searched, *own])
    by_method, rests = share_by_method(rests)
    lines = [*_search_lines(comparison), *rests]
    rest = "".join(f"{to_json(line, compact=True)}\n" for line in lines).encode()
    # Runs of `train` have no record of a comparison; all but its name follows from them.
    stored = {"name": comparison.name} if comparison.stored is None else dict(comparison.stored)
    stored = {key: value for key, value in stored.items() if key not in FIRST}
    first = {
        "kind": "comparison" if own else "search only",
        "schema": SCHEMA,
        **stored,
        "shared": shared,
        "by_method": by_method,
    }
    first["lines"] = log_mark(len(rest), hashlib.sha256(rest))
    return to_json(seal(first)).encode() + b"\n" + rest


def _search_lines(comparison: Comparison) -> list[dict[str, Any]]:
    """The search before a comparison, and a line for each value that it tried; no score where a run diverged."""
    if comparison.search is None:
        return []
    kept = {key: value for key, value in comparison.search.items() if key not in FIRST}
    methods = [{key: value for key, value in row.items() if key != "points"} for row in kept["methods"]]
    points = [
        {"kind": "tuning", "method": row["label"], "values": point["values"], "scores": point["scores"]}
        for row in kept["methods"]
        for point in row["points"]
    ]
    return [{"kind": "search", **kept, "methods": methods}, *points]


def unpack(file: Path, folder: Path) -> int:
    """Write the complete runs of a packed comparison as run folders, below a folder that is new or empty.

    `wellcond compare` with this folder and the same settings repeats none of them. Logs and checkpoints are not there:
    a run has its curves in `run.json`.

    Returns: how many runs there are, those of the search included.
    """
    file, folder = Path(file), Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RunRecordError(folder, "is not empty", "Give a new folder; runs that are there may go on as they are.")
    records: dict[Path, Any] = {}
    with reading_packed(file):
        stored, by_kind = read_lines(file)
        if "methods" not in stored:
            raise ValueError("expected a comparison, found runs of wellcond train, which each go on by themselves")
        records[Path("comparison.json")] = {**stored, "kind": COMPARISON}
        for search in by_kind["search"]:
            for row in search["methods"]:
                points = [line for line in by_kind["tuning"] if line["method"] == row["label"]]
                row["points"] = [TunedPoint.of(line).describe() for line in points]
            records[Path("tuning.json")] = {**search, "kind": TUNING, "schema": SCHEMA}
        records |= _unpacked_runs(file, stored, by_kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        made = Path(temporary) / "runs"
        for place, record in records.items():
            check_stays_inside(made, [made / place])
            (made / place).parent.mkdir(parents=True, exist_ok=True)
            left = (CHECKSUM, "shared", "by_method", "lines") if len(place.parts) == 1 else (CHECKSUM, "folder")
            kept = {key: value for key, value in record.items() if key not in left}
            write_atomically(made / place, to_json(seal(kept), indent=1) + "\n")
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    return sum(place.name == "run.json" for place in records)


def _unpacked_runs(file: Path, stored: Mapping[str, Any], by_kind: Mapping[str, Rows]) -> Iterator[tuple[Path, Any]]:
    slugs = {method["label"]: method["slug"] for method in stored["methods"]}
    for line in [*by_kind["tuning-run"], *by_kind["run"]]:
        run = packed_run(file, line)
        if run.status in COMPLETE:
            place = Path(line.get("folder") or f"{slugs[run.method]}/seed{run.seed}")
            yield place / "run.json", run.record | {"kind": RUN, "schema": SCHEMA, "curves": run.curves}


def _whole(run: Run, *, with_samples: bool) -> dict[str, Any]:
    """A record with its rows as columns."""
    kept = {"kind": "run", **_kept(run.record)}
    if run.curves is None and (tuned := run.fine_tuned()):
        kept["fine_tuned"] = {f"{one.folder.parent.name}/seed-0": _kept(one.record) for one in tuned}
    if with_samples:
        kept["samples"] = run.record["samples"]
    curves = run.curves
    if curves is None:
        columns = {
            "steps": pack_steps(run.steps),
            "evaluations": pack_evaluations(run.evaluations, run.metric.name),
            "conditioning": pack_heads(run.conditioning),
        }
        curves = {name: values for name, values in columns.items() if values}
    kept["curves"] = curves
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


def share_by_method(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What most records of each method have in common, but for its searched settings; and of each record the rest."""
    shared: dict[str, Any] = {}
    rests = list(runs)
    for method in dict.fromkeys(run["method"] for run in runs):
        places = [place for place, run in enumerate(runs) if run["method"] == method]
        if len(places) > 1:
            shared[method], own = share([runs[place] for place in places], searched=True)
            for place, rest in zip(places, own, strict=True):
                rests[place] = rest
    return shared, rests


def _searched(run: Mapping[str, Any]) -> set[Keys]:
    """Where a record has the settings that its method sets for itself, which its line keeps."""
    method = run.get("config", {}).get("method")
    names = (method.get("set") or {}) if isinstance(method, dict) else {}
    return {("config", *name.split(".")) for name in names} | {("config", "method", "set", name) for name in names}


def share(runs: Sequence[dict[str, Any]], *, searched: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What most records have in common, and of each the rest; `records.merge` puts them together again.

    Shared is a value that more than half of the records have, if all have one there: the others state their own. With
    `searched` each keeps the settings that its method searched.
    """
    flat = [dict(leaves_of(record)) for record in runs]
    texts = [{path: json.dumps(leaf, sort_keys=True) for path, leaf in leaves.items()} for leaves in flat]
    common: dict[Keys, str] = {}
    kept = set().union(*map(_searched, runs)) if searched else ()
    for path in flat[0]:
        if path[0] in OWN or path in kept or not all(path in leaves for leaves in texts):
            continue
        [(text, count)] = Counter(leaves[path] for leaves in texts).most_common(1)
        if 2 * count > len(texts):
            common[path] = text
    shared = {path: json.loads(text) for path, text in common.items()}
    rests = [
        _nested({path: leaf for path, leaf in own.items() if common.get(path) != text[path]})
        for own, text in zip(flat, texts, strict=True)
    ]
    return _nested(shared), [
        {key: rest[key] for key in sorted(rest, key=lambda key: (_place(key), key))} for rest in rests
    ]


def _place(key: str) -> int:
    """Where a key stands in a line: first what a run is and what came out, last what is long."""
    order = (*OWN[:8], "config", None, "samples", "fine_tuned", "curves")
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

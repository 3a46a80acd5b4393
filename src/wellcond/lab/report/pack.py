"""`pack`: comparisons as one small file for each run, from which every table comes out the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wellcond.files import to_json, write_atomically
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.glue import rebuild_glue
from wellcond.lab.report.load_runs import Comparison, load_comparisons, shared_mark
from wellcond.lab.report.packed import PACKED, pack_evaluations, pack_heads, pack_steps, share
from wellcond.lab.report.page import gather, render_markdown
from wellcond.lab.report.records import Run, RunRecordError, read_json
from wellcond.lab.report.table import table_markdown
from wellcond.lab.report.tuning import NAME as TUNING_FILE
from wellcond.run_records import SCHEMA, seal

LEFT_OUT = ("logs", "samples", "sessions")


def pack(folder: Path, output: Path) -> list[Path]:
    """Write every comparison below a folder in packed form, with `report/report.md` made from it.

    Each is written beside its place and read again; only if all tables come out with the same bytes does it take the
    place of what was there.

    Args:
        folder: full runs of `wellcond compare`, at any depth; they stay as they are.
        output: where the packed form goes, laid out like `folder`; another folder.

    Returns: the folder of every packed comparison.

    Raises: RunRecordError if runs are broken, not complete, or packed already, or a table would change.
    """
    folder, output = Path(folder), Path(output)
    if output.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(output.resolve()):
        raise RunRecordError(output, f"is {folder}, or in it, or above it", "Give another folder to write to.")
    return [_pack_one(comparison, output / comparison.folder.relative_to(folder)) for comparison in _complete(folder)]


def _complete(folder: Path) -> list[Comparison]:
    found = load_comparisons(folder)
    for run in [run for comparison in found for run in comparison.runs]:
        if run.packed is not None:
            raise RunRecordError(run.file, "is packed already", "Give the folder of the full runs.")
        if run.outcome == "partial":
            raise RunRecordError(run.file, f"is of a run that is {run.status}", "Finish it, or delete its folder.")
    return found


def _pack_one(comparison: Comparison, home: Path) -> Path:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".packing-") as place:
        made = Path(place) / home.name
        for name, content in _files(comparison):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(made / name, content)
        [packed] = load_comparisons(made)
        _check_same_tables(comparison, packed)
        (made / "report").mkdir()
        write_atomically(made / "report" / "report.md", render_markdown(gather(analyse(packed), figures=False)))
        if any(True for run in packed.runs for _ in run.fine_tuned()):
            _pack_glue(comparison.folder, made)
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


def _check_same_tables(comparison: Comparison, packed: Comparison) -> None:
    before, after = (gather(analyse(some), figures=False).tables for some in (comparison, packed))
    changed = [old.name for old, new in zip(before, after, strict=True) if table_markdown(old) != table_markdown(new)]
    if changed:
        raise RunRecordError(
            comparison.folder, f"packed, these tables would change: {', '.join(changed)}", "This is a bug in wellcond."
        )


def _pack_glue(folder: Path, made: Path) -> None:
    page = rebuild_glue(made)
    stored = folder / page.name
    if stored.is_file() and stored.read_bytes() != page.read_bytes():
        raise RunRecordError(stored, "is not what its records make of it", "Run wellcond glue again, then pack.")
    page.with_suffix(".csv").unlink()


def _files(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Name below the folder, and content."""
    runs = comparison.runs
    written = [run for run in runs if run.finished and run.record.get("samples")]
    shown = {run.method: run for run in reversed(written)}
    shared, rests = share([_whole(run, with_samples=run is shown.get(run.method)) for run in runs])
    mark = shared_mark(shared)
    for run, rest in zip(runs, rests, strict=True):
        record = rest | {"schema": SCHEMA, "kind": PACKED, "shared": mark}
        yield f"{_slug(run)}/seed{run.seed}.json", to_json(seal(record), compact=True) + "\n"
    stored = comparison.folder / "comparison.json"
    known = read_json(stored, "wellcond-comparison") if stored.is_file() else _described(comparison)
    yield "comparison.json", to_json(seal(known | {"shared": shared}), compact=True) + "\n"
    if (comparison.folder / TUNING_FILE).is_file():  # has the score of every run of the search
        searched = read_json(comparison.folder / TUNING_FILE, "wellcond-tuning")
        yield TUNING_FILE, to_json(seal(searched), compact=True) + "\n"


def _slug(run: Run) -> str:
    return str(run.record.get("slug") or run.folder.parent.name)


def _described(comparison: Comparison) -> dict[str, Any]:
    """What `comparison.json` would say of runs that have none."""
    slugs = {run.method: _slug(run) for run in comparison.runs}
    methods = [{"label": method, "slug": slugs[method]} for method in comparison.methods]
    named = {key: getattr(comparison, key) for key in ("name", "title", "recipe", "scale", "baseline", "notes")}
    kind = {"schema": SCHEMA, "kind": "wellcond-comparison"}
    return kind | named | {"methods": methods, "seeds": list(comparison.seeds)}


def _whole(run: Run, *, with_samples: bool) -> dict[str, Any]:
    """A record with its rows as columns. Samples of other seeds are shown nowhere."""
    record = _without_logs(run.record)
    if with_samples:
        record["samples"] = run.record["samples"]
    packed = {
        "steps": pack_steps(run.steps),
        "evaluations": pack_evaluations(run.evaluations, run.metric.name),
        "conditioning": pack_heads(run.conditioning),
        "fine_tuned": {
            f"{path.parent.parent.name}/{path.parent.name}": _without_logs(tuned) for path, tuned in run.fine_tuned()
        },
    }
    return record | {"packed": {name: content for name, content in packed.items() if content}}


def _without_logs(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key not in LEFT_OUT}
    sessions = record.get("sessions") or ()
    return kept | {"sessions": {str(at): session for at, session in enumerate(sessions)}}

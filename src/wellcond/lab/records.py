"""Records of runs: what one must hold, and comparisons read from run folders or from files with one line per run.

Training writes run folders: `run.json` and logs that only grow. `wellcond pack` writes a comparison as one file of JSON
lines, `NAME.jsonl`. `load_comparisons` reads both. Files may be damaged or hostile; nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.files import read_regular, to_json
from wellcond.pages import number, show

Rows = list[dict[str, Any]]
Keys = tuple[str, ...]

SCHEMA = 1
STATES = ("running", "finished", "diverged", "failed", "interrupted")
COMPLETE = ("finished", "diverged")
LOGS = ("steps.jsonl", "evaluations.jsonl", "conditioning.jsonl")
CHECKSUM = "checksum"
RUN, COMPARISON, TUNING = "wellcond-run", "wellcond-comparison", "wellcond-tuning"
"""Kinds of the records that training writes."""
PACKED_START = b'{"kind": "comparison", "schema": '
"""How the first line of a packed comparison begins."""
SEARCH_START = b'{"kind": "search only", "schema": '
"""How a packed file begins that has runs of the search alone: what was done of a comparison that goes on later."""
CORRELATIONS = ("matthews", "pearson", "spearman")
"""Metrics that may be negative."""
REPEAT = "Restore it, or delete {} and repeat the run."
PACK_AGAIN = "Restore it, or pack the runs again: wellcond pack."
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters that a terminal would obey, and those that turn text around; tabs and line ends are neither."""
NOT_COMPARED = frozenset({"method", "seed", "title", "description", "checkpoint", "logging", "workers"})
"""Settings that differ between the runs of a comparison, or change no number."""
ROLES = ("q", "k", "v")
JACOBIAN = ("condition_number", "pseudo_condition_number", "papers_bound_log10", "bound_log10", "status")
KAPPAS, LARGEST, SMALLEST = (
    tuple(f"{prefix}{what}_{role}" for prefix in ("", "raw_") for role in ROLES)
    for what in ("kappa", "sigma_max", "sigma_min")
)
ARITHMETIC = ("normalised_entropy", "diagonal_mass", "dead")
MEASURED = ("step", "epoch", "layer", "head", *JACOBIAN, *ARITHMETIC, *KAPPAS, *LARGEST, *SMALLEST)


# What a record must hold, and checksums that show later changes.


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a checksum over its content, which does not depend on layout or the order of keys.

    Example:
        >>> sealed = seal({"seed": 3})
        >>> find_change(sealed), find_change(sealed | {"seed": 4})
        ('', 'was changed after it was written: its checksum does not match')
    """
    return record | {CHECKSUM: checksum(record)}


def find_change(record: dict[str, Any]) -> str:
    """How the checksum of a record shows a change; empty if it shows none, or if the record has no checksum."""
    if CHECKSUM not in record or record[CHECKSUM] == checksum(record):
        return ""
    return "was changed after it was written: its checksum does not match"


def checksum(record: dict[str, Any]) -> str:
    """SHA-256 over the content of a record, but for the checksum that it may hold."""
    content = {key: value for key, value in record.items() if key != CHECKSUM}
    as_read = json.loads(to_json(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode("ascii")).hexdigest()


def log_mark(size: int, digest: hashlib._Hash) -> dict[str, Any]:
    """How a record notes what a log held when it was written; a log only grows from there."""
    return {"bytes": size, "sha256": digest.hexdigest()}


def matches(mark: dict[str, Any], content: bytes, *, complete: bool) -> bool:
    """Whether a log begins with what a mark notes; a complete one ends there as well."""
    size = mark["bytes"]
    if len(content) < size or (complete and len(content) > size):
        return False
    return hashlib.sha256(memoryview(content)[:size]).hexdigest() == mark["sha256"]


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
    if problem := find_change(record) or (find_problem(record) if kind == RUN else ""):
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
    # An infinite perplexity is written as text, since JSON has none.
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


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """A record of a kind, in which nothing was changed; RunRecordError for anything else."""
    try:
        return without_controls(read_record(path, kind))
    except (OSError, ValueError) as error:
        damaged = path.parent if kind == RUN else path
        raise RunRecordError(path, str(error), REPEAT.format(damaged)) from error


def without_controls(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with names and texts as they may be shown anywhere, a terminal included.

    Generated samples may hold anything and stay as they are; their pages show each such character by its number.
    """
    return {key: value if key == "samples" else _without_controls(value) for key, value in record.items()}


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return CONTROLS.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_controls(key): _without_controls(item) for key, item in value.items()}
    return [_without_controls(item) for item in value] if isinstance(value, list) else value


def check_stays_inside(folder: Path, places: Iterable[Path]) -> None:
    """Raise RunRecordError if a link leads from a place below a folder to somewhere else, where nothing is written."""
    for place in places:
        if not place.resolve().is_relative_to(folder.resolve()):
            raise RunRecordError(place, f"is a link that leads out of {folder}, to {place.resolve()}", "Remove it.")


# Runs and comparisons.


@dataclass(frozen=True)
class Metric:
    """The number that a task and its runs are judged by."""

    name: str
    higher_is_better: bool = True
    percent: bool = False
    """Stored as a fraction, shown times 100."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Metric:
        """The metric of a record."""
        return cls(str(stored["name"]), bool(stored["higher_is_better"]), bool(stored.get("percent")))

    @property
    def scale(self) -> float:
        """Factor from stored to shown numbers."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """Unit of a difference, with its space; empty if there is none."""
        return " points" if self.percent else ""

    @property
    def label(self) -> str:
        """Name with unit, for an axis."""
        return f"{self.name} (%)" if self.percent else self.name

    def is_better(self, a: float, b: float) -> bool:
        """Whether a is better than b."""
        return a > b if self.higher_is_better else a < b

    @property
    def better(self) -> str:
        """Which way is better, in words."""
        return "higher is better" if self.higher_is_better else "lower is better"

    def error(self, mean: float) -> float:
        """What a score still gets wrong, as stored: that by which a gain is a share; NaN where that is not known."""
        return (1 - mean if self.percent else math.nan) if self.higher_is_better else mean

    def show(self, value: float, *, sign: bool = False) -> str:
        """A value, or with `sign` a difference, as it is printed."""
        shown = value * self.scale
        text = f"{shown:.2f}" if self.percent and math.isfinite(value) else show(shown, 4)
        return f"+{text}" if sign and 0 < value < math.inf else text


class Run:
    """One training run: its record, and its rows, which are read when they are first asked for.

    `file` holds the record, `sessions` has versions and machine for each time it was started or resumed, and `alone`
    says whether it had its cores to itself from beginning to end, so that its times are those of its method. `curves`
    are the rows of a packed run, column by column; None for a run folder.
    """

    def __init__(self, file: Path, record: dict[str, Any], curves: Mapping[str, Any] | None = None) -> None:
        self.file, self.record, self.curves = file, record, curves
        self.folder = file.parent
        self.method, self.seed, self.status = str(record["method"]), int(record["seed"]), str(record.get("status"))
        self.sessions: Rows = list(record.get("sessions") or ())
        self.alone = bool(self.sessions) and all(session.get("alone") is True for session in self.sessions)

    @property
    def metric(self) -> Metric:
        """The metric that the run is judged by; nameless if it failed before that was known."""
        return Metric.of(self.record.get("metric") or {"name": "", "higher_is_better": True})

    def part(self, name: str) -> dict[str, Any]:
        """A mapping of its record, such as `final`, `best`, `test`, `seconds` or `data`; empty if there is none."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def spec(self) -> dict[str, Any]:
        """The method of the run: initialisation, condition, options, and fields of the recipe that it sets."""
        spec = self.part("method_spec") or self.part("config").get("method")
        return spec if isinstance(spec, dict) else {}

    @property
    def value(self) -> float:
        """The metric at the last evaluation; NaN where there is none."""
        return number(self.part("final").get(self.metric.name))

    @property
    def test_value(self) -> float:
        """The metric on the test split; NaN where there is none."""
        return number(self.part("test").get(self.metric.name))

    @property
    def outcome(self) -> str:
        """`finished`, `diverged` (also at the end: its metric is not finite), `failed`, or `partial` (also killed)."""
        if self.status == "finished":
            return "finished" if abs(self.value) < math.inf else "diverged"
        return self.status if self.status in ("diverged", "failed") else "partial"

    @property
    def finished(self) -> bool:
        """Whether it counts in means."""
        return self.outcome == "finished"

    @cached_property
    def steps(self) -> Rows:
        """Rows of training."""
        return self._rows("steps")

    @cached_property
    def evaluations(self) -> Rows:
        """Rows of evaluation."""
        rows, name = self._rows("evaluations"), self.metric.name
        if self.status == "finished" and rows and rows[-1].get(name) != self.record["final"][name]:
            problem = f"has {name} {self.value}, but the end of its evaluations {rows[-1].get(name)}: one was changed"
            raise RunRecordError(self.file, problem, REPEAT.format(self.folder))
        return rows

    @property
    def conditioning(self) -> Rows:
        """Rows of measured heads; empty if nothing was measured. Read anew each time, since there can be very many."""
        return self._rows("conditioning")

    def fine_tuned(self) -> list[Run]:
        """Runs that were fine-tuned from this one, with its method and seed."""
        if self.curves is None:
            found = [read_run(path) for path in sorted((self.folder / "glue").glob("*/seed-0/run.json"))]
        else:
            stored = self.record.get("fine_tuned", {})
            found = [packed_run(self.file, stored[name]) for name in sorted(stored)]
        for run in found:
            run.method, run.seed = self.method, self.seed
        return found

    def _rows(self, name: str) -> Rows:
        if self.curves is None:
            return read_log(self, name)
        try:
            return _unpack_rows(self.curves.get(name) or {})
        except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
            problem = f"{name} of {self.method}, seed {self.seed} cannot be read: {error}"
            raise RunRecordError(self.file, problem, PACK_AGAIN) from error


def read_run(path: Path) -> Run:
    """A run from its run.json; `wellcond unpack` writes such a file with curves and without logs."""
    record = read_json(path, RUN)
    return Run(path, record, record.pop("curves", None))


def read_log(run: Run, name: str) -> Rows:
    """Rows of a log of a run folder, by step.

    A run that was killed and resumed may have written a step twice; the later row is the one that counts. Half a last
    line is what a killed run leaves; anywhere else, and in a complete run, it is an error.
    """
    path, advice = run.folder / f"{name}.jsonl", REPEAT.format(run.folder)
    complete, of_heads = run.status in COMPLETE, name == "conditioning"
    mark = run.record.get("logs", {}).get(path.name)
    if not path.is_file():
        if (run.status == "finished" and not of_heads) or (mark and mark["bytes"]):
            raise RunRecordError(path, f"is missing, though the run is {run.status}", advice)
        return []
    content = path.read_bytes()
    if mark and not matches(mark, content, complete=complete):
        raise RunRecordError(path, "was changed after it was written, or is not of the run in run.json", advice)
    keys = ("step", "layer", "head") if of_heads else ("step",)
    latest = {}
    lines = [line for line in content.decode("utf-8", errors="replace").split("\n") if line.strip()]
    for at, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            latest[tuple([row[key] for key in keys])] = row
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            if at < len(lines) or complete:
                problem = f"row {at} of {len(lines)} is not JSON with the keys {', '.join(keys)} ({error!r})"
                raise RunRecordError(path, problem, advice) from error
    return sorted(latest.values(), key=lambda row: number(row["step"]))


def _unpack_rows(columns: Mapping[str, list[Any]]) -> Rows:
    """Rows from columns; of heads, with the smallest singular values, which follow from others."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row, (kappa, largest, smallest) in product(rows, zip(KAPPAS, LARGEST, SMALLEST, strict=True)):
        if row.get(kappa) is not None and row.get(largest) is not None:
            row[smallest] = number(row[largest]) / number(row[kappa])
    return rows


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods under one recipe."""

    folder: Path
    """Of its runs; of a packed one the path of its file without the ending. Reports are written into it."""
    name: str
    title: str
    recipe: str
    scale: str
    baseline: str
    methods: tuple[str, ...]
    """Labels, in the order in which they are shown."""
    runs: tuple[Run, ...]
    notes: str = ""
    rates: str = ""
    """Where the learning rates of the methods are from, as the comparison reported when it began."""
    stored: Mapping[str, Any] | None = None
    """Its own record; None for runs without one."""
    search: Mapping[str, Any] | None = None
    """Record of the search before it; None if there was none."""

    @property
    def metric(self) -> Metric:
        """What all runs are evaluated by while they train."""
        return next((run.metric for run in self.runs if run.record.get("metric")), self.runs[0].metric)

    @property
    def tested(self) -> bool:
        """Whether runs have scores on a test split, which then are their results."""
        return any(run.finished and run.part("test") for run in self.runs)

    @property
    def result(self) -> Metric:
        """What all runs are judged by: the metric on the test split or, without one, at the last evaluation."""
        return replace(self.metric, name=f"test {self.metric.name}") if self.tested else self.metric

    @property
    def tested_weights(self) -> str:
        """With which weights the test split was scored, in words."""
        tests = [run.part("test") for run in self.runs if run.finished and run.part("test")]
        names = {"best": "the weights of the best evaluation", "last": "the last weights"}
        return f"with {' or '.join(names.get(name, name) for name in sorted({str(t.get('weights')) for t in tests}))}"

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed that was started."""
        return tuple(sorted({run.seed for run in self.runs}))

    def of(self, method: str) -> tuple[Run, ...]:
        """Runs of a method, by seed."""
        return tuple(run for run in self.runs if run.method == method)

    def finished(self, method: str) -> dict[int, Run]:
        """Runs of a method that count in means, by seed."""
        return {run.seed: run for run in self.of(method) if run.finished}

    def results(self, method: str, metric: str = "") -> dict[int, float]:
        """What the runs of a method are judged by, or another number of their last evaluation, by seed."""
        part, name = ("final", metric) if metric else ("test" if self.tested else "final", self.metric.name)
        values = {seed: number(run.part(part).get(name)) for seed, run in self.finished(method).items()}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}


# Reading.


def load_comparisons(folder: Path, *, needed: bool = True) -> list[Comparison]:
    """Every comparison below a folder, by path; or that of a packed file, with or without its ending.

    A run belongs to the nearest folder above it that has a `comparison.json`. Runs without one form a comparison of
    the folder that holds their method folders, methods by name, `default` first and baseline. A file `NAME.jsonl` that
    `wellcond pack` wrote is a comparison too.

    Raises: RunRecordError if there is no run at all (unless none is `needed`), or a file is broken, was changed or is
        of another version.
    """
    folder = Path(folder)
    packed = packed_path(folder)
    if folder.is_file() or (packed.is_file() and not folder.is_dir()):
        return [read_packed(folder if folder.is_file() else packed)]
    found = [read_packed(path) for path in folder.rglob("*.jsonl") if path.name not in LOGS and _is_packed(path)]
    described = {path.parent: read_json(path, COMPARISON) for path in folder.rglob("comparison.json")}
    grouped: dict[Path, list[Run]] = {}
    for path in sorted(folder.rglob("run.json")):
        place, parts = path.parent, path.parent.relative_to(folder).parts
        inside = [place, *place.parents][: len(parts) + 1]
        # Fine-tuning of a run, and the search before a comparison (tuning/METHOD/VALUES/seedN), are no part of it.
        if any((above / "run.json").is_file() for above in inside[1:]) or parts[-4:-3] == ("tuning",):
            continue
        home = next((above for above in inside if above in described), inside[2] if len(inside) > 2 else folder)
        grouped.setdefault(home, []).append(read_run(path))
    for home, runs in grouped.items():
        found.append(_assemble(home, home / "comparison.json", runs, described.get(home), read_search(home)))
    if needed and not found:
        raise RunRecordError(folder, "holds no run.json and no packed comparison", "Make some: wellcond compare.")
    return sorted(found, key=lambda comparison: comparison.folder)


def read_search(folder: Path) -> dict[str, Any] | None:
    """The record of the search before a comparison; None if there is none."""
    file = folder / "tuning.json"
    return read_json(file, TUNING) if file.is_file() else None


def packed_path(folder: Path) -> Path:
    """The file that holds the runs of a folder packed: NAME.jsonl beside the folder NAME."""
    return folder.parent / f"{folder.name}.jsonl"


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PACKED_START)) == PACKED_START


def read_packed(path: Path) -> Comparison:
    """A comparison from a file: lines of kind `comparison`, `search`, `tuning`, `tuning-run` and `run`, in this order.

    The first line has what most runs have in common under `shared`, and what those of a method have under `by_method`:
    the record of a run is these two mappings and its own line, laid over one another level by level.
    """
    with reading_packed(path):
        stored, by_kind = read_lines(path)
        if not by_kind["run"]:
            raise ValueError("has runs of a search and none of the comparison: wellcond unpack, then compare, goes on")
        runs = [packed_run(path, line) for line in by_kind["run"]]
        search = by_kind["search"][0] if by_kind["search"] else None
        for method in search["methods"] if search else ():
            method["points"] = [line for line in by_kind["tuning"] if line["method"] == method["label"]]
        return _assemble(path.parent / path.name.removesuffix(".jsonl"), path, runs, stored, search)


@contextlib.contextmanager
def reading_packed(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with the content of a packed file into a RunRecordError."""
    try:
        yield
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RunRecordError):
            raise
        problem = str(error) if isinstance(error, (OSError, ValueError)) else f"is no packed comparison ({error!r})"
        raise RunRecordError(path, problem, PACK_AGAIN) from error


def read_lines(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    """The first line of a packed file and the others by their kind, checked; runs with what they share."""
    first, _, rest = read_regular(path).partition(b"\n")
    if not first.startswith((PACKED_START, SEARCH_START)):
        raise ValueError("expected a comparison that wellcond pack wrote, found something else")
    stored = json.loads(first)
    if stored["schema"] != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, found {stored['schema']!r}: it is of another version of wellcond")
    if find_change(stored) or not matches(stored["lines"], rest, complete=True):
        raise ValueError("was changed after it was written: its checksums do not match")
    stored, lines = without_controls(stored), [without_controls(json.loads(line)) for line in rest.splitlines()]
    kinds = ("search", "tuning", "tuning-run", "run")
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}
    for kind in kinds[2:]:
        common = [
            merge(stored["shared"], stored.get("by_method", {}).get(line["method"], {})) for line in by_kind[kind]
        ]
        by_kind[kind] = [merge(shared, line) for shared, line in zip(common, by_kind[kind], strict=True)]
    return stored, by_kind


def packed_run(path: Path, record: dict[str, Any]) -> Run:
    """A run from its whole packed record, checked like that of a folder."""
    record = record | {"sessions": list((record.get("sessions") or {}).values())}
    if problem := find_problem(record):
        raise RunRecordError(path, f"{record.get('method')}, seed {record.get('seed')}: {problem}", PACK_AGAIN)
    return Run(path, record, record.pop("curves", {}))


def merge(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping laid over another, level by level.

    Example:
        >>> merge({"config": {"lr": 1, "steps": 5}}, {"config": {"lr": 2}, "seed": 0})
        {'config': {'lr': 2, 'steps': 5}, 'seed': 0}
    """
    merged = dict(shared)
    for key, value in own.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def leaves_of(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Everything that is no mapping, by its keys; empty mappings too."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from leaves_of(inner, (*path, str(key)))
    else:
        yield path, value


def setting_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Fields in which two stored recipes differ: runs share a mean only if there is none.

    Left out are a field that only one of them has (an older record), and what two different methods set.
    """
    described = [config["method"] for config in (a, b) if isinstance(config.get("method"), dict)]
    free: list[str] = []
    if len({method.get("label") for method in described}) > 1:
        for field in [field for method in described for field in method.get("set") or {}]:
            # Another name (of an optimiser, of a schedule) gives other values to all fields beside it.
            free += [field.removesuffix("name")] if field.endswith(".name") else [f"{field}:", f"{field}."]
    return [line for line in _differences(a, b) if not line.startswith(tuple(free))]


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        shared = [key for key in a if key in b and key not in NOT_COMPARED]
        return [line for key in shared for line in _differences(a[key], b[key], f"{path}.{key}".lstrip("."))]
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]


def _check_comparable(home: Path, runs: list[Run]) -> None:
    """Raise if runs do not belong together."""
    if not any(run.record.get("metric") for run in runs):
        reasons = "; ".join(sorted({str(run.record.get("reason")) for run in runs}))
        raise RunRecordError(home, f"no run got as far as training: {reasons}", "Correct that, then run it again.")
    seen: dict[tuple[str, int], Run] = {}
    first_of_method: dict[str, Run] = {}
    for run in runs:
        other = seen.setdefault((run.method, run.seed), run)
        if other is not run:
            problem = f"is a second run of {run.method!r} with seed {run.seed}; the first is {other.file}"
            raise RunRecordError(run.file, problem, "Keep one of them, or report their folders one by one.")
        for like in (runs[0], first_of_method.setdefault(run.method, run)):
            a, b = (
                {key: one.record[key] for key in ("recipe", "metric") if one.record.get(key)} | one.part("config")
                for one in (like, run)
            )
            if differing := setting_differences(a, b):
                problem = f"was made with other settings than {like.file}: {'; '.join(differing[:4])}"
                raise RunRecordError(run.file, problem, "They cannot be compared: put them into different folders.")


def _assemble(
    home: Path, file: Path, runs: list[Run], stored: Mapping[str, Any] | None, search: Mapping[str, Any] | None
) -> Comparison:
    """A comparison from its runs, its own record and that of its search, if it has them."""
    known = stored or {}
    _check_comparable(home, sorted(runs, key=lambda run: run.seed))
    labels = sorted({run.method for run in runs}, key=lambda label: (label != "default", label))
    advice = "Correct it, or run the comparison again."
    try:
        listed = [str(method["label"]) for method in known.get("methods", [])]
    except (TypeError, KeyError) as error:
        raise RunRecordError(file, "expected 'methods' to be a list of {label, slug}", advice) from error
    methods = tuple(dict.fromkeys([*listed, *labels]))
    runs = sorted(runs, key=lambda run: (run.seed, methods.index(run.method)))
    baseline, name = str(known.get("baseline") or methods[0]), str(known.get("name") or home.resolve().name)
    if baseline not in methods:
        problem = f"names {baseline!r} as baseline, which is none of its methods: {', '.join(methods)}"
        raise RunRecordError(file, problem, advice)
    ran = [(run.part("model").get("name"), run.part("data").get("name")) for run in runs]
    made = next((f"{name}: {str(model).rpartition(':')[2]} on {data}" for model, data in ran if model and data), name)
    recipe, scale = (str(known.get(key) or runs[0].record.get(key) or "") for key in ("recipe", "scale"))
    title, notes, rates = (str(known.get(key) or "") for key in ("title", "notes", "rates"))
    return Comparison(
        home, name, title or made, recipe, scale, baseline, methods, tuple(runs), notes, rates, stored, search
    )

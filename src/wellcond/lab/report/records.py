"""One stored run: its record and its rows, from files that may be damaged or hostile. Nothing in them is executed.

A packed run (`wellcond pack`) is one file: what runs share is stored once for their comparison, and rows are columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.lab.report.table import number, show
from wellcond.lab.run_records import COMPLETE, find_problem, matches, read_record

Rows = list[dict[str, Any]]
Keys = tuple[str, ...]

REPEAT = "Restore it, or delete {} and repeat the run."
PACK_AGAIN = "Restore it, or pack the runs again: wellcond pack."
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters that a terminal would obey, and those that turn text around; tabs and line ends are neither."""
NOT_COMPARED = frozenset({"method", "seed", "title", "description", "checkpoint", "logging", "workers"})
"""Settings that differ between the runs of a comparison, or change no number."""
PACKED = "wellcond-packed-run"
ROLES = ("q", "k", "v")
JACOBIAN = ("condition_number", "pseudo_condition_number", "papers_bound_log10", "bound_log10", "status")
KAPPAS, LARGEST, SMALLEST = (
    tuple(f"{prefix}{what}_{role}" for prefix in ("", "raw_") for role in ROLES)
    for what in ("kappa", "sigma_max", "sigma_min")
)
ARITHMETIC = ("normalised_entropy", "diagonal_mass", "dead")
MEASURED = ("step", "epoch", "layer", "head", *JACOBIAN, *ARITHMETIC, *KAPPAS, *LARGEST, *SMALLEST)
COPIES = {"condition_number": "pseudo_condition_number", **{f"raw_{key}": key for key in (*KAPPAS[:3], *LARGEST[:3])}}
"""Columns that are often equal to another, and then stored once."""


def check_stays_inside(folder: Path, places: Iterable[Path]) -> None:
    """Raise RunRecordError if a link leads from a place below a folder to somewhere else, where nothing is written."""
    inside = folder.resolve()
    for place in places:
        if not place.resolve().is_relative_to(inside):
            raise RunRecordError(place, f"is a link that leads out of {folder}, to {place.resolve()}", "Remove it.")


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
    says whether it had its cores to itself from beginning to end, so that its times are those of its method.
    """

    def __init__(self, folder: Path, record: dict[str, Any], packed: Mapping[str, Any] | None = None) -> None:
        self.folder, self.record, self.packed = folder, record, packed
        self.file = folder / "run.json" if packed is None else folder.with_suffix(".json")
        self.method, self.seed, self.status = str(record["method"]), int(record["seed"]), str(record.get("status"))
        self.sessions: Rows = list(record.get("sessions") or ())
        self.alone = bool(self.sessions) and all(session.get("alone") is True for session in self.sessions)

    @property
    def metric(self) -> Metric:
        """What it is judged by; nameless if it failed before that was known."""
        return Metric.of(self.record.get("metric") or {"name": "", "higher_is_better": True})

    def part(self, name: str) -> dict[str, Any]:
        """A mapping of its record, such as `final`, `best`, `test`, `seconds` or `data`; empty if there is none."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}

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
            said = f"has {name} {self.value}, but the end of evaluations.jsonl {rows[-1].get(name)}: one was changed"
            raise RunRecordError(self.file, said, REPEAT.format(self.folder))
        return rows

    @property
    def conditioning(self) -> Rows:
        """Rows of measured heads; empty if nothing was measured. Read anew each time, since there can be very many."""
        return self._rows("conditioning")

    def fine_tuned(self) -> list[Run]:
        """Runs that were fine-tuned from this one, with its method and seed."""
        if self.packed is None:
            paths = sorted((self.folder / "glue").glob("*/seed-0/run.json"))
            found = [Run(path.parent, read_json(path, "wellcond-run")) for path in paths]
        else:
            stored = self.packed.get("fine_tuned", {})
            found = [_packed_run(self.file, stored[name]) for name in sorted(stored)]
        for run in found:
            run.method, run.seed = self.method, self.seed
        return found

    def _rows(self, name: str) -> Rows:
        if self.packed is not None:
            try:
                return _unpack_rows(self.packed.get(name) or {})
            except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
                raise RunRecordError(self.file, f"its {name} cannot be read: {error}", PACK_AGAIN) from error
        path, advice, complete = self.folder / f"{name}.jsonl", REPEAT.format(self.folder), self.status in COMPLETE
        of_heads, mark = name == "conditioning", self.record.get("logs", {}).get(path.name)
        keys = ("step", "layer", "head") if of_heads else ("step",)
        if not path.is_file():
            if (self.status == "finished" and not of_heads) or (mark and mark["bytes"]):
                raise RunRecordError(path, f"is missing, though the run is {self.status}", advice)
            return []
        content = path.read_bytes()
        if mark and not matches(mark, content, complete=complete):
            raise RunRecordError(path, "was changed after it was written, or is not of the run in run.json", advice)
        # A run that was killed and resumed may have written a step twice; the later row is the one that counts.
        latest, lines = {}, [line for line in content.decode("utf-8", errors="replace").split("\n") if line.strip()]
        for at, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                latest[tuple([row[key] for key in keys])] = row
            except (ValueError, RecursionError, TypeError, KeyError) as error:
                if at < len(lines) or complete:  # half a last line is what a killed run leaves
                    said = f"row {at} of {len(lines)} is not JSON with the keys {', '.join(keys)} ({error!r})"
                    raise RunRecordError(path, said, advice) from error
        return sorted(latest.values(), key=lambda row: number(row["step"]))


def _unpack_rows(columns: Mapping[str, Any]) -> Rows:
    """Rows from packed columns; of heads, with the smallest singular values, which follow from others."""
    copies = {key: columns[COPIES[key]] for key in columns.get("copies", ())}
    stored = {key: value for key, value in columns.items() if key not in ("rows", "copies")} | copies
    spread = [value if isinstance(value, list) else [value] * columns.get("rows", 0) for value in stored.values()]
    rows = [dict(zip(stored, values, strict=True)) for values in zip(*spread, strict=True)]
    for row, (kappa, largest, smallest) in product(rows, zip(KAPPAS, LARGEST, SMALLEST, strict=True)):
        if row.get(kappa) is not None and row.get(largest) is not None:
            row[smallest] = number(row[largest]) / number(row[kappa])
    return rows


def merge(shared: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """A record from what all share and what is its own."""
    absent = {tuple(path) for path in rest.get("absent", ())}
    leaves = {path: leaf for path, leaf in leaves_of(shared) if path not in absent}
    return nested(leaves | dict(leaves_of({key: value for key, value in rest.items() if key != "absent"})))


def leaves_of(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Everything that is no mapping, by its keys; empty mappings too."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from leaves_of(inner, (*path, str(key)))
    else:
        yield path, value


def nested(leaves: Mapping[Keys, Any]) -> dict[str, Any]:
    """Mappings of mappings from `leaves_of`."""
    made: dict[str, Any] = {}
    for path, leaf in leaves.items():
        place = made
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = leaf
    return made


def read_packed(path: Path, shared: Mapping[str, Any], mark: str) -> Run:
    """A packed run, from its file and what all runs of its comparison share, with the checksum of that."""
    rest = read_json(path, PACKED)
    if rest.pop("shared", None) != mark:
        raise RunRecordError(path, "was packed with another comparison.json than the one above it", PACK_AGAIN)
    return _packed_run(path, merge(shared, rest))


def _packed_run(path: Path, record: dict[str, Any]) -> Run:
    record = record | {"sessions": list((record.get("sessions") or {}).values())}
    if problem := find_problem(record):
        raise RunRecordError(path, problem, PACK_AGAIN)
    return Run(path.with_suffix(""), record, record.pop("packed", {}))


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """A record of a kind, in which nothing was changed; RunRecordError for anything else."""
    try:
        record = read_record(path, kind)
    except (OSError, ValueError) as error:
        damaged = path.parent if kind == "wellcond-run" else path
        raise RunRecordError(path, str(error), REPEAT.format(damaged)) from error
    # Generated samples may hold anything; their pages show each such character by its number.
    return {key: value if key == "samples" else _without_controls(value) for key, value in record.items()}


def _without_controls(value: Any) -> Any:
    """Names and texts of a record as they may be shown anywhere, a terminal included."""
    if isinstance(value, str):
        return CONTROLS.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_controls(key): _without_controls(item) for key, item in value.items()}
    return [_without_controls(item) for item in value] if isinstance(value, list) else value


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

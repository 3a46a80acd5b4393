"""`load_comparisons`: run records below a folder, grouped into the comparisons they belong to. Only reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellcond.errors import RunRecordError
from wellcond.lab.report.records import Metric, Run, read_json, read_packed, setting_differences
from wellcond.lab.report.table import number
from wellcond.lab.run_records import checksum

MARK = 16
"""Characters of the checksum by which packed runs name what their comparison stores for all of them."""


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods under one recipe."""

    folder: Path
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
    """Where the learning rates of the methods are from, as the comparison said when it began."""

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


def load_comparisons(folder: Path) -> list[Comparison]:
    """Every comparison below a folder, by path.

    A run belongs to the nearest folder above it that has a `comparison.json`. Runs without one form a comparison of
    the folder that holds their method folders, methods by name, `default` first and baseline. Packed runs
    (`wellcond pack`) are files `METHOD/seedN.json` below their `comparison.json`. No run at all, or a file that is
    broken or of another version, is a RunRecordError.
    """
    folder = Path(folder)
    described = {path.parent: read_json(path, "wellcond-comparison") for path in folder.rglob("comparison.json")}
    grouped: dict[Path, list[Run]] = {}
    for path in sorted(folder.rglob("run.json")):
        place, parts = path.parent, path.parent.relative_to(folder).parts
        inside = [place, *place.parents][: len(parts) + 1]
        # Fine-tuning of a run, and the search before a comparison (tuning/METHOD/VALUES/seedN), are no part of it.
        if any((above / "run.json").is_file() for above in inside[1:]) or parts[-4:-3] == ("tuning",):
            continue
        home = next((above for above in inside if above in described), inside[2] if len(inside) > 2 else folder)
        grouped.setdefault(home, []).append(Run(place, read_json(path, "wellcond-run")))
    for home, stored in described.items():
        shared = stored.get("shared")
        if shared is None:
            continue
        if not isinstance(shared, dict):
            raise RunRecordError(home / "comparison.json", "expected 'shared' to be a mapping", "Pack the runs again.")
        mark, packed = checksum(shared)[:MARK], sorted(home.glob("*/seed*.json"))
        grouped.setdefault(home, []).extend(read_packed(path, shared, mark) for path in packed)
    if not any(grouped.values()):
        raise RunRecordError(folder, "holds no run.json and no packed run at any depth", "Make some: wellcond compare.")
    return [_assemble(home, runs, described.get(home, {})) for home, runs in sorted(grouped.items()) if runs]


def _check_comparable(home: Path, runs: list[Run]) -> None:
    """Raise if runs do not belong together."""
    if not any(run.record.get("metric") for run in runs):
        reasons = "; ".join(sorted({str(run.record.get("reason")) for run in runs}))
        raise RunRecordError(home, f"no run got as far as training: {reasons}", "Mend that, then run it again.")
    seen: dict[tuple[str, int], Run] = {}
    first_of_method: dict[str, Run] = {}
    for run in runs:
        other = seen.setdefault((run.method, run.seed), run)
        if other is not run:
            said = f"is a second run of {run.method!r} with seed {run.seed}; the first is {other.file}"
            raise RunRecordError(run.file, said, "Keep one of them, or report their folders one by one.")
        for like in (runs[0], first_of_method.setdefault(run.method, run)):
            a, b = (
                {key: one.record[key] for key in ("recipe", "metric") if one.record.get(key)} | one.part("config")
                for one in (like, run)
            )
            if differing := setting_differences(a, b):
                said = f"was made with other settings than {like.file}: {'; '.join(differing[:4])}"
                raise RunRecordError(run.file, said, "They cannot be compared: put them into different folders.")


def _assemble(home: Path, runs: list[Run], stored: dict[str, Any]) -> Comparison:
    """A comparison from its runs and its `comparison.json`, if it has one."""
    runs = sorted(runs, key=lambda run: run.seed)
    _check_comparable(home, runs)
    found = sorted({run.method for run in runs}, key=lambda label: (label != "default", label))
    file, advice = home / "comparison.json", "Correct it, or run the comparison again."
    try:
        listed = [str(method["label"]) for method in stored.get("methods", [])]
    except (TypeError, KeyError) as error:
        raise RunRecordError(file, "expected 'methods' to be a list of {label, slug}", advice) from error
    methods = tuple(dict.fromkeys([*listed, *found]))
    baseline, name = str(stored.get("baseline") or methods[0]), str(stored.get("name") or home.resolve().name)
    if baseline not in methods:
        said = f"names {baseline!r} as baseline, which is none of its methods: {', '.join(methods)}"
        raise RunRecordError(file, said, advice)
    ran = [(run.part("model").get("name"), run.part("data").get("name")) for run in runs]
    made = next((f"{name}: {str(model).rpartition(':')[2]} on {data}" for model, data in ran if model and data), name)
    recipe, scale = (str(stored.get(key) or runs[0].record.get(key) or "") for key in ("recipe", "scale"))
    title, notes, rates = (str(stored.get(key) or "") for key in ("title", "notes", "rates"))
    return Comparison(home, name, title or made, recipe, scale, baseline, methods, tuple(runs), notes, rates)

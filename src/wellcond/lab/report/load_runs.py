"""`load_comparisons`: run records below a folder, grouped into the comparisons they belong to. Only reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellcond.lab.report.run_record import Metric, Run, RunRecordError, read_json, read_packed
from wellcond.lab.report.same_settings import setting_differences
from wellcond.run_records import checksum


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

    @property
    def metric(self) -> Metric:
        """What all runs are evaluated by while they train."""
        return self.runs[0].metric

    @property
    def tested(self) -> bool:
        """Whether runs have scores on a test split, which then are their results."""
        return any(run.finished and run.test for run in self.runs)

    @property
    def result(self) -> Metric:
        """What all runs are judged by: the metric on the test split or, without one, at the last evaluation."""
        return replace(self.metric, name=f"test {self.metric.name}") if self.tested else self.metric

    @property
    def tested_weights(self) -> str:
        """With which weights the test split was scored, in words."""
        weights = sorted({str(run.test.get("weights")) for run in self.runs if run.finished and run.test})
        names = {"best": "the weights of the best evaluation", "last": "the last weights"}
        return f"with {' or '.join(names.get(name, name) for name in weights)}"

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

    def results(self, method: str) -> dict[int, float]:
        """What the runs of a method that count in means are judged by, by seed."""
        if not self.tested:
            return self.last_values(method)
        values = {seed: run.test_value for seed, run in self.finished(method).items()}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}

    def last_values(self, method: str) -> dict[int, float]:
        """Metric at the last evaluation of the runs of a method that count in means, by seed."""
        return {seed: run.value for seed, run in self.finished(method).items()}


def load_comparisons(folder: Path) -> list[Comparison]:
    """Every comparison below a folder, by path.

    A run belongs to the nearest folder above it that has a `comparison.json`. Runs without one form a comparison of
    the folder that holds their method folders, methods by name, `default` first and baseline. Packed runs
    (`wellcond pack`) are files `METHOD/seedN.json` below their `comparison.json`.

    Args:
        folder: results of `wellcond compare` or `wellcond train`, at any depth.

    Raises: RunRecordError if there is no run, or a file is broken or of another version.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunRecordError(folder, "is not a folder", "Give the folder that wellcond compare wrote.")
    described = {path.parent for path in folder.rglob("comparison.json")}
    grouped: dict[Path, list[Run]] = {}
    for path in sorted(folder.rglob("run.json")):
        # Fine-tuning of a run, and the search before a comparison, are no part of it.
        if _is_inside_a_run(path.parent, folder) or _is_of_a_search(path.parent, folder):
            continue
        grouped.setdefault(_home(path.parent, folder, described), []).append(
            Run(path.parent, read_json(path, "wellcond-run"))
        )
    for home in sorted(described):
        grouped.setdefault(home, []).extend(_packed_runs(home))
    grouped = {home: runs for home, runs in grouped.items() if runs}
    if not grouped:
        raise RunRecordError(
            folder,
            "holds no run.json and no packed run, at any depth",
            "Make runs with wellcond compare or wellcond train first.",
        )
    return [_assemble(home, runs, home in described) for home, runs in sorted(grouped.items())]


def shared_mark(shared: dict[str, Any]) -> str:
    """By which packed runs name what their comparison stores for all of them."""
    return checksum(shared)[:16]


def _packed_runs(home: Path) -> list[Run]:
    described = read_json(home / "comparison.json", "wellcond-comparison")
    if "shared" not in described:
        return []
    shared = described["shared"]
    if not isinstance(shared, dict):
        raise RunRecordError(home / "comparison.json", "expected 'shared' to be a mapping", "Pack the runs again.")
    mark = shared_mark(shared)
    return [read_packed(path, shared, mark) for path in sorted(home.glob("*/seed*.json"))]


def _is_inside_a_run(place: Path, folder: Path) -> bool:
    above = [parent for parent in place.parents if parent.is_relative_to(folder)]
    return any((parent / "run.json").is_file() for parent in above)


def _is_of_a_search(place: Path, folder: Path) -> bool:
    """Whether a run is in tuning/METHOD/VALUES/seedN of a folder that is not the search's own."""
    return place.relative_to(folder).parts[-4:-3] == ("tuning",)


def _home(run: Path, folder: Path, described: set[Path]) -> Path:
    """The folder of the comparison that a run belongs to."""
    above = [run, *run.parents]
    inside = above[: above.index(folder) + 1]
    nearest = next((parent for parent in inside if parent in described), None)
    return nearest or (inside[2] if len(inside) > 2 else folder)


def _share_metric(home: Path, runs: list[Run]) -> None:
    """Give runs that failed before they knew their metric that of the others."""
    known = next((run.record["metric"] for run in runs if run.record.get("metric")), None)
    if known is None:
        reasons = "; ".join(sorted({str(run.record.get("reason")) for run in runs}))
        raise RunRecordError(home, f"no run got as far as training: {reasons}", "Mend that, then run it again.")
    for run in runs:
        run.record["metric"] = run.record.get("metric") or known


def _assemble(home: Path, runs: list[Run], described: bool) -> Comparison:
    runs = sorted(runs, key=lambda run: run.seed)
    _share_metric(home, runs)
    seen: dict[tuple[str, int], Run] = {}
    first_of_method: dict[str, Run] = {}
    for run in runs:
        other = seen.setdefault((run.method, run.seed), run)
        if other is not run:
            raise RunRecordError(
                run.file,
                f"is a second run of {run.method!r} with seed {run.seed}; the first is {other.file}",
                "Keep one of them, or report their folders one by one.",
            )
        if (run.record.get("recipe"), run.metric) != (runs[0].record.get("recipe"), runs[0].metric):
            raise RunRecordError(
                run.file,
                f"has recipe {run.record.get('recipe')!r} and metric {run.metric.name!r}, unlike "
                f"{runs[0].file} in the same comparison",
                "Runs of different recipes cannot be compared: report their folders one by one.",
            )
        for like in (runs[0], first_of_method.setdefault(run.method, run)):
            differing = setting_differences(like.record.get("config"), run.record.get("config"))
            if differing:
                raise RunRecordError(
                    run.file,
                    f"was made with other settings than {like.file}: {'; '.join(differing[:4])}",
                    "Runs under different settings cannot be compared: put them into different folders.",
                )
    found = sorted({run.method for run in runs}, key=lambda label: (label != "default", label))
    stored = read_json(home / "comparison.json", "wellcond-comparison") if described else {}
    try:
        listed = [str(method["label"]) for method in stored.get("methods", [])]
    except (TypeError, KeyError) as error:
        raise RunRecordError(
            home / "comparison.json", "expected 'methods' to be a list of {label, slug}", "Run the comparison again."
        ) from error
    methods = tuple(dict.fromkeys([*listed, *found]))
    baseline = str(stored.get("baseline") or methods[0])
    if baseline not in methods:
        raise RunRecordError(
            home / "comparison.json",
            f"names {baseline!r} as baseline, which is none of its methods: {', '.join(methods)}",
            "Correct 'baseline', or run the comparison again.",
        )
    name = str(stored.get("name") or home.resolve().name)
    first = runs[0].record
    return Comparison(
        folder=home,
        name=name,
        title=str(stored.get("title") or _title_of(name, runs)),
        recipe=str(stored.get("recipe") or first.get("recipe") or ""),
        scale=str(stored.get("scale") or first.get("scale") or ""),
        baseline=baseline,
        methods=methods,
        runs=tuple(runs),
        notes=str(stored.get("notes") or ""),
    )


def _title_of(name: str, runs: list[Run]) -> str:
    """Made of what ran, where no title is stored."""
    for run in runs:
        model, data = ((run.record.get(key) or {}).get("name") for key in ("model", "data"))
        if model and data:
            return f"{name}: {str(model).rpartition(':')[2]} on {data}"
    return name

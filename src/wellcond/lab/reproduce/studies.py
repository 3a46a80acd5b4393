"""Stored runs by study and method: runs made here, or committed records; their numbers, and what they ran."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from wellcond.errors import RunRecordError
from wellcond.lab.records import Comparison, Metric, load_comparisons, packed_path, read_packed, setting_differences
from wellcond.lab.report.analysis import Analysis, analyse, step_ratios
from wellcond.lab.report.glue import SHOWN, GlueScores, load_glue
from wellcond.lab.report.table import finite_mean, number, show_seeds
from wellcond.lab.reproduce.catalogue import Address, AtScale, Entry, Row, catalogue

RUNS = "runs"
"""Folder of the studies, beside those of the ids."""
OWN_METRICS = {
    "step_ratio": Metric("time of a step / that of the baseline", higher_is_better=False, percent=False),
    "peak_memory": Metric("peak memory, MB", higher_is_better=False, percent=False),
}
TEACHERS = {"runs/": "weight-selection/", "/seed0": ""}
"""Parts of the path of a teacher, and what stands there in the labels of committed records."""


@dataclass(frozen=True)
class StoredStudy:
    """The runs of one study."""

    comparison: Comparison

    @functools.cached_property
    def analysis(self) -> Analysis:
        """The statistics of this study."""
        return analyse(self.comparison)

    @functools.cached_property
    def glue(self) -> GlueScores | None:
        """Scores of fine-tuning; None if there are none."""
        try:
            return load_glue(self.comparison.folder)
        except RunRecordError:
            return None

    def label(self, row: Row) -> str:
        """The label of a method in these records."""
        label = row.method
        for part, other in {} if label in self.comparison.methods else TEACHERS.items():
            label = label.replace(part, other)
        return label

    def values(self, row: Row, metric: str) -> dict[int, float]:
        """A number of the finished runs of a method, by seed; empty if there are none."""
        method = self.label(row)
        if metric.startswith("glue:"):
            return {} if self.glue is None else self.glue.values(method, metric.removeprefix("glue:"))
        if metric not in OWN_METRICS:
            return self.comparison.results(method, metric)
        found = step_ratios(self.comparison, method)
        if metric == "peak_memory":
            finished = self.comparison.finished(method)
            found = {seed: number(run.record.get("peak_memory_bytes")) / 1e6 for seed, run in finished.items()}
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    def training_time(self, row: Row) -> str:
        """Hours:minutes of training of a method, as paper S prints it: the mean over runs alone on their machine."""
        runs = [run for run in self.comparison.finished(self.label(row)).values() if run.alone]
        minutes = finite_mean(number(run.part("seconds").get("training")) for run in runs) / 60
        return f"{minutes // 60:.0f}:{minutes % 60:02.0f}"

    def metric(self, name: str) -> Metric:
        """How a number is shown."""
        if name in OWN_METRICS or name.startswith("glue:"):
            return OWN_METRICS.get(name, SHOWN)
        return self.comparison.result if name == "" else replace(self.comparison.metric, name=name)


@functools.lru_cache(maxsize=64)
def find_study(folder: Path) -> StoredStudy | None:
    """The study of a folder; None if there are no runs."""
    if packed_path(folder).is_file():
        return StoredStudy(read_packed(packed_path(folder)))
    if not any(folder.glob("*/*/run.json")):
        return None
    return next((StoredStudy(found) for found in load_comparisons(folder) if found.folder == folder), None)


@dataclass(frozen=True)
class Collection:
    """All studies below a folder, read when they are asked for."""

    folder: Path
    committed: bool = False
    """Whether the folder is laid out like results/, not like what `reproduce` writes."""

    def study(self, address: Address) -> StoredStudy | None:
        """The runs at an address; None if there are none."""
        place = address.records if self.committed else f"{RUNS}/{address.name}"
        return find_study(self.folder / place) if place else None

    def has_runs(self, entry: Entry) -> bool:
        """Whether there are runs of any row and column of a table or figure."""
        return any(self.study(address) is not None for address in entry.addresses())


def may_be_paired(one: StoredStudy, other: StoredStudy, changes: Iterable[str]) -> bool:
    """Whether two stored studies differ by nothing but these settings, each ``path=value``.

    Committed records of a variant may be of another recipe than the study's, or of the same one under other settings.
    """
    a, b = one.comparison, other.comparison
    meant = {setting.split("=", 1)[0] for setting in changes}
    found = setting_differences(a.runs[0].part("config"), b.runs[0].part("config"))
    return (a.recipe, a.scale) == (b.recipe, b.scale) and all(line.split(":", 1)[0] in meant for line in found)


def differences_from_paper(entry: Entry, records: Collection) -> Iterator[str]:
    """What our runs do otherwise than the paper: a line for each comparison that has runs."""
    for address in entry.addresses():
        stored, plain = records.study(address), records.study(Address(address.study))
        if stored is None:
            continue
        apart = ""
        if plain is not None and plain is not stored and not may_be_paired(plain, stored, address.settings):
            apart = "; another recipe or other settings than the rows above, so that there is no gain over them"
        found, study = stored.comparison, catalogue().studies[address.study]
        ours = study.at(found.scale)
        facts = [*what_ran(found, study.paper), *([ours.note] if ours and ours.note else [])]
        named = ", ".join((study.title, *address.variants)) + ("," if address.variants else "")
        yield f"{named} ran as: {'; '.join(facts)}{apart}."


def what_was_built(comparison: Comparison) -> str:
    """The model by its name, what the recipe built it with, and what it changed in it."""
    model = comparison.runs[0].part("config").get("model") or {}
    changes = {key: model.get(key) for key in ("norms", "qk_norm", "layer_scale")}
    changed = {key: value for key, value in changes.items() if value not in (None, False, "keep")}
    settings = (model.get("arguments") or {}) | changed
    return ", ".join([str(model.get("name")), *(f"{key} {value}" for key, value in settings.items())])


def what_ran(comparison: Comparison, paper: AtScale | None = None) -> Iterator[str]:
    """What the records ran, never the set-up that they stand for; its sizes, if given, stand beside ours."""
    model, data, progress = (comparison.runs[0].part(name) for name in ("model", "data", "progress"))
    yield f"recipe {comparison.recipe}, scale {comparison.scale}"
    size = f"{model['parameters'] / 1e6:.2f} M parameters" if model.get("parameters") else "parameters not recorded"
    yield size + (f" (at scale paper: {paper.parameters:g} M)" if paper and paper.parameters else "")
    samples = f"{data.get('name', 'data not recorded')}, {data.get('train', '?')} training samples"
    yield samples + (f" (at scale paper: {paper.samples})" if paper and paper.samples else "")
    yield f"{progress.get('num_steps', '?')} updates, {float(progress.get('num_epochs') or 0):.3g} epochs"
    yield show_seeds(len(comparison.seeds))

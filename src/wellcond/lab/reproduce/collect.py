"""Numbers of stored runs, by study and method: of runs made here, or of committed records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from wellcond.lab.report.analysis import Analysis, analyse, seconds_per_step
from wellcond.lab.report.glue import SHOWN, GlueScores, load_glue
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.records import Metric, RunRecordError, setting_differences
from wellcond.lab.report.values import number
from wellcond.lab.reproduce.catalogue_files import Row, studies, variants
from wellcond.lab.reproduce.plan import RUNS, study_name

RATIO = Metric("time of a step / that of the baseline", higher_is_better=False, percent=False)
MEMORY = Metric("peak memory, MB", higher_is_better=False, percent=False)


@dataclass(frozen=True)
class StoredStudy:
    """The runs of one study, as far as there are any."""

    folder: Path
    committed: bool

    @cached_property
    def comparison(self) -> Comparison | None:
        """None if there are no runs."""
        if not any(any(self.folder.glob(pattern)) for pattern in ("*/*/run.json", "*/seed*.json")):
            return None
        return next((c for c in load_comparisons(self.folder) if c.folder == self.folder), None)

    @cached_property
    def analysis(self) -> Analysis | None:
        """Its statistics."""
        return None if self.comparison is None else analyse(self.comparison)

    @cached_property
    def glue(self) -> GlueScores | None:
        """Scores of fine-tuning; None if there are none."""
        try:
            return None if self.comparison is None else load_glue(self.folder)
        except RunRecordError:
            return None

    def label(self, row: Row) -> str:
        """Of a method, in these records."""
        return row.in_records if self.committed and row.in_records else row.label

    def values(self, row: Row, metric: str) -> dict[int, float]:
        """A number of the finished runs of a method, by seed; empty if there are none."""
        comparison, method = self.comparison, self.label(row)
        if comparison is None or method not in comparison.methods:
            return {}
        if metric.startswith("glue:"):
            return {} if self.glue is None else self.glue.values(method, metric.removeprefix("glue:"))
        if metric == "":
            return comparison.results(method)
        if metric == "step_ratio":
            base = comparison.finished(comparison.baseline)
            found = {
                seed: seconds_per_step(run) / seconds_per_step(base[seed])
                for seed, run in comparison.finished(method).items()
                if seed in base
            }
        elif metric == "peak_memory":
            found = {
                seed: number(run.record.get("peak_memory_bytes")) / 1e6
                for seed, run in comparison.finished(method).items()
            }
        else:
            found = {
                s: number((r.record.get("final") or {}).get(metric)) for s, r in comparison.finished(method).items()
            }
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    def metric(self, name: str) -> Metric:
        """How a number is shown."""
        named = {"step_ratio": RATIO, "peak_memory": MEMORY}
        if name in named:
            return named[name]
        if name.startswith("glue:") or self.comparison is None:
            return SHOWN
        return self.comparison.result if name == "" else replace(self.comparison.metric, name=name)

    def lost(self, row: Row) -> int:
        """Runs of a method that diverged or failed."""
        if self.comparison is None:
            return 0
        return sum(run.outcome in ("diverged", "failed") for run in self.comparison.of(self.label(row)))


def may_be_paired(one: StoredStudy | None, other: StoredStudy | None, variants_used: Iterable[str]) -> bool:
    """Whether two stored studies differ by nothing but the settings of these variants.

    Committed records of a variant may be of another recipe than the study's, or of the same one under other settings.
    """
    found = [s.comparison for s in (one, other) if s is not None and s.comparison is not None]
    if len({(c.recipe, c.scale) for c in found}) != 1:
        return False
    meant = {setting.split("=", 1)[0] for name in variants_used if name for setting in variants()[name].settings}
    first, last = (c.runs[0].record.get("config") or {} for c in (found[0], found[-1]))
    return all(line.split(":", 1)[0] in meant for line in setting_differences(first, last))


@dataclass(frozen=True)
class Collection:
    """All studies below a folder, read when they are asked for."""

    folder: Path
    committed: bool = False
    """Whether the folder is laid out like results/, not like what `reproduce` writes."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Of committed records: `Entry.records`."""

    def study(self, name: str, variant: str = "") -> StoredStudy | None:
        """None if committed records have no such study."""
        if not self.committed:
            return self._stored(self.folder / RUNS / study_name(name, variant))
        usual = self.places.get(name, studies()[name].records)
        place = variants()[variant].records.get(name) if variant else usual
        return None if place is None else self._stored(self.folder / place)

    def _stored(self, folder: Path) -> StoredStudy:
        if folder not in self._kept:
            self._kept[folder] = StoredStudy(folder, self.committed)
        return self._kept[folder]

    @cached_property
    def _kept(self) -> dict[Path, StoredStudy]:
        return {}

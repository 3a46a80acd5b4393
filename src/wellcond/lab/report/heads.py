"""Maps of the heads of runs that were monitored (`logging.monitor_every` of a recipe), for the page of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from wellcond.errors import MonitorError
from wellcond.lab.records import Comparison
from wellcond.lab.report.table import visible
from wellcond.training.alarms import Alarms
from wellcond.training.heads_map import maps_as_html
from wellcond.training.series import Series

FILE = "monitor.jsonl"
COLUMNS = ("max_logit", "entropy", "sec_qk")


@dataclass(frozen=True)
class MonitoredRun:
    """One run of a method: maps of its heads at its last reading, and what alarms its readings raise."""

    title: str
    maps: str
    """HTML, escaped."""
    alarms: tuple[str, ...]
    problem: str = ""
    """Why there are no maps."""


def find_heads(comparison: Comparison) -> list[MonitoredRun]:
    """For each method, the finished run with the lowest seed beside whose record lies what a monitor wrote."""
    found = []
    for method in comparison.methods:
        runs = comparison.finished(method).values()
        run = next((run for run in runs if run.curves is None and (run.folder / FILE).is_file()), None)
        if run is None:
            continue
        title = f"{run.method}, seed {run.seed}"
        try:
            series = Series.read(run.folder / FILE)
        except MonitorError as error:
            found.append(MonitoredRun(title, "", (), visible(str(error))))
            continue
        alarms = tuple(f"step {one.step}, {one.severity}: {visible(one.verdict)}" for one in Alarms.replay(series))
        found.append(MonitoredRun(title, maps_as_html(series, COLUMNS, heading="h4"), alarms))
    return found

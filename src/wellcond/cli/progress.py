"""Progress of runs: bars with loss, metric, throughput and time left on a terminal; one line per run elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from wellcond.lab.train.engine import Event
from wellcond.lab.train.run import Job

WAITING = "waiting, another process is running it"
STARTING_AGAIN = "starting again"


class RunsProgress:
    """What runs report, shown. Give `observe` to the engine."""

    def __init__(self, num_jobs: int, *, quiet: bool = False) -> None:
        """Bars go to standard error, so that standard output stays for results."""
        self.num_jobs, self.quiet = num_jobs, quiet
        self.console = Console(stderr=True)
        self.bars: Progress | None = None
        self._whole: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}
        self._state: dict[str, dict[str, Any]] = {}
        self._done = 0

    @contextlib.contextmanager
    def shown(self) -> Iterator[RunsProgress]:
        """Show bars if there is a terminal."""
        if self.quiet or not self.console.is_terminal:
            yield self
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeLeft(),
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as self.bars:
            self._whole = self.bars.add_task("[bold]all runs", total=self.num_jobs, numbers="")
            yield self

    def observe(self, job: Job, event: Event) -> None:
        """Take note of an event of a run."""
        key = str(job.folder)
        state = self._state.setdefault(key, {"loss": None, "metric": "", "phase": "", "since": time.perf_counter()})
        kind = event["event"]
        if kind in ("end", "failed"):
            self._end(job.title, key, event.get("record"), event.get("problem", ""))
            return
        if kind == "lost":
            state["phase"] = STARTING_AGAIN
            if not self.quiet:
                lost = f"{escape(job.title)}: [yellow]{STARTING_AGAIN}[/], {escape(event['problem'])}"
                self.console.print(lost, highlight=False, soft_wrap=True)
        elif kind == "waiting":
            if state["phase"] not in (WAITING, STARTING_AGAIN) and not self.quiet:
                self.console.print(f"{escape(job.title)}: {WAITING}", highlight=False, soft_wrap=True)
            state["phase"] = WAITING
        elif kind == "start":
            state |= {"first": event["step"], "since": time.perf_counter(), "batch": event["batch_size"]}
            state |= {"phase": "", "total": event["num_steps"], "step": event["step"]}
        elif kind == "step":
            state |= {"step": event["step"], "total": event["num_steps"], "loss": event["loss"], "phase": ""}
        elif kind == "phase":
            state["phase"] = event["phase"]
        elif kind == "evaluation":
            state |= {"metric": _metric(event["row"]), "phase": "", "step": event["row"]["step"]}
        self._draw(job, key, state)

    def _end(self, job_name: str, key: str, record: dict[str, Any] | None, problem: str) -> None:
        self._done += 1
        if self.bars is not None:
            if key in self._tasks:
                self.bars.remove_task(self._tasks.pop(key))
            assert self._whole is not None
            self.bars.update(self._whole, completed=self._done)
        if not self.quiet and (record is not None or self.num_jobs > 1):  # the failure of a single run ends the command
            self.console.print(self._line(job_name, record, problem), highlight=False, soft_wrap=True)

    def _line(self, name: str, record: dict[str, Any] | None, problem: str) -> str:
        place = f"{escape(f'[{self._done}/{self.num_jobs}]')} {escape(name)}"
        if record is None:
            return f"{place}: [red]failed[/]: {escape(problem.splitlines()[0])}"
        colour = {"finished": "green", "interrupted": "yellow"}.get(record["status"], "red")
        text = f"{place}: [{colour}]{record['status']}[/]"
        if record["final"] is not None:
            text += f", {_metric(record['final'])}"
        if test := record.get("test"):
            text += f", test {_metric(test)} ({test['weights']} weights, step {test['step']})"
        seconds = sum(record["seconds"].values())
        return f"{text}, {seconds:.1f} s" + (f" ({escape(record['reason'])})" if record["reason"] else "")

    def _draw(self, job: Job, key: str, state: dict[str, Any]) -> None:
        if self.bars is None:
            return
        numbers = f"[cyan]{state['phase']}" if state["phase"] else self._numbers(state)
        if key not in self._tasks:
            self._tasks[key] = self.bars.add_task(escape(job.title), total=None, numbers=numbers)
        self.bars.update(self._tasks[key], total=state.get("total"), completed=state.get("step", 0), numbers=numbers)

    def _numbers(self, state: dict[str, Any]) -> str:
        parts = [] if state["loss"] is None else [f"loss {state['loss']:.3f}"]
        parts += [state["metric"]] if state["metric"] else []
        steps, seconds = state.get("step", 0) - state.get("first", 0), time.perf_counter() - state["since"]
        if steps > 0:
            parts.append(f"{steps * state['batch'] / seconds:,.0f} samples/s")
        return "  ".join(parts)


def _metric(row: dict[str, Any]) -> str:
    """The score of an evaluation, in words."""
    if "accuracy" in row:
        return f"accuracy {100 * row['accuracy']:.1f} %"
    names = [name for name in row if name not in ("step", "epoch", "loss", "train_loss", "seconds", "weights")]
    return f"{names[0]} {row[names[0]]:.4g}" if names else f"loss {row['loss']:.4g}"

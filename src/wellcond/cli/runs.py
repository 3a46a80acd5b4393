"""How commands that train show their runs: bars on a terminal, a line for each run, and what became of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from wellcond.cli.console import echo_json, make_console
from wellcond.files import to_json
from wellcond.lab.comparison import Watch, describe_end, describe_score, is_rank_zero
from wellcond.lab.pool import JobObserver, Outcome, run_jobs
from wellcond.lab.train.engine import Event
from wellcond.lab.train.run import Job

COLOURS = {"finished": "green", "interrupted": "yellow"}


class ConsoleWatch(Watch):
    """Lines on standard output or error; bars on standard error if that is a terminal, else a line for each run."""

    def __init__(self, *, quiet: bool = False, stderr: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.stderr = stderr

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        for line in lines if not self.quiet else ():
            make_console(stderr=self.stderr).print(line, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def observing(self, jobs: Sequence[Job]) -> Iterator[JobObserver]:
        """Bars for the runs that go on, and one for all."""
        console = make_console(stderr=True, quiet=self.quiet)
        tell = functools.partial(console.print, highlight=False, soft_wrap=True)
        name, what = TextColumn("{task.description}"), TextColumn("{task.fields[said]}")
        columns = name, BarColumn(bar_width=24), MofNCompleteColumn(), what, TimeElapsedColumn(), TimeLeft()
        bars = Progress(*columns, console=console, refresh_per_second=4)
        whole = bars.add_task("[bold]all runs", total=len(jobs), said="")
        tasks: dict[str, TaskID] = {}

        def observe(job: Job, event: Event) -> None:
            kind, key, title = event["event"], str(job.folder), escape(job.title)
            if kind in ("end", "failed"):
                bars.advance(whole)
                if key in tasks:
                    bars.remove_task(tasks.pop(key))
                place = f"{escape(f'[{bars.tasks[0].completed:.0f}/{len(jobs)}]')} {title}"
                if kind == "end":
                    status, comma, rest = describe_end(event["record"]).partition(", ")
                    tell(f"{place}: [{COLOURS.get(status, 'red')}]{status}[/]{comma}{escape(rest)}")
                elif len(jobs) > 1:  # the failure of a single run ends the command
                    tell(f"{place}: [red]failed[/]: {escape(event['problem'].splitlines()[0])}")
                return
            if kind == "note":
                tell(f"{title}: {escape(event['text'])}")
                return
            if kind == "lost":
                tell(f"{title}: [yellow]starting again[/], {escape(event['problem'])}")
            if key not in tasks:
                tasks[key] = bars.add_task(title, total=None, said="")
            loss = event.get("loss")
            said = escape(event.get("phase", "")) if loss is None else f"loss {loss:.3f}"
            said = describe_score(event["row"]) if kind == "evaluation" else said
            bars.update(tasks[key], total=event.get("num_steps"), completed=event.get("step"), said=said)

        with bars if console.is_terminal else contextlib.nullcontext():
            yield observe


def run_watched(jobs: Sequence[Job], asked: int | None, *, quiet: bool, ranks: int = 1) -> Outcome:
    """Run jobs on this machine, `asked` at once, each of so many ranks, and show how they go on."""
    with ConsoleWatch(quiet=quiet).observing(jobs) as observer:
        return run_jobs(jobs, observer=observer, num_workers=asked, ranks=ranks)


def exit_code(outcome: Outcome) -> int:
    """130 if the user stopped it, which the first process alone says; 1 if a run failed or none finished, else 0."""
    if outcome.interrupted:
        return 130 if is_rank_zero() else int(bool(outcome.failures))
    return int(bool(outcome.failures or lost_runs(outcome)))


def lost_runs(outcome: Outcome) -> list[str]:
    """How every run ended where none finished; a comparison in which some diverged has a result."""
    if any(record["status"] == "finished" for record in outcome.records):
        return []
    return [f"{one['method']}, seed {one['seed']}: {one['status']}, {one['reason']}" for one in outcome.records]


def tell_end(outcome: Outcome, *, as_json: bool = False, **more: Any) -> int:
    """Say what failed, or print every run, and `more`, as JSON; returns the exit code."""
    out = make_console()
    if as_json and is_rank_zero():
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [
            {name: record[name] for name in shown if name in record} | {"lr": record["config"]["optimizer"]["lr"]}
            for record in outcome.records
        ]
        rows += [
            {"method": job.method.label, "seed": job.seed, "status": "failed", "reason": problem}
            for job, problem in outcome.failures
        ]
        echo_json(to_json({"runs": rows, "interrupted": outcome.interrupted, **more}, indent=1))
    elif is_rank_zero():
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        for lost in lost_runs(outcome) if not outcome.interrupted else ():
            out.print(f"[red]no result:[/] {escape(lost)}; try a smaller optimizer.lr", soft_wrap=True)
        if outcome.interrupted:
            out.print("[yellow]stopped[/]; the same command resumes from here")
    return exit_code(outcome)

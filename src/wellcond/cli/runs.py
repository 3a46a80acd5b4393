"""Runs of every command that trains: the data they are given, how they are watched, and what is told at their end."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from wellcond.cli.app import OptionError, is_first_process, read_jobs
from wellcond.cli.console import make_console
from wellcond.errors import WellcondError
from wellcond.files import to_json, write_atomically
from wellcond.lab.cluster import RaySettings
from wellcond.lab.data.base import DataError
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.recipe import Recipe
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.prepare import load_cached_data, prepare_task
from wellcond.lab.train.run import Job, num_cores
from wellcond.lab.train.run_folder import FolderInUse, RunFolder

WAITING, STARTING_AGAIN = "waiting, another process is running it", "starting again"
LISTS = ("comparison.json", "tuning.json")
"""Files of a comparison that list its runs."""


# Before the runs


def fit_to_data(name: str, *, scale: str | None, overrides: Sequence[str], quiet: bool) -> list[str]:
    """Read the user's own data once, before anything is written; returns what to change in the recipe, as overrides.

    A recipe for other data may score a split that these do not have, or take a batch larger than all of them.
    """
    console, changes = Console(stderr=True, quiet=quiet), []
    recipe, base = load_recipe(name, scale=scale, overrides=overrides)

    def change(override: str, reason: str) -> None:
        changes.append(override)
        console.print(f"note: {override}, since {reason}", markup=False, highlight=False, soft_wrap=True)

    with console.status("reading the data"):
        try:
            data = load_cached_data(recipe.data.model_dump_json(), base)
        except DataError as error:
            if recipe.data.source != "hub":
                raise
            asked = recipe.data.model_dump()["id"]
            raise OptionError(
                f"--data: there is no file or folder {asked!r}; as the id of a dataset:\n  {error}"
            ) from error
        if recipe.evaluation.test is not None and "test" not in TaskContext(data, seed=0).splits:
            change("evaluation.test=null", "the data have no test split; results are those on the evaluation set")
            recipe, _ = load_recipe(name, scale=scale, overrides=[*overrides, *changes])
        count = len(prepare_task(recipe, seed=recipe.seeds[0], base=base).train)
    parts = recipe.training.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
    fitting = count // parts * parts
    if recipe.training.batch_size > count and fitting:
        change(f"training.batch_size={fitting}", f"there are only {count} training samples")
    return changes


def choose_workers(asked: str, recipe: Recipe, *, cpu: bool) -> int:
    """Runs at once: as many as there are cores, if each keeps to one thread and there is no GPU to share."""
    number = read_jobs(asked)
    if number is not None:
        return number
    if "WORLD_SIZE" in os.environ or (torch.cuda.is_available() and not cpu) or recipe.training.threads != 1:
        return 1
    return num_cores()


# While they run


def run_jobs(jobs: Sequence[Job], num_workers: int, *, quiet: bool, ray: RaySettings | None = None) -> Outcome:
    """`run_comparison`, shown as it goes."""
    return watch(
        len(jobs),
        lambda observer: run_comparison(jobs, num_workers=num_workers, observer=observer, ray=ray),
        quiet=quiet,
    )


def watch(num_jobs: int, run: Callable[[JobObserver], Outcome], *, quiet: bool) -> Outcome:
    """Run something that reports on its jobs, and show how they go."""
    progress = RunsProgress(num_jobs, quiet=quiet or not is_first_process())
    with progress.shown():
        return run(progress.observe)


class RunsProgress:
    """What runs report: bars with loss, metric, throughput and time left on a terminal, one line per run elsewhere."""

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
        texts = TextColumn("{task.description}"), TextColumn("{task.fields[numbers]}")
        columns = texts[0], BarColumn(bar_width=24), MofNCompleteColumn(), texts[1], TimeElapsedColumn(), TimeLeft()
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
            self._tell(f"{escape(job.title)}: [yellow]{STARTING_AGAIN}[/], {escape(event['problem'])}")
        elif kind == "waiting":
            if state["phase"] not in (WAITING, STARTING_AGAIN):
                self._tell(f"{escape(job.title)}: {WAITING}")
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
        if self.bars is not None:
            numbers = f"[cyan]{state['phase']}" if state["phase"] else _numbers(state)
            if key not in self._tasks:
                self._tasks[key] = self.bars.add_task(escape(job.title), total=None, numbers=numbers)
            self.bars.update(
                self._tasks[key], total=state.get("total"), completed=state.get("step", 0), numbers=numbers
            )

    def _tell(self, line: str) -> None:
        if not self.quiet:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _end(self, name: str, key: str, record: dict[str, Any] | None, problem: str) -> None:
        self._done += 1
        if self.bars is not None:
            if key in self._tasks:
                self.bars.remove_task(self._tasks.pop(key))
            assert self._whole is not None
            self.bars.update(self._whole, completed=self._done)
        place = f"{escape(f'[{self._done}/{self.num_jobs}]')} {escape(name)}"
        if record is not None:
            self._tell(f"{place}: {_describe_end(record)}")
        elif self.num_jobs > 1:  # the failure of a single run ends the command
            self._tell(f"{place}: [red]failed[/]: {escape(problem.splitlines()[0])}")


def _describe_end(record: dict[str, Any]) -> str:
    colour = {"finished": "green", "interrupted": "yellow"}.get(record["status"], "red")
    text = f"[{colour}]{record['status']}[/]"
    if record["final"] is not None:
        text += f", {_metric(record['final'])}"
    if test := record.get("test"):
        text += f", test {_metric(test)} ({test['weights']} weights, step {test['step']})"
    text += f", {sum(record['seconds'].values()):.1f} s"
    return text + (f" ({escape(record['reason'])})" if record["reason"] else "")


def _numbers(state: dict[str, Any]) -> str:
    parts = [] if state["loss"] is None else [f"loss {state['loss']:.3f}"]
    parts += [state["metric"]] if state["metric"] else []
    steps, seconds = state.get("step", 0) - state.get("first", 0), time.perf_counter() - state["since"]
    parts += [f"{steps * state['batch'] / seconds:,.0f} samples/s"] if steps > 0 else []
    return "  ".join(parts)


def _metric(row: dict[str, Any]) -> str:
    """The score of an evaluation, in words."""
    if "accuracy" in row:
        return f"accuracy {100 * row['accuracy']:.1f} %"
    names = [name for name in row if name not in ("step", "epoch", "loss", "train_loss", "seconds", "weights")]
    return f"{names[0]} {row[names[0]]:.4g}" if names else f"loss {row['loss']:.4g}"


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """End the group of processes afterwards, if there is one."""

    def in_a_group() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    try:
        yield
        if in_a_group():
            torch.distributed.barrier()  # nobody leaves while another process still waits for an answer
    finally:
        if in_a_group():
            torch.distributed.destroy_process_group()
            # Models may still hold the group. One of gloo's threads that lets go of its last tensor while the
            # interpreter ends would abort the process, after all work is done: give them the moment that takes.
            time.sleep(0.2)


# When they have ended


def exit_code(outcome: Outcome) -> int:
    """130 if the user stopped it, which the first process alone says; 1 if a run failed, else 0."""
    return 130 if outcome.interrupted and is_first_process() else int(bool(outcome.failures))


def tell_end(outcome: Outcome, num_jobs: int, out: Console | None = None) -> int:
    """Say what failed and what is left; returns the exit code."""
    if is_first_process():
        out = out or make_console()
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        if outcome.interrupted:
            left = num_jobs - sum(record["status"] in ("finished", "diverged") for record in outcome.records)
            out.print(f"[yellow]stopped[/] with {left} of {num_jobs} runs to go; the same command resumes from here")
    return exit_code(outcome)


def print_json(outcome: Outcome, more: Mapping[str, Any] | None = None) -> int:
    """Print what became of every run, and `more`; returns the exit code."""
    if is_first_process():
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [{name: record[name] for name in shown if name in record} for record in outcome.records]
        rows += [
            {"method": job.method.label, "seed": job.seed, "status": "failed", "reason": problem}
            for job, problem in outcome.failures
        ]
        print(to_json({"runs": rows, "interrupted": outcome.interrupted, **(more or {})}, indent=1))
    return exit_code(outcome)


@contextlib.contextmanager
def removing_untrained(folder: Path) -> Iterator[None]:
    """Where an error ends the block, remove the runs and folders made in it in which nothing was trained."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    former = set(folder.rglob("lock"))
    lists = {path: path.read_text("utf-8") if path.exists() else None for path in (folder / name for name in LISTS)}
    try:
        yield
    except WellcondError:
        if is_first_process():
            new = [lock.parent for lock in folder.rglob("lock") if lock not in former]
            kept = [run for run in new if not _remove_untrained(run, folder)]
            for path, text in lists.items() if not kept else ():
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomically(path, text)
            _remove_empty(missing)
        raise


def _remove_untrained(run: Path, folder: Path) -> bool:
    """Remove a run without logs and checkpoints that no process holds, and the folders around it that it empties."""
    with contextlib.suppress(FolderInUse), RunFolder(run).opened():
        if all(path.name in ("lock", "run.json") or not path.stat().st_size for path in run.rglob("*")):
            shutil.rmtree(run)
    if run.exists():
        return False
    _remove_empty([place for place in run.parents if place != folder and place.is_relative_to(folder)])
    return True


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()

"""Runs of the commands that train: their data, how they are watched, what is told at their end; and comparisons."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from wellcond.cli.app import OptionError, is_rank_zero
from wellcond.cli.console import make_console
from wellcond.cli.report import print_report
from wellcond.errors import WellcondError
from wellcond.files import to_json
from wellcond.lab import tune
from wellcond.lab.cluster import RaySettings
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.load_runs import load_comparisons
from wellcond.lab.report.records import RunRecordError
from wellcond.lab.report.statistics import compare_paired, describe_power
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.train.compare import Outcome, plan_comparison, run_comparison, write_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.prepare import load_cached_data, prepare_task
from wellcond.lab.train.run import Job, num_cores
from wellcond.lab.train.run_folder import FolderInUse, RunFolder
from wellcond.run_records import COMPLETE

UNTRAINED = ("lock", "run.json", "comparison.json", "tuning.json")
"""Files of runs in which nothing was trained."""


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
        data = load_cached_data(recipe.data.model_dump_json(), base)
        if recipe.evaluation.test is not None and "test" not in TaskContext(data, seed=0).splits:
            change("evaluation.test=null", "the data have no test split; results are those on the evaluation set")
            recipe, _ = load_recipe(name, scale=scale, overrides=[*overrides, *changes])
        count = len(prepare_task(recipe, seed=recipe.seeds[0], base=base).train)
    parts = recipe.training.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
    fitting = count // parts * parts
    if recipe.training.batch_size > count and fitting:
        change(f"training.batch_size={fitting}", f"there are only {count} training samples")
    return changes


def choose_workers(asked: int | None, job: Job) -> int:
    """Runs at once: as many as there are cores, if each keeps to one thread and there is no GPU to share."""
    if asked is not None:
        return asked
    on_gpu = torch.cuda.is_available() and not job.cpu
    return 1 if "WORLD_SIZE" in os.environ or on_gpu or job.recipe.training.threads != 1 else num_cores()


def run_jobs(jobs: Sequence[Job], asked: int | None, *, quiet: bool, ray: RaySettings | None = None) -> Outcome:
    """Run jobs, `asked` at once, and show how they go: bars on a terminal, one line per run elsewhere.

    Both are on standard error, so that standard output stays for results.
    """
    console = Console(stderr=True, quiet=quiet or not is_rank_zero())
    tell = functools.partial(console.print, highlight=False, soft_wrap=True)
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[said]}")
    columns = texts[0], BarColumn(bar_width=24), MofNCompleteColumn(), texts[1], TimeElapsedColumn(), TimeLeft()
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
                tell(f"{place}: {_describe_end(event['record'])}")
            elif len(jobs) > 1:  # the failure of a single run ends the command
                tell(f"{place}: [red]failed[/]: {escape(event['problem'].splitlines()[0])}")
            return
        if kind == "lost":
            tell(f"{title}: [yellow]starting again[/], {escape(event['problem'])}")
        if key not in tasks:
            tasks[key] = bars.add_task(title, total=None, said="")
        loss = event.get("loss")
        said = escape(event.get("phase", "")) if loss is None else f"loss {loss:.3f}"
        said = _metric(event["row"]) if kind == "evaluation" else said
        bars.update(tasks[key], total=event.get("num_steps"), completed=event.get("step"), said=said)

    workers = len(jobs) if ray is not None and asked is None else choose_workers(asked, jobs[0])
    with bars if console.is_terminal else contextlib.nullcontext():
        return run_comparison(jobs, num_workers=workers, observer=observe, ray=ray)


def _describe_end(record: dict[str, Any]) -> str:
    colour = {"finished": "green", "interrupted": "yellow"}.get(record["status"], "red")
    text = f"[{colour}]{record['status']}[/]"
    if record["final"] is not None:
        text += f", {_metric(record['final'])}"
    if test := record.get("test"):
        text += f", test {_metric(test)} ({test['weights']} weights, step {test['step']})"
    text += f", {sum(record['seconds'].values()):.1f} s"
    return text + (f" ({escape(record['reason'])})" if record["reason"] else "")


def _metric(row: dict[str, Any]) -> str:
    if "accuracy" in row:
        return f"accuracy {100 * row['accuracy']:.1f} %"
    names = [name for name in row if name not in ("step", "epoch", "loss", "train_loss", "seconds", "weights")]
    return f"{names[0]} {row[names[0]]:.4g}" if names else f"loss {row['loss']:.4g}"


def exit_code(outcome: Outcome) -> int:
    """130 if the user stopped it, which the first process alone says; 1 if a run failed, else 0."""
    return 130 if outcome.interrupted and is_rank_zero() else int(bool(outcome.failures))


def tell_end(outcome: Outcome, num_jobs: int, *, as_json: bool = False, **more: Any) -> int:
    """Say what failed and what is left, or print every run, and `more`, as JSON; returns the exit code."""
    out = make_console()
    if as_json and is_rank_zero():
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [{name: record[name] for name in shown if name in record} for record in outcome.records]
        rows += [
            {"method": job.method.label, "seed": job.seed, "status": "failed", "reason": problem}
            for job, problem in outcome.failures
        ]
        print(to_json({"runs": rows, "interrupted": outcome.interrupted, **more}, indent=1))
    elif is_rank_zero():
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        if outcome.interrupted:
            left = num_jobs - sum(record["status"] in COMPLETE for record in outcome.records)
            out.print(f"[yellow]stopped[/] with {left} of {num_jobs} runs to go; the same command resumes from here")
    return exit_code(outcome)


@contextlib.contextmanager
def training_in(folder: Path) -> Iterator[None]:
    """Around runs: a group of processes ends together; an error before anything was trained leaves no new folder."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]

    def in_a_group() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    try:
        yield
        if in_a_group():
            torch.distributed.barrier()  # nobody leaves while another process still waits for an answer
    except WellcondError:
        if missing and is_rank_zero():
            with contextlib.suppress(FolderInUse, OSError), contextlib.ExitStack() as locks:
                files = [path for path in missing[-1].rglob("*") if path.is_file()]
                for lock in [path for path in files if path.name == "lock"]:
                    locks.enter_context(RunFolder(lock.parent).opened())
                if all(path.name in UNTRAINED or not path.stat().st_size for path in files):
                    shutil.rmtree(missing[-1])
        raise
    finally:
        if in_a_group():
            torch.distributed.destroy_process_group()
            # Models may still hold the group. One of gloo's threads that lets go of its last tensor while the
            # interpreter ends would abort the process, after all work is done: give them the moment that takes.
            time.sleep(0.2)


@dataclass
class Comparison:
    """Methods and seeds under one recipe, where they are run, and what is printed."""

    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    seeds: tuple[int, ...]
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    """Of every run."""
    at_once: int | None = None
    ray: RaySettings | None = None
    as_json: bool = False
    silent: bool = False
    """Whether nothing is printed for people while it runs."""
    report: bool = True
    num_jobs: int = field(default=0, init=False)
    """Of the last call of `run`."""

    def __post_init__(self) -> None:
        self.silent |= not is_rank_zero()

    def plan(self, methods: Sequence[MethodSettings]) -> list[Job]:
        """Every run; raises RecipeError."""
        return plan_comparison(self.recipe, methods, self.seeds, self.folder, **self.options)

    def describe(self) -> None:
        """Write comparison.json; raises RunError if the folder holds another comparison."""
        if is_rank_zero():
            write_comparison(self.folder, self.recipe, self.methods, self.seeds)

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        for line in lines if not self.silent else ():
            make_console().print(line, markup=False, highlight=False, soft_wrap=True)

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Run jobs here or on Ray."""
        self.num_jobs = len(jobs)
        return run_jobs(jobs, self.at_once, quiet=self.silent, ray=self.ray)

    def compare(self) -> int:
        """Every run and the report; returns the exit code."""
        planned = self.plan(self.methods)
        with training_in(self.folder):
            self.describe()
            if not self.silent:
                told = f"{self.recipe.title or self.recipe.name} ({self.recipe.scale}): {len(self.methods)} methods x "
                told += f"{len(self.seeds)} seeds; runs with the same seed share data order and all other weights"
                self.say(f"{told}. Folder: {self.folder}", *foresee_power(self.folder, len(self.seeds)))
            outcome = self.run(planned)
        return self._end(outcome)

    def tune_and_compare(self, grid: Mapping[str, tuple[float, ...]], seeds: tuple[int, ...], growth: int) -> int:
        """Search with tuning seeds, then compare methods at their best values on fresh ones; returns the exit code.

        Raises: RecipeError, OptionError or RunError for what cannot be searched, before anything runs.
        """
        recipe = self.recipe
        self.methods = tuple(recipe.at_tuned(method, but=grid) for method in self.methods)
        self.plan(self.methods)
        if shared := sorted(set(seeds) & set(self.seeds)):
            raise OptionError(
                f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; "
                "methods would be tested on the seeds that chose their values"
            )
        plan = tune.Plan(recipe, grid, seeds, self.seeds, growth, self.folder, self.options)
        plan.check(self.methods)

        def run(jobs: list[Job], stage: str) -> Outcome:
            self.say(f"{stage}: {len(jobs)} runs")
            return self.run(jobs)

        with training_in(self.folder):
            self.describe()
            self.say(
                f"{recipe.title or recipe.name} ({recipe.scale}), {len(self.methods)} methods, in {self.folder}",
                f"search on seeds {', '.join(map(str, seeds))}, then test on {len(self.seeds)} fresh seeds",
                *([f"scored on {tune.SEEN}"] if recipe.evaluation.test is None else []),
            )
            searches, outcome = tune.search(plan, self.methods, run)
            self.report &= outcome is None
            if outcome is None:
                for found in searches:
                    best = tune.show_values(found.best.values) or "nothing to tune"
                    self.say(f"{found.method.label}: {best}{', still at the edge' if found.edges() else ''}")
                self.say(*_power_after(searches, recipe.baseline, len(self.seeds)))
                outcome = run(self.plan([found.tuned() for found in searches]), "test")
        return self._end(outcome, tuning=tune.read_tuning(self.folder))

    def _end(self, outcome: Outcome, **more: Any) -> int:
        """Say what became of the runs; build and print the report, if it is wanted; returns the exit code."""
        code = tell_end(outcome, self.num_jobs, as_json=self.as_json, **more)
        if self.report and is_rank_zero() and any(record["final"] for record in outcome.records):
            print_report(self.folder, quiet=self.silent)
        return code


def foresee_power(folder: Path, seeds: int) -> list[str]:
    """Which difference as many seeds can show, as far as earlier runs in a folder tell; nothing otherwise."""
    try:
        found = [analyse(comparison) for comparison in load_comparisons(folder)]
    except RunRecordError:  # no runs yet; what is wrong with one is said when it is its turn
        return []
    return [line for a in found for line in describe_power(a.comparison.result, a.differences.values(), seeds)]


def _power_after(searches: Sequence[tune.MethodSearch], baseline: str, num_seeds: int) -> list[str]:
    """Which difference the fresh seeds can show, from the spread of the tuning seeds at the best values."""
    known = {
        found.method.label: {int(seed): score for seed, score in found.best.scores.items() if score == score}
        for found in searches
        if found.tried
    }
    base, metric = known.pop(baseline, {}), next(found.metric for found in searches if found.metric)
    better = metric.higher_is_better
    differences = [compare_paired(name, known[name], baseline, base, higher_is_better=better) for name in known]
    return describe_power(metric, differences, num_seeds)

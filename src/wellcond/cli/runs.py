"""Runs of the commands that train: their data, how they are watched, what is told at their end; and comparisons."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from wellcond.cli.app import is_rank_zero
from wellcond.cli.console import echo_json, make_console
from wellcond.cli.report import print_report
from wellcond.errors import FolderInUse, RunRecordError, WellcondError
from wellcond.files import to_json
from wellcond.lab import tune
from wellcond.lab.cluster import RaySettings
from wellcond.lab.fair import settle_methods
from wellcond.lab.recipe import Recipe
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.statistics import compare_paired, describe_power
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.train.compare import Outcome, run_comparison, write_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.prepare import load_cached_data, prepare_task
from wellcond.lab.train.run import Job, num_cores
from wellcond.lab.train.run_folder import RunFolder


def fit_to_data(recipe: Recipe, base: Path | None, *, quiet: bool) -> Recipe:
    """The recipe for the user's own data: theirs may have no split to test on, or fewer samples than a batch."""
    console = make_console(stderr=True, quiet=quiet)
    tell = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with console.status("reading the data"):
        data = load_cached_data(recipe.data.model_dump_json(), base)
        if recipe.evaluation.test is not None and "test" not in TaskContext(data, seed=0).splits:
            tell("note: evaluation.test=null, since the data have no test split; results are on the evaluation set")
            recipe = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"test": None})})
        count = len(prepare_task(recipe, seed=recipe.seeds[0], base=base).train)
    training, parts = recipe.training, recipe.training.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
    fitting = count // parts * parts
    if training.batch_size > count and fitting:
        tell(f"note: training.batch_size={fitting}, since there are only {count} training samples")
        recipe = recipe.model_copy(update={"training": training.model_copy(update={"batch_size": fitting})})
    return recipe


def choose_workers(asked: int | None, job: Job) -> int:
    """Runs at once: as many as there are cores, if each keeps to one thread and there is no GPU to share."""
    if asked is not None:
        return asked
    on_gpu = torch.cuda.is_available() and not job.cpu
    return 1 if "WORLD_SIZE" in os.environ or on_gpu or job.recipe.training.threads != 1 else num_cores()


def run_jobs(jobs: Sequence[Job], asked: int | None, *, quiet: bool, ray: RaySettings | None = None) -> Outcome:
    """Run jobs, `asked` at once, and show how they go on standard error: bars on a terminal, else a line per run."""
    console = make_console(stderr=True, quiet=quiet or not is_rank_zero())
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
        if kind == "note":
            tell(f"{title}: {escape(event['text'])}")
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
                untrained = ("lock", "run.json", "comparison.json", "tuning.json")
                if all(path.name in untrained or not path.stat().st_size for path in files):
                    shutil.rmtree(missing[-1])
        raise
    finally:
        if in_a_group():
            torch.distributed.destroy_process_group()
            # Models may still hold the group. One of gloo's threads that lets go of its last tensor while the
            # interpreter ends would abort the process, after all work is done: give them the moment that takes.
            time.sleep(0.2)


@dataclass
class Comparison(tune.Plan):
    """A comparison as a command runs it, and what is printed."""

    at_once: int | None = None
    ray: RaySettings | None = None
    as_json: bool = False
    silent: bool = False
    """Whether nothing is printed for people while it runs."""
    report: bool = True
    rates: str = ""
    """Which learning rates the methods have, and where those are from."""

    def __post_init__(self) -> None:
        self.silent |= not is_rank_zero()

    def describe(self) -> None:
        """Write comparison.json; raises RunError if the folder holds another comparison."""
        if is_rank_zero():
            write_comparison(self.folder, self.recipe, self.methods, self.seeds, self.rates)

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        for line in lines if not self.silent else ():
            make_console().print(line, markup=False, highlight=False, soft_wrap=True)

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Run jobs here or on Ray."""
        return run_jobs(jobs, self.at_once, quiet=self.silent, ray=self.ray)

    def compare(self) -> int:
        """The search, if there is one, every run, and the report; returns the exit code."""
        settled, count = settle_methods(self.recipe, self.methods, but=self.grid), len(self.seeds)
        self.methods, self.rates = settled.methods, settled.note
        self.recipe = recipe = self.recipe.model_copy(update={"tuned": None})  # it is settled once, before any search
        self.check()
        with training_in(self.folder):
            self.describe()
            self.say(
                f"{recipe.title or recipe.name} ({recipe.scale}): {len(self.methods)} methods x {count} seeds; runs "
                f"with the same seed share data order and all other weights. Folder: {self.folder}",
                *([self.rates] if self.rates else []),
            )
            if self.grid:
                self.say(f"search on seeds {', '.join(map(str, self.tuning_seeds))}, then test on {count} fresh seeds")
                self.say(*([f"scored on {tune.SEEN}"] if recipe.evaluation.test is None else []))
            searches, outcome = tune.search(self, self.run)
            self.report &= outcome is None
            if outcome is None:
                for found in searches if self.grid else ():
                    best = tune.show_values(found.best.values) or "nothing to tune"
                    self.say(f"{found.method.label}: {best}{', still at the edge' if found.edges() else ''}")
                if not self.silent:
                    self.say(*self.foresee_power(searches))
                outcome = self.run(self.jobs([found.tuned() for found in searches]))
        more: dict[str, Any] = {"rates": self.rates} if self.rates else {}
        more |= {"tuning": tune.read_tuning(self.folder)} if self.grid else {}
        code = tell_end(outcome, as_json=self.as_json, **more)
        if self.report and is_rank_zero() and any(record["final"] for record in outcome.records):
            print_report(self.folder, quiet=self.silent)
        return code

    def foresee_power(self, searches: Sequence[tune.MethodSearch]) -> list[str]:
        """Which difference the seeds can show, by the spread of the tuning seeds, or of earlier runs in the folder."""
        if self.grid:
            metric = next(found.metric for found in searches if found.metric)
            scores = {
                found.method.label: {int(seed): score for seed, score in found.best.scores.items() if score == score}
                for found in searches
                if found.tried
            }
        else:
            try:
                [earlier, *_] = load_comparisons(self.folder)
            except RunRecordError:  # no runs yet; what is wrong with one is said when it is its turn
                return []
            metric, scores = earlier.result, {method: earlier.results(method) for method in earlier.methods}
        baseline, better = self.recipe.baseline, metric.higher_is_better
        base = scores.pop(baseline, {})
        paired = [compare_paired(name, scores[name], baseline, base, higher_is_better=better) for name in scores]
        return describe_power(metric, paired, len(self.seeds))

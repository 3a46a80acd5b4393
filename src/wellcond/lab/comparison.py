"""`compare`: every method with every seed under one recipe. The command line calls it and shows what it returns."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from wellcond.errors import FolderInUse, OptionError, RunRecordError, WellcondError, needs_extra
from wellcond.files import write_atomically
from wellcond.lab import tune as tuning
from wellcond.lab.methods import MethodSettings, check_distinct, parse_methods
from wellcond.lab.plan import OwnParts, choose_folder, join_parts, plan_comparison, settle_methods, write_comparison
from wellcond.lab.pool import JobObserver, Outcome, Pool, run_jobs
from wellcond.lab.recipe import Recipe
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import Analysis, analyse
from wellcond.lab.report.page import build_report
from wellcond.lab.report.statistics import compare_paired, describe_power
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunFolder
from wellcond.lab.user_code import name_of

if TYPE_CHECKING:
    import pandas

    from wellcond.lab.cluster import RaySettings

FIRST_TUNING_SEED = 1000


class Watch(Protocol):
    """What is shown while a comparison runs."""

    def say(self, *lines: str) -> None:
        """Show lines for people."""

    def observing(self, jobs: Sequence[Job]) -> contextlib.AbstractContextManager[JobObserver]:
        """Show how jobs go on, by the observer that this gives."""


class LineWatch:
    """Lines on standard error, one at the end of each run."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet or os.environ.get("RANK", "0") != "0"

    def say(self, *lines: str) -> None:
        """Show lines for people."""
        for line in lines if not self.quiet else ():
            print(line, file=sys.stderr)

    @contextlib.contextmanager
    def observing(self, jobs: Sequence[Job]) -> Iterator[JobObserver]:
        """Lines for what ends."""
        ended = 0

        def observe(job: Job, event: dict[str, Any]) -> None:
            nonlocal ended
            if event["event"] == "note":
                self.say(f"{job.title}: {event['text']}")
            elif event["event"] in ("end", "failed"):
                ended += 1
                text = describe_end(event["record"]) if "record" in event else f"failed: {event['problem']}"
                self.say(f"[{ended}/{len(jobs)}] {job.title}: {text}")

        yield observe


def describe_end(record: Mapping[str, Any]) -> str:
    """How a run ended: its status, scores and time."""
    text = str(record["status"])
    if record["final"] is not None:
        text += f", {describe_score(record['final'])}"
    if test := record.get("test"):
        text += f", test {describe_score(test)} ({test['weights']} weights, step {test['step']})"
    text += f", {sum(record['seconds'].values()):.1f} s"
    return text + (f" ({record['reason']})" if record["reason"] else "")


def describe_score(row: Mapping[str, Any]) -> str:
    """The number of an evaluation that matters, with its name."""
    if "accuracy" in row:
        return f"accuracy {100 * row['accuracy']:.1f} %"
    names = [name for name in row if name not in ("step", "epoch", "loss", "train_loss", "seconds", "weights")]
    return f"{names[0]} {row[names[0]]:.4g}" if names else f"loss {row['loss']:.4g}"


@dataclass(frozen=True)
class Result:
    """What a comparison found; everything is read from the records in its folder."""

    folder: Path
    outcome: Outcome
    """Records of all runs, and failures."""
    tested: bool = True
    """Whether the search, if there is one, was done; `outcome` is that of the search otherwise."""
    rates: str = ""
    """Which learning rates the methods have, and where those are from."""
    tuning: dict[str, Any] | None = None
    """The record of the search."""

    @property
    def complete(self) -> bool:
        """Whether all runs were done; otherwise the same call goes on."""
        return self.tested and not self.outcome.interrupted and not self.outcome.failures

    @cached_property
    def analysis(self) -> Analysis:
        """The statistics: `summaries` and `differences` by method."""
        [found] = [one for one in load_comparisons(self.folder) if one.folder == self.folder]
        return analyse(found)

    def table(self) -> pandas.DataFrame:
        """One row a method: seeds, mean, standard deviation, and the paired difference to the baseline.

        The difference is positive where the method is better; `low` and `high` are its 95 % interval, `p` is after
        Holm's correction.
        """
        pandas = _import_pandas()
        rows = {}
        for method, summary in self.analysis.summaries.items():
            row: dict[str, Any] = {"seeds": summary.count, "mean": summary.mean, "std": summary.std}
            found = self.analysis.differences.get(method)
            if found is not None and found.count:
                low, high = found.interval or (math.nan, math.nan)
                row |= {"difference": found.mean, "low": low, "high": high, "p": found.p_holm}
                row["verdict"] = self.analysis.judge(found).kind
            rows[method] = row
        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("method")

    def to_frame(self) -> pandas.DataFrame:
        """One row a run: method, seed, status, learning rate, scores and seconds."""
        rows = []
        for run in self.analysis.comparison.runs:
            record = run.record
            part = "test" if self.analysis.comparison.tested else "final"
            scores = {name: value for name, value in (record.get(part) or {}).items() if name != "seconds"}
            rate = record["config"].get("optimizer", {}).get("lr")
            row = {"method": run.method, "seed": run.seed, "status": record["status"], "lr": rate, **scores}
            rows.append(row | {"seconds": sum(record.get("seconds", {}).values())})
        return _import_pandas().DataFrame(rows)

    def best(self) -> str:
        """The method with the best mean. Whether it is better than the others, the table says."""
        sign = 1 if self.analysis.comparison.result.higher_is_better else -1
        known = {method: one.mean for method, one in self.analysis.summaries.items() if one.count}
        if not known:
            raise RunRecordError(self.folder, "holds no finished run", "Run the comparison to its end.")
        return max(known, key=lambda method: sign * known[method])

    def save(self, path: str | Path) -> Path:
        """Write the report with tables and figures as one HTML page, or without figures as markdown (``.md``)."""
        path = Path(path)
        if path.suffix not in (".html", ".md"):
            raise OptionError(f"expected a name that ends in .html or .md, found {path}", found=path)
        [page] = build_report(self.folder, pictures=path.suffix == ".html")
        write_atomically(path, page.with_suffix(path.suffix).read_bytes())
        return path


def _import_pandas() -> Any:
    with needs_extra("pandas", "text"):
        import pandas
    return pandas


def compare(
    recipe: str | Path | Recipe | None = None,
    *,
    model: str | Callable[..., Any] | None = None,
    data: Any = None,
    methods: str | Sequence[str | MethodSettings | Callable[..., Any]] | None = None,
    seeds: int | Sequence[int] | None = None,
    tune: Mapping[str, Sequence[float]] | None = None,
    tuning_seeds: int | Sequence[int] = 2,
    tune_growth: int = 3,
    settings: Sequence[str] = (),
    scale: str | None = None,
    folder: str | Path | None = None,
    files: Sequence[str | Path] = (),
    at_once: int | None = None,
    ranks: int = 1,
    ray: RaySettings | None = None,
    cpu: bool = False,
    local_code: bool = False,
    data_options: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> Result:
    """Train every method with every seed under one recipe; complete runs are not repeated.

    Runs with the same seed share the order of the data and all weights that no method writes, so that methods are
    compared in pairs.

    Args:
        recipe: name of a recipe of wellcond, a YAML file, or a `Recipe`. With `model` or `data` it is by default one
            for small models on images or texts, by what the data are.
        model: ``timm:NAME``, ``hf:NAME`` or a folder of transformers, ``file.py:function``, or a function that returns
            a model; it is called with those of the arguments in docs/extend/own-comparison.md that it names.
        data: a folder, a file, an id of the Hugging Face hub, or a dataset of torch or of `datasets`.
        methods: such as ``"default,gaussian,conditioned"``, or a list of these and of functions that change a model in
            place; the recipe's by default. The first is the baseline if the recipe's baseline is not among them.
        seeds: how many, or which.
        tune: values of fields, such as ``{"optimizer.lr": [1e-3, 3e-3]}``: every method is tuned by itself on
            `tuning_seeds`, then tested on `seeds`.
        tuning_seeds: how many, from 1000 on, or which.
        tune_growth: how often a grid may grow beyond an edge at which its best value lies.
        settings: changes of the recipe, as ``"training.batch_size=32"``.
        scale: of the recipe: tiny, small or paper.
        folder: where runs are kept; by default one below ``runs/`` that is named after recipe, model and data.
        files: Python files that register methods or define functions that are methods.
        at_once: runs at once; by default as many as there are GPUs, or cores.
        ranks: processes of one run, each on a GPU of its own (DistributedDataParallel), started here.
        ray: runs on a Ray cluster.
        cpu: whether to leave GPUs alone.
        local_code: whether a model of the recipe that is ``file.py:function`` may be run. One given here always is.
        data_options: of the source of `data`, such as its columns `input` and `label`.
        watch: what is shown meanwhile.

    Returns: the result, even if runs failed or were stopped; see `Result.complete` and `Result.outcome`.

    Raises:
        WellcondError: for what is wrong before anything runs, and what every run would fail with.

    Example:
        >>> result = compare("digits", methods="default,gaussian", seeds=5)  # doctest: +SKIP
        >>> result.table()  # doctest: +SKIP
    """
    _refuse_reimport()
    watch = watch or LineWatch()
    parts = join_parts(recipe, scale, settings, model, data, dict(data_options or {}), files, watch.say)
    chosen = parts.recipe
    asked, parts = read_methods(chosen if methods is None else methods, parts)
    if parts.from_parts and asked and chosen.baseline not in [method.label for method in asked]:
        chosen = chosen.model_copy(update={"baseline": asked[0].label})
    grid = {name: tuple(sorted(values)) for name, values in (tune or {}).items()}
    ending = "-tuned" if grid else "-untuned" if settle_methods(chosen, asked).lacking else ""
    place = Path(folder) if folder is not None else choose_folder(parts, ending)
    numbers = _read_seeds(seeds, 0) if seeds is not None else chosen.seeds
    search_seeds = _read_seeds(tuning_seeds, FIRST_TUNING_SEED)
    options = parts.job_options(cpu=cpu, local_code=local_code)
    if (at_once != 1 or ranks > 1) and ray is None and (obstacle := parts.code.find_obstacle()):
        if ranks > 1:
            raise OptionError(f"{ranks} processes a run: {obstacle}; define it in a file")
        if at_once is not None:
            raise OptionError(f"{at_once} runs at once are in processes of their own: {obstacle}; define it in a file")
        watch.say(f"note: one run after the other, since {obstacle}; define it in a file to run several at once")
        at_once = 1
    todo = Todo(chosen, asked, numbers, place, options, grid, search_seeds, tune_growth, at_once, ranks, ray)
    return todo.run(watch)


@dataclass(frozen=True)
class Todo:
    """A comparison with everything decided."""

    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    seeds: tuple[int, ...]
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every job."""
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tuning_seeds: tuple[int, ...] = ()
    growth: int = 0
    at_once: int | None = None
    ranks: int = 1
    ray: RaySettings | None = None

    def run(self, watch: Watch) -> Result:
        """Search if there is something to search, then run what is missing."""
        settled = settle_methods(self.recipe, self.methods, but=self.grid)
        methods, rates = settled.methods, settled.note
        recipe = self.recipe.model_copy(update={"tuned": None})  # it is settled once, before any search
        plan_comparison(recipe, methods, self.seeds, self.folder, **self.options)
        search = None
        if self.grid:
            search = tuning.SearchPlan(
                recipe,
                methods,
                self.seeds,
                self.folder,
                self.grid,
                self.tuning_seeds,
                self.growth,
                dict(self.options),
            )
            search.check()
        with training_in(self.folder):
            if is_rank_zero():
                write_comparison(self.folder, recipe, methods, self.seeds, rates)
            watch.say(
                f"{recipe.title or recipe.name} ({recipe.scale}): {len(methods)} methods x {len(self.seeds)} seeds; "
                f"runs with the same seed share data order and all other weights. Folder: {self.folder}"
            )
            watch.say(*filter(None, [rates]))
            if search is None:
                watch.say(*self.foresee_power())
            else:
                found = self._search(search, watch)
                if isinstance(found, Outcome):
                    return Result(self.folder, found, tested=False, rates=rates)
                methods = found
            jobs = plan_comparison(recipe, methods, self.seeds, self.folder, **self.options)
            outcome = self._run_jobs(jobs, watch)
        record = None if search is None else tuning.read_tuning(self.folder)
        return Result(self.folder, outcome, rates=rates, tuning=record)

    def _search(self, plan: tuning.SearchPlan, watch: Watch) -> tuple[MethodSettings, ...] | Outcome:
        """Methods at their best values; the outcome of the search if it did not end."""
        seeds = ", ".join(map(str, plan.seeds))
        watch.say(f"search on seeds {seeds}, then test on {len(self.seeds)} fresh seeds")
        if plan.recipe.evaluation.test is None:
            watch.say(f"scored on {tuning.SEEN}")
        searches, unfinished = tuning.search(plan, lambda jobs: self._run_jobs(jobs, watch))
        if unfinished is not None:
            return unfinished
        for found in searches:
            best = tuning.show_values(found.best.values) or "nothing to tune"
            watch.say(f"{found.method.label}: {best}{', still at the edge' if found.edges() else ''}")
        scores = {
            found.method.label: {int(seed): score for seed, score in found.best.scores.items() if score == score}
            for found in searches
            if found.tried
        }
        watch.say(*foresee_power(plan.recipe, next(f.metric for f in searches if f.metric), scores, len(self.seeds)))
        return tuple(found.tuned() for found in searches)

    def foresee_power(self) -> list[str]:
        """Which difference the seeds can show, by the spread of earlier runs in the folder; empty without any."""
        try:
            [earlier, *_] = load_comparisons(self.folder)
        except RunRecordError:  # no runs yet; what is wrong with one is said when it is its turn
            return []
        scores = {method: earlier.results(method) for method in earlier.methods}
        return foresee_power(self.recipe, earlier.result, scores, len(self.seeds))

    def _run_jobs(self, jobs: Sequence[Job], watch: Watch) -> Outcome:
        pool: Pool | None = None
        if self.ray is not None:
            from wellcond.lab.cluster import RayPool

            pool = RayPool(self.ray, jobs, self.at_once)
        with watch.observing(jobs) as observer:
            return run_jobs(jobs, observer=observer, num_workers=self.at_once, ranks=self.ranks, pool=pool)


def foresee_power(recipe: Recipe, metric: Any, scores: Mapping[str, Mapping[int, float]], num_seeds: int) -> list[str]:
    """Which difference so many seeds can show, by the spread of scores of some methods by seed; empty if unknown."""
    base, better = dict(scores.get(recipe.baseline, {})), metric.higher_is_better
    paired = [
        compare_paired(name, dict(found), recipe.baseline, base, higher_is_better=better)
        for name, found in scores.items()
        if name != recipe.baseline
    ]
    return describe_power(metric, paired, num_seeds)


def read_methods(given: Any, parts: OwnParts) -> tuple[tuple[MethodSettings, ...], OwnParts]:
    """Methods as text, settings or functions; and the parts with the functions among the user's code."""
    if isinstance(given, Recipe):
        return given.methods, parts
    if isinstance(given, str):
        return parse_methods(given), parts
    functions: dict[str, Callable[..., Any]] = {}
    for one in given:
        if callable(one) and not isinstance(one, (str, MethodSettings)):
            functions[name_of(one, functions)] = one
    parts = replace(parts, code=replace(parts.code, methods=functions))
    parts.code.install()
    methods: list[MethodSettings] = []
    for one in given:
        if isinstance(one, str):
            methods.extend(parse_methods(one))
        else:
            methods.append(one if isinstance(one, MethodSettings) else MethodSettings.model_validate(name_of(one)))
    check_distinct(methods)
    return tuple(methods), parts


def _read_seeds(given: int | Sequence[int], first: int) -> tuple[int, ...]:
    seeds = tuple(range(first, first + given)) if isinstance(given, int) else tuple(given)
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise OptionError(f"seeds: expected a number, or different numbers from 0, found {given!r}", found=given)
    return seeds


def _refuse_reimport() -> None:
    """Raise OptionError in a process that imports the user's script again, instead of comparing again without end."""
    import multiprocessing

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise OptionError(
            "call compare below `if __name__ == '__main__':`, since processes that train import the script"
        )


def is_rank_zero() -> bool:
    """Whether this process writes and prints; `torchrun` and `accelerate launch` start several."""
    return os.environ.get("RANK", "0") == "0"


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

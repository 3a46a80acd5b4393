"""`try_`: does an initialisation help the user's own model on the user's own data? A plain answer within minutes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellcond.errors import OptionError
from wellcond.files import to_json, write_atomically
from wellcond.lab.comparison import LineWatch, Result, Todo, Watch, is_rank_zero, read_methods
from wellcond.lab.methods import MethodSettings
from wellcond.lab.plan import RATE, OwnParts, choose_folder, join_parts
from wellcond.lab.pool import choose_workers
from wellcond.lab.records import read_record, seal
from wellcond.lab.report.statistics import FEWEST_SEEDS, smallest_detectable
from wellcond.lab.settings import Interval
from wellcond.lab.tasks.base import EVALUATION, AbstractTask, evaluating
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import Job

METHODS = "default,calibrated"
RATES = (3e-4, 1e-3, 3e-3)
TUNING_SEEDS = (1000,)
SEEDS = 5
FEWEST, MOST = 150, 1000
"""Updates of a run: fewer seldom leave chance; more are another experiment."""
EVALUATIONS = 5
"""Of a run: before it, and after each quarter."""
SET_UP = 15.0
"""Seconds that a process takes before it trains."""
KIND, NAME = "wellcond-try", "try.json"
MARGIN = 0.01
"""A difference of accuracies that is not worth more seeds."""
MOST_SEEDS = 200


@dataclass(frozen=True)
class Budget:
    """How many updates a run has; it is decided once for a folder, so that the same command resumes."""

    updates: int
    seeds: int
    minutes: float
    """Expected, of all runs together."""
    seconds_per_update: float


@dataclass(frozen=True)
class Answer:
    """What trying methods on a model found."""

    result: Result
    lines: tuple[str, ...]
    """In words, the answer for each method."""
    verdicts: Mapping[str, str]
    """By method: helps, hurts, no help, undecided, or no result; not learned for all of them."""
    seeds_needed: Mapping[str, int]
    """By method that is undecided: about how many seeds would decide."""


def try_(
    model: str | Callable[..., Any] | None,
    data: Any,
    *,
    methods: str | Sequence[str | MethodSettings | Callable[..., Any]] = METHODS,
    seeds: int | None = None,
    minutes: float = 5.0,
    settings: Sequence[str] = (),
    folder: str | Path | None = None,
    files: Sequence[str | Path] = (),
    at_once: int | None = None,
    cpu: bool = False,
    data_options: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> Answer:
    """Compare methods on a model and data of your own, each at the best of the same learning rates.

    A few updates are timed first, and the runs are made as long as the minutes allow, but not shorter than what a model
    needs to leave chance: what is expected is said before anything is trained. The same call resumes.

    Args:
        model: as for `compare`.
        data: as for `compare`.
        methods: the first is the baseline.
        seeds: of the test, five by default, or three where minutes are few.
        minutes: that all runs may take on this machine, about.
        settings: changes of the recipe, such as ``task.image_size=64``.
        folder: where runs are kept.
        files: Python files with methods.
        at_once: runs at once.
        cpu: whether to leave GPUs alone.
        data_options: columns of the data.
        watch: what is shown meanwhile.

    Returns: the answer, with the comparison in `Answer.result`.

    Raises:
        OptionError, RecipeError, DataError: the model or the data cannot be used.
    """
    if not 0 < minutes <= 100_000:
        raise OptionError(f"minutes: expected a positive number, found {minutes}", found=minutes)
    watch = watch or LineWatch()
    parts = join_parts(None, None, settings, model, data, dict(data_options or {}), files, watch.say)
    chosen, parts = read_methods(methods, parts)
    if len(chosen) < 2:
        raise OptionError("methods: expected a baseline and at least one other method", found=methods)
    options = parts.job_options(cpu=cpu)
    place = Path(folder) if folder is not None else choose_folder(parts, "-try")
    job = Job(parts.recipe, chosen[0], 0, place, **options)
    workers = choose_workers(at_once, job)
    if parts.code.find_obstacle():
        workers = at_once = 1
    budget = find_budget(place, job, len(chosen), workers, minutes, seeds)
    watch.say(
        f"{budget.updates} updates a run ({budget.seconds_per_update:.2g} s each): {len(chosen)} methods x "
        f"({len(RATES)} learning rates + {budget.seeds} seeds), {workers} at once, about {budget.minutes:.0f} minutes"
    )
    if budget.minutes > 1.5 * minutes:
        size = "image_size" if hasattr(parts.recipe.task, "image_size") else "context"
        shorter = f" or --set task.{size}=..." if hasattr(parts.recipe.task, size) else ""
        watch.say(
            f"note: that is more than {minutes:g} minutes, since fewer than {FEWEST} updates seldom leave chance; a "
            f"smaller model{shorter} is faster"
        )
    recipe = with_updates(parts, budget.updates).model_copy(update={"baseline": chosen[0].label})
    todo = Todo(
        recipe,
        chosen,
        tuple(range(budget.seeds)),
        place,
        options,
        grid={RATE: RATES},
        tuning_seeds=TUNING_SEEDS,
        growth=1,
        at_once=at_once,
    )
    result = todo.run(watch)
    if not result.tested or result.outcome.interrupted:
        return Answer(result, (), {}, {})
    task = prepare_task(recipe, seed=0, base=parts.base)
    return answer(result, *find_chance(task))


def with_updates(parts: OwnParts, updates: int) -> Any:
    """The recipe with runs of so many updates, evaluated four times."""
    every, recipe = Interval(steps=max(1, updates // 4)), parts.recipe
    return recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update={"length": Interval(steps=updates)}),
            "evaluation": recipe.evaluation.model_copy(update={"every": every}),
            "checkpoint": recipe.checkpoint.model_copy(update={"every": every}),
        }
    )


def find_budget(folder: Path, job: Job, num_methods: int, workers: int, minutes: float, seeds: int | None) -> Budget:
    """The budget that the folder has, with other seeds if they are asked for, or a new one."""
    path = folder / NAME
    each_tries = len(RATES) * len(TUNING_SEEDS)
    if path.is_file():
        stored = read_record(path, KIND)
        updates, each, evaluation = stored["updates"], stored["seconds_per_update"], stored["seconds_per_evaluation"]
        count = seeds or stored["seeds"]
    else:
        each, evaluation = time_updates(job)

        def fitting(count: int) -> int:
            of_run = (60 * minutes - SET_UP) * workers / (num_methods * (each_tries + count))
            return int((of_run - EVALUATIONS * evaluation) / each)

        count = seeds or (SEEDS if fitting(SEEDS) >= FEWEST else FEWEST_SEEDS)
        updates = min(MOST, max(FEWEST, fitting(count) // 10 * 10))
    runs = num_methods * (each_tries + count)
    expected = (runs * (updates * each + EVALUATIONS * evaluation) / workers + SET_UP) / 60
    if not path.is_file() and is_rank_zero():
        folder.mkdir(parents=True, exist_ok=True)
        record = {"schema": 1, "kind": KIND, "updates": updates, "seeds": count, "seconds_per_update": each}
        write_atomically(path, to_json(seal(record | {"seconds_per_evaluation": evaluation}), indent=1) + "\n")
    return Budget(updates, count, expected, each)


def time_updates(job: Job) -> tuple[float, float]:
    """Seconds of an update and of an evaluation, with one thread as runs have it."""
    recipe = job.recipe
    threads = torch.get_num_threads()
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    try:
        job.user_code.install()
        task = prepare_task(recipe, seed=0, base=job.base)
        model = prepare_model(recipe, job.method, task, seed=0, base=job.base, local_code=job.local_code)
        optimizer = recipe.optimizer.build(model)
        size = min(recipe.training.batch_size, len(task.train))
        seconds = []
        model.train()
        for number in range(3):
            began = time.perf_counter()
            batch = task.train.fetch([((number * size + row) % len(task.train), 0) for row in range(size)])
            (task.loss(model, batch) / size).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        began, count = time.perf_counter(), min(recipe.evaluation.batch_size, len(task.evaluation))
        with evaluating(model):
            task.score(model, task.evaluation.fetch([(row, EVALUATION) for row in range(count)]))
        evaluation = (time.perf_counter() - began) * len(task.evaluation) / count
    finally:
        torch.set_num_threads(threads)
    return max(1e-6, min(seconds[1:])), evaluation


def find_chance(task: AbstractTask) -> tuple[float, int]:
    """Share of the most frequent class of the evaluation set, and the size of the set."""
    labels = task.data.evaluation.labels
    if labels is None or labels.is_floating_point():
        return math.nan, len(task.evaluation)
    counts = Counter(labels.tolist())
    return max(counts.values()) / len(labels), len(labels)


def answer(result: Result, chance: float, count: int) -> Answer:
    """The answer of a comparison that has ended, in words.

    Args:
        result: of the comparison.
        chance: score of a model that has learned nothing; NaN if it is unknown.
        count: size of the evaluation set, by which scores at chance scatter.
    """
    analysis = result.analysis
    metric, summaries = analysis.comparison.result, analysis.summaries
    known = {method: one.mean for method, one in summaries.items() if one.count}
    if not known:
        return Answer(result, ("no method has a finished run",), dict.fromkeys(summaries, "no result"), {})
    best = known[result.best()]
    if metric.percent and best <= chance + 2 * math.sqrt(chance * (1 - chance) / count):
        line = f"no method learned: {100 * best:.0f} % at chance {100 * chance:.0f} %"
        advice = "; more updates (--minutes), more data, or other settings (--set) are needed before methods differ"
        return Answer(result, (line + advice,), dict.fromkeys(summaries, "not learned"), {})
    lines, verdicts, needed = [], {}, {}
    baseline = analysis.comparison.baseline
    lines.append(
        f"{baseline}: {metric.show(known.get(baseline, math.nan))}{' %' if metric.percent else ''} {metric.name}"
    )
    margin = MARGIN if metric.percent else 0.01 * abs(known.get(baseline, math.nan))
    for method in summaries:
        if method == baseline:
            continue
        found = analysis.difference(method)
        if found.interval is None:
            verdicts[method] = "no result"
            lines.append(f"{method}: fewer than {FEWEST_SEEDS} seeds finished with both methods")
            continue
        low, high = found.interval
        ends = ", ".join(metric.show(end, sign=True) for end in found.interval)
        by = f"{metric.show(found.mean, sign=True)}{metric.unit} [{ends}]"
        if low > 0:
            verdicts[method], text = "helps", f"helps by {by}"
        elif high < 0:
            verdicts[method], text = "hurts", f"hurts: {by}"
        elif high < margin:
            verdicts[method], text = "no help", f"does not help: {by}"
        else:
            wanted = max(abs(found.mean), margin)
            needed[method] = find_seeds(found.std, wanted, found.count)
            more = f"{'more than' if needed[method] == MOST_SEEDS else 'about'} {needed[method] - found.count}"
            shown = f"{metric.show(wanted)}{metric.unit}"
            verdicts[method] = "undecided"
            text = f"undecided: {by}; needs {more} more seeds (--seeds {needed[method]}) to show {shown}"
        lines.append(f"{method}: {text}, {found.count} seeds")
    return Answer(result, tuple(lines), verdicts, needed)


def find_seeds(std: float, wanted: float, count: int) -> int:
    """Seeds that show a true difference of this size with 80 % power; at least one more than `count`."""
    for seeds in range(count + 1, MOST_SEEDS):
        if smallest_detectable(std, seeds) <= wanted:
            return seeds
    return MOST_SEEDS

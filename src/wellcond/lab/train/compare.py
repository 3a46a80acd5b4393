"""A comparison: every method with every seed under one recipe; complete runs are not repeated."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellcond.errors import (
    AttentionNotFoundError,
    DataError,
    FairnessWarning,
    MissingExtraError,
    ModelSpecError,
    ModelTooLargeError,
    RecipeError,
    RunError,
    WellcondError,
)
from wellcond.lab.fair import settle_methods
from wellcond.lab.methods import MethodSettings, check_distinct
from wellcond.lab.recipe import Recipe, config_hash, override_recipe
from wellcond.lab.records import SCHEMA
from wellcond.lab.train.engine import Event
from wellcond.lab.train.length import StopFlag, leave_to_parent, starting_processes
from wellcond.lab.train.run import Job, complete_record, describe_change, run_job
from wellcond.lab.train.run_folder import RunFolder, read_sealed, write_sealed, writing

if TYPE_CHECKING:
    from wellcond.lab.cluster import RaySettings

# Errors of the recipe or the dataset concern every run: the first one ends the comparison.
FOR_ALL = (RecipeError, DataError, MissingExtraError, AttentionNotFoundError, ModelSpecError, ModelTooLargeError)
JobObserver = Callable[[Job, Event], None]
KIND = "wellcond-comparison"


@dataclass
class Outcome:
    """Result of a comparison."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[Job, str]] = field(default_factory=list)
    interrupted: bool = False


def plan_comparison(
    recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], folder: Path, **options: Any
) -> list[Job]:
    """All runs, seed by seed, so that an interrupted comparison has complete pairs.

    Methods train at the values that the recipe has from a search if it has them for all of them (`settle_methods`);
    FairnessWarning if some of them have such values and are left without.
    """
    check_distinct(methods)
    if not methods:
        raise RecipeError("expected methods to compare, found none; give --methods, or `methods` in the recipe")
    if recipe.baseline not in [method.label for method in methods]:
        raise RecipeError(f"the baseline {recipe.baseline!r} is not among the methods; add it, or set baseline")
    settled = settle_methods(recipe, methods)
    if settled.unsearched:
        warnings.warn(settled.note, FairnessWarning, stacklevel=2)
    return [
        Job(recipe, method, seed, folder / method.slug / f"seed{seed}", **options)
        for seed in seeds
        for method in settled.methods
    ]


def settings_hash(recipe: Recipe) -> str:
    """Hash of the settings that all runs of a comparison share."""
    return config_hash(recipe.config(MethodSettings(init="default"), 0))


def check_settings(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """comparison.json, if any; RunError if it is of another recipe, or under other settings."""
    path = folder / "comparison.json"
    if not path.exists():
        return {"methods": [], "seeds": []}
    former, settings = read_comparison(path), settings_hash(recipe)
    if (former["recipe"], former["scale"]) != (recipe.name, recipe.scale):
        problem = f"a comparison of {former['recipe']} ({former['scale']}), not of {recipe.name} ({recipe.scale})"
    elif former.get("settings_hash", settings) != settings:
        problem = f"a comparison of {recipe.name} under other settings"
        if runs := sorted(folder.glob("*/seed*/run.json")):
            there = (RunFolder(runs[0].parent).read_record() or {})["config"]
            method = recipe.at_tuned(MethodSettings.model_validate(there["method"] | {"set": {}}))
            problem += describe_change(there, override_recipe(recipe, method).config(method, there["seed"]))
    else:
        return former
    raise RunError(f"{folder} holds {problem}. Give another folder with --folder")


def write_comparison(
    folder: Path, recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], rates: str = ""
) -> None:
    """Write comparison.json; methods and seeds of an earlier call stay listed.

    `rates` says which learning rates the methods have and where those are from.
    """
    former, path = check_settings(folder, recipe), folder / "comparison.json"
    listed = [{"label": method.label, "slug": method.slug} for method in methods]
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "name": recipe.name,
        "title": recipe.title,
        "recipe": recipe.name,
        "scale": recipe.scale,
        "settings_hash": settings_hash(recipe),
        "methods": [*former["methods"], *(row for row in listed if row not in former["methods"])],
        "baseline": recipe.baseline,
        "seeds": sorted({*seeds, *former["seeds"]}),
        "notes": recipe.description,
        **({"rates": rates} if rates else {}),
    }
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_sealed(path, content)


def read_comparison(path: Path) -> dict[str, Any]:
    """comparison.json; RunError if it is not one, or was changed."""
    advice = "Delete it, then run the same command: it is written again, and the runs are kept"
    return read_sealed(path, KIND, advice, ("methods", "seeds", "recipe", "scale"))


def run_comparison(
    jobs: Sequence[Job], *, num_workers: int, observer: JobObserver, ray: RaySettings | None = None
) -> Outcome:
    """Run what is incomplete, one run after the other, in several processes, or on a Ray cluster.

    Errors that concern every run (`FOR_ALL`) are raised; other failures are in the outcome.
    """
    at_once = max(1, min(num_workers, len(jobs)))
    dispatch = Dispatch([job if job.at_once == at_once else replace(job, at_once=at_once) for job in jobs], observer)
    if ray is not None:
        from wellcond.lab.cluster import run_on_ray

        dispatch.skip_complete()
        run_on_ray(dispatch, num_workers=num_workers, settings=ray)
    elif at_once > 1:
        dispatch.skip_complete()
        run_in_pool(dispatch, num_workers=at_once)
    else:
        with StopFlag().listening() as stop:
            while dispatch.waiting:
                job = dispatch.waiting.popleft()
                do_job(job, functools.partial(dispatch.handle, job), stop)
                if stop.requested and dispatch.waiting:
                    dispatch.stop()
    return dispatch.outcome


Message = tuple[str, Any]
"""("event", event) during a run; at its end ("record", record), ("error", text) or ("error for all", text)."""


class Dispatch:
    """Queue and outcome of the jobs of a comparison."""

    def __init__(self, jobs: Sequence[Job], observer: JobObserver) -> None:
        self.waiting = deque(jobs)
        self.outcome = Outcome()
        self.stopping = False
        self._observer = observer
        self._lost: set[Path] = set()

    def skip_complete(self) -> None:
        """Take complete runs out of the queue: they need no worker."""
        for job in list(self.waiting):
            try:
                record = complete_record(job)
            except WellcondError as error:
                self.waiting.remove(job)
                self.handle(job, ("error", str(error)))
                continue
            if record is not None and (job.keep_checkpoints or not (job.folder / "checkpoints").exists()):
                self.waiting.remove(job)
                self.handle(job, ("event", {"event": "end", "record": record}))
                self.handle(job, ("record", record))

    def stop(self) -> None:
        """Empty the queue."""
        self.stopping = self.outcome.interrupted = True
        self.waiting.clear()

    def handle(self, job: Job, message: Message) -> bool:
        """Handle what a job sends; True if it is the last message."""
        kind, content = message
        if kind == "event":
            self._observer(job, content)
        elif kind == "record":
            self.outcome.records.append(content)
            self.outcome.interrupted |= content["status"] == "interrupted"
        elif kind == "error":
            self.outcome.failures.append((job, content))
            self._observer(job, {"event": "failed", "problem": content})
        else:
            raise WellcondError(content)
        return kind != "event"

    def lose(self, job: Job, reason: str) -> None:
        """Put the job of a dead worker first in the queue, or fail it the second time."""
        if self.stopping:
            return
        if job.folder in self._lost:
            self.handle(job, ("error", f"{job.title}: {reason}"))
        else:
            self._lost.add(job.folder)
            self._observer(job, {"event": "lost", "problem": reason})
            self.waiting.appendleft(job)


def do_job(job: Job, send: Callable[[Message], Any], stop: StopFlag) -> None:
    """Run one job and send what becomes of it; an error that concerns every run is raised."""
    try:
        send(("record", run_job(job, lambda event: send(("event", event)), stop=stop)))
    except WellcondError as error:
        if isinstance(error, FOR_ALL) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise  # other ranks may not have failed: continuing would mix runs
        send(("error", str(error)))


def run_in_pool(dispatch: Dispatch, *, num_workers: int) -> None:
    """Run jobs in processes; one that dies is replaced and its run resumes; killed twice, the run has failed."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    workers: dict[Connection, Any] = {}
    """Processes, each by the connection to it."""
    running: dict[Connection, Job] = {}

    def start() -> Connection:
        ours, theirs = context.Pipe()
        workers[ours] = process = context.Process(target=_work, args=(theirs,))  # a daemon may not start DataLoaders
        with starting_processes("spawn"):
            process.start()
        theirs.close()
        return ours

    try:
        with StopFlag().listening() as stop:
            while dispatch.waiting or running:
                if stop.requested and not dispatch.stopping:
                    dispatch.stop()
                    for connection in running:
                        os.kill(workers[connection].pid, signal.SIGTERM)
                for _ in range(min(len(dispatch.waiting), num_workers - len(running))):
                    idle = next((connection for connection in workers if connection not in running), None) or start()
                    try:
                        idle.send(dispatch.waiting[0])
                        running[idle] = dispatch.waiting.popleft()
                    except OSError:  # it died while idle
                        workers.pop(idle)
                for connection in set(running).intersection(wait(list(running), timeout=0.2)):
                    try:
                        message = connection.recv()
                    except (EOFError, ConnectionError):
                        process = workers.pop(connection)
                        process.join(10)
                        code = f"{process.exitcode}{'; out of memory?' * (process.exitcode == -signal.SIGKILL)}"
                        dispatch.lose(running.pop(connection), f"its process ended with code {code}")
                    else:
                        if dispatch.handle(running[connection], message):
                            del running[connection]
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()  # idle workers end at once; a run ends after its step
        for process in workers.values():
            process.join(10)


def _work(connection: Connection) -> None:
    """Run jobs until the connection is closed."""

    def send(message: Message) -> None:
        try:
            connection.send(message)
        except OSError:  # the command is gone: the run writes a checkpoint and stops
            stop.requested = True

    # Ctrl-C reaches every process of a terminal; the parent forwards it to its workers as SIGTERM.
    leave_to_parent(signal.SIGINT)
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return
        with StopFlag().listening() as stop:
            try:
                do_job(job, send, stop)
            except WellcondError as error:  # as text: not every exception can be pickled
                send(("error for all", str(error)))

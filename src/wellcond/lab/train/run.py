"""One run: from a recipe, a method and a seed to a folder with a complete record."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellcond.attention.find import find_attention
from wellcond.errors import DEBUG_VARIABLE, WellcondError
from wellcond.lab.data.base import fingerprint
from wellcond.lab.method_overrides import override_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe, config_hash
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.accelerator import make_accelerator
from wellcond.lab.train.clock import RunClock, synchronizer
from wellcond.lab.train.engine import Engine, Event, Interrupted, Observer
from wellcond.lab.train.evaluator import find_test_set
from wellcond.lab.train.interrupts import StopFlag
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.provenance import describe_session, has_free_cores, peak_memory, reset_peak_memory
from wellcond.lab.train.recorded_tokenizer import describe_tokenizer
from wellcond.lab.train.run_folder import FolderInUse, RunError, RunFolder
from wellcond.lab.train.train_state import Diverged
from wellcond.models import TRUST_NEEDED, is_local_code
from wellcond.run_records import COMPLETE, SCHEMA

KEPT = ("metric", "data", "tokenizer", "model", "final", "best", "progress", "samples_per_second", "seconds_per_step",
        "sessions", "logs")  # fmt: skip
SECONDS_BETWEEN_TRIES = 0.5
"""Between attempts to lock a folder that another command holds."""


class UnexpectedRunError(RunError):
    """A run that failed with an unexpected exception."""


@dataclass(frozen=True)
class Job:
    """What to run, and where."""

    recipe: Recipe
    """With the overrides of the method."""
    method: MethodSettings
    seed: int
    folder: Path
    base: Path | None = None
    """Folder that relative paths in the recipe refer to."""
    cpu: bool = False
    local_code: bool = False
    at_once: int = 1
    """Number of concurrent runs of the comparison, including this one."""

    def __post_init__(self) -> None:
        """Apply the overrides of the method.

        Raises: RecipeError.
        """
        object.__setattr__(self, "recipe", override_recipe(self.recipe, self.method))

    @property
    def title(self) -> str:
        """Human-readable name of the run."""
        return f"{self.method.label}, seed {self.seed}"


def no_observer(event: Event) -> None:
    """Does nothing."""


def run_job(job: Job, observer: Observer = no_observer, *, stop: StopFlag | None = None) -> dict[str, Any]:
    """Train a run, resume it, or return its record if it is complete.

    While another command holds the run's folder, this one waits for it to finish, or resumes the run if it stops early.

    Args:
        job: the run.
        observer: called with every event.
        stop: stop flag of a caller that handles signals; by default, Ctrl-C and SIGTERM set one.

    Returns: the record, with status ``finished``, ``diverged`` or ``interrupted``.

    Raises: WellcondError if the run fails; its record then has the status ``failed`` and the reason.
    """
    check_local_code(job.recipe, trusted=job.local_code)
    folder = RunFolder(job.folder)
    config = job.recipe.config(job.method, job.seed)
    accelerator = make_accelerator(job.recipe, job.folder, cpu=job.cpu)
    with contextlib.ExitStack() as held:
        flag = held.enter_context(StopFlag().listening()) if stop is None else stop
        while _is_in_use(folder, accelerator, held):
            if flag.any_rank(accelerator):
                return _Session(job, folder, config, accelerator, observer, None).give_up()
            observer({"event": "waiting"})
            time.sleep(SECONDS_BETWEEN_TRIES)
        return _run(job, folder, config, accelerator, observer, flag)


def _is_in_use(folder: RunFolder, accelerator: Any, held: contextlib.ExitStack) -> bool:
    """Lock the folder on rank 0; returns, on every rank, whether another command holds it.

    Raises: RunError, on every rank, if the folder cannot be used.
    """
    problem = None
    if accelerator.is_main_process:
        try:
            held.enter_context(folder.opened())
        except RunError as error:
            problem = error
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        [problem] = broadcast_object_list([problem])
    if problem is not None and not isinstance(problem, FolderInUse):
        raise problem
    return problem is not None


def _run(
    job: Job, folder: RunFolder, config: dict[str, Any], accelerator: Any, observer: Observer, stop: StopFlag
) -> dict[str, Any]:
    former = folder.read_record()
    check_same_run(former, config, folder.path)
    if former is not None and former["status"] in COMPLETE:
        accelerator.wait_for_everyone()
        observer({"event": "end", "record": former, "repeated": True})
        return former
    return _Session(job, folder, config, accelerator, observer, former).run(stop)


def check_local_code(recipe: Recipe, *, trusted: bool) -> None:
    """Raise RecipeError if a recipe names a file of code that is not trusted."""
    if is_local_code(recipe.model.name) and not trusted:
        raise RecipeError(TRUST_NEEDED.format(recipe.model.name))


def complete_record(job: Job) -> dict[str, Any] | None:
    """The record of a complete run; None if the run is missing or incomplete.

    Raises: RunError if the folder holds a run with other settings.
    """
    record = RunFolder(job.folder).read_record()
    check_same_run(record, job.recipe.config(job.method, job.seed), job.folder)
    return record if record is not None and record["status"] in COMPLETE else None


def check_same_run(record: dict[str, Any] | None, config: dict[str, Any], path: Path) -> None:
    """Raise RunError if a folder holds a run with other settings; nothing is overwritten."""
    if record is not None and record["config_hash"] != config_hash(config):
        other = differences(record["config"], config)
        raise RunError(
            f"{path} holds a run with other settings ({'; '.join(other[:4])}). Give another folder, or delete this one"
        )


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two configurations differ.

    Example:
        >>> differences({"optimizer": {"lr": 1}}, {"optimizer": {"lr": 2}})
        ['optimizer.lr: 1 there, 2 here']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in [*a, *(key for key in b if key not in a)]
            for line in differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if a == b else [f"{path}: {a!r} there, {b!r} here"]


class _Session:
    """One process's session of one run."""

    def __init__(
        self, job: Job, folder: RunFolder, config: dict[str, Any], accelerator: Any, observer: Observer, former: Any
    ) -> None:
        self.job, self.folder, self.accelerator, self.observer = job, folder, accelerator, observer
        self.clock = RunClock(synchronizer(accelerator.device))
        self.engine: Engine | None = None
        self.record: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "wellcond-run",
            "recipe": job.recipe.name,
            "scale": job.recipe.scale,
            "method": job.method.label,
            "slug": job.method.slug,
            "seed": job.seed,
            "method_spec": job.method.model_dump(mode="json", exclude={"label"}),
            "config": config,
            "config_hash": config_hash(config),
            "status": "running",
            "reason": "",
            "final": None,
            "best": None,
            "sessions": [],
        }
        if job.recipe.training.hours is not None:
            self.record["reproducible"] = False  # its schedule follows the clock
        for name in KEPT:  # from an earlier session, until this one replaces it
            if former is not None and name in former:
                self.record[name] = former[name]

    def give_up(self) -> dict[str, Any]:
        """Stop while another command holds the folder."""
        self.record |= {"status": "interrupted", "reason": "stopped while another process was running it"}
        self.record["seconds"] = self.clock.now()
        self.observer({"event": "end", "record": self.record, "repeated": False})
        return self.record

    def run(self, stop: StopFlag) -> dict[str, Any]:
        try:
            self._set_up().train(stop)
            return self._close("finished")
        except Diverged as error:
            return self._close("diverged", str(error))
        except Interrupted:
            return self._close("interrupted", "stopped on request; run the same command to resume")
        except KeyboardInterrupt:
            self._close("interrupted", "stopped at once; run the same command to resume from the last checkpoint")
            raise
        except WellcondError as error:
            self._fail(str(error))
            raise
        except OSError as error:
            if error.filename is None:
                raise self._unexpected(error) from error
            reason = f"{error.filename}: {error.strerror}"
            self._fail(reason)
            raise RunError(f"{self.job.title} failed: {reason}. Correct the path or its permissions") from error
        except Exception as error:
            raise self._unexpected(error) from error

    def _unexpected(self, error: Exception) -> UnexpectedRunError:
        self._fail(f"{type(error).__name__}: {error}")
        details = f"\n{traceback.format_exc()}" if os.environ.get(DEBUG_VARIABLE) else ""
        return UnexpectedRunError(
            f"{self.job.title} failed: {type(error).__name__}: {error}; wellcond --debug shows where{details}"
        )

    def _set_up(self) -> Engine:
        job, recipe, observer = self.job, self.job.recipe, self.observer
        if recipe.training.threads is not None:
            torch.set_num_threads(recipe.training.threads)
        reset_peak_memory(self.accelerator.device)

        def told(what: str, done: int, total: int) -> None:
            # A prepared task is cached with this closure for the next run: it must not keep the session's model alive.
            observer({"event": "phase", "phase": f"{what} {done}/{total}"})

        observer({"event": "phase", "phase": "preparing"})
        task = prepare_task(recipe, seed=job.seed, base=job.base, progress=told)
        self.record |= describe_tokenizer(task.tokenizer, self.record.get("tokenizer"), self.folder.path)
        tested = find_test_set(recipe, task)
        model = prepare_model(recipe, job.method, task, seed=job.seed, base=job.base, local_code=job.local_code)
        described = fingerprint(task.data)
        self.record |= {
            "metric": {
                "name": task.metric.name,
                "higher_is_better": task.metric.higher_is_better,
                "percent": task.metric.percent,
            },
            "data": {
                "name": task.data.name,
                "train": len(task.train),
                "evaluation": len(task.evaluation),
                **({} if tested is None else {"test": len(tested)}),
                "description": task.data.description,
                "fingerprint": described["splits"],
            },
            "model": {
                "name": recipe.model.name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "attentions": len(find_attention(model, strict=False)),
            },
        }
        self.engine = engine = Engine(
            recipe,
            task,
            model,
            self.accelerator,
            self.folder,
            seed=job.seed,
            clock=self.clock,
            observer=self.observer,
            on_saved=self._write,
        )
        step = engine.resume()
        session = describe_session(
            self.accelerator.device,
            processes=self.accelerator.num_processes,
            precision={"no": "float32"}.get(recipe.precision.mixed, recipe.precision.mixed),
            step=step,
            at_once=job.at_once,
        )
        self.record["sessions"] = [*self.record["sessions"], session]
        self._write()
        self._start_trackers()
        self.observer({"event": "start", "step": step, "num_steps": engine.lengths.num_steps, "name": job.title,
                       "batch_size": recipe.training.batch_size})  # fmt: skip
        return engine

    def _start_trackers(self) -> None:
        if self.job.recipe.logging.trackers:
            values = {"method": self.job.method.label, "seed": self.job.seed, "recipe": self.job.recipe.name}
            self.accelerator.init_trackers(self.job.recipe.logging.project, config=values)

    def _close(self, status: str, reason: str = "") -> dict[str, Any]:
        self.record |= {"status": status, "reason": reason}
        self._write()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.observer({"event": "end", "record": self.record, "repeated": False})
        return self.record

    def _fail(self, reason: str) -> None:
        self.record |= {"status": "failed", "reason": reason}
        with contextlib.suppress(
            RunError
        ):  # on a full disk the record cannot be written either: the first error counts
            self._write()

    def _note_company(self) -> None:
        """Mark the session as sharing the machine once other processes are seen."""
        if self.record["sessions"]:
            session = self.record["sessions"][-1]
            session["alone"] = bool(session.get("alone")) and has_free_cores()

    def _write(self) -> None:
        """Update the record and write it on rank 0."""
        engine = self.engine
        seconds = self.clock.now()
        if engine is not None:
            state, lengths = engine.state, engine.lengths
            updates = max(1, state.step)
            self.record |= {
                "final": state.final,
                "best": state.best,
                "progress": {
                    "step": state.step,
                    "num_steps": lengths.num_steps,
                    "epoch": engine.epoch,
                    "num_epochs": lengths.epoch(lengths.num_steps),
                    "steps_per_epoch": lengths.steps_per_epoch,
                },
                "samples_per_second": engine.full_updates * engine.plan.batch_size / max(seconds["training"], 1e-9),
                "seconds_per_step": seconds["training"] / updates,
            }
            if engine.test is not None:
                self.record["test"] = engine.test
            if engine.samples:
                self.record["samples"] = engine.samples
            self._note_company()
        self.record |= {"seconds": seconds, "peak_memory_bytes": peak_memory(self.accelerator.device)}
        if self.accelerator.is_main_process:
            self.record |= {"logs": marks} if (marks := self.folder.log_marks()) else {}
            self.folder.write_record(self.record)

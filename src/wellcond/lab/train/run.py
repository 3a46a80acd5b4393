"""One run: from a recipe, a method and a seed to a folder with a complete record."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import shutil
import subprocess
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from wellcond.attention.find import find_attention
from wellcond.errors import DEBUG_VARIABLE, TRUST_NEEDED, RecipeError, RunError, WellcondError
from wellcond.lab.data.base import fingerprint
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import is_local_code
from wellcond.lab.recipe import Recipe, config_hash, differences, override_recipe, with_effect
from wellcond.lab.records import COMPLETE, SCHEMA, leaves_of
from wellcond.lab.tasks.base import AbstractTask
from wellcond.lab.train.engine import Engine, Event, Observer
from wellcond.lab.train.length import Diverged, RunClock, StopFlag, peak_memory, reset_peak_memory
from wellcond.lab.train.prepare import make_accelerator, prepare_model, prepare_task
from wellcond.lab.train.run_folder import RunFolder
from wellcond.lab.user_code import UserCode
from wellcond.version import __version__


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
    keep_checkpoints: bool = True
    """Whether those of a complete run stay."""
    user_code: UserCode = UserCode()

    def __post_init__(self) -> None:
        named = self.recipe.model.name if is_local_code(self.recipe.model.name) else self.recipe.data.local_code
        if named and not self.local_code:
            raise RecipeError(TRUST_NEEDED.format(named))
        object.__setattr__(self, "recipe", override_recipe(self.recipe, self.method))

    @property
    def title(self) -> str:
        """Human-readable name of the run."""
        return f"{self.method.label}, seed {self.seed}"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved recipe of the run."""
        return self.recipe.config(self.method, self.seed)


def run_job(job: Job, observer: Observer = lambda event: None, *, stop: StopFlag | None = None) -> dict[str, Any]:
    """Train a run, or resume it; returns its record, with status ``finished``, ``diverged`` or ``interrupted``.

    Ctrl-C and SIGTERM stop it, unless the caller handles signals and has a stop flag. WellcondError if it fails, which
    its record says too; FolderInUse while another command runs it.
    """
    job.user_code.install()
    accelerator = make_accelerator(job.recipe, job.folder, cpu=job.cpu)
    from accelerate.utils import broadcast_object_list

    folder, problem = RunFolder(job.folder), None
    with contextlib.ExitStack() as held:
        if accelerator.is_main_process:
            try:
                held.enter_context(folder.opened(patience=5))  # what was killed a moment ago may still be ending
            except RunError as error:
                problem = error
        [problem] = broadcast_object_list([problem])
        if problem is not None:
            raise problem
        record = complete_record(job)
        if record is None:
            flag = held.enter_context(StopFlag().listening()) if stop is None else stop
            record = Session(job, folder, accelerator, observer).run(flag)
        else:
            accelerator.wait_for_everyone()
            observer({"event": "end", "record": record})
        if record["status"] in COMPLETE and not job.keep_checkpoints and accelerator.is_main_process:
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
        return record


def complete_record(job: Job) -> dict[str, Any] | None:
    """The record of a complete run; None if it is missing or incomplete. RunError if it has other settings."""
    record = RunFolder(job.folder).read_record()
    if record is None:
        return None
    if config_hash(record["config"]) != config_hash(job.config):
        other = f"other settings{describe_change(record['config'], job.config)}"
        raise RunError(f"{job.folder} holds a run under {other}. Give another folder, or delete this one")
    record.pop("curves", None)  # of a run that was packed and unpacked
    return record if record["status"] in COMPLETE else None


def describe_change(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Which settings of two runs differ."""
    return f" ({'; '.join(differences(with_effect(there), with_effect(here)))})"


class Session:
    """One process's session of one run: it has the record, which an engine's progress goes into."""

    def __init__(self, job: Job, folder: RunFolder, accelerator: Any, observer: Observer) -> None:
        self.job, self.folder, self.accelerator, self.observer = job, folder, accelerator, observer
        self.clock = RunClock(accelerator.device)
        self.engine: Engine | None = None
        config = job.config
        self.record: dict[str, Any] = {"final": None, "best": None, "sessions": []}
        self.record |= folder.read_record() or {}  # until this session replaces it
        self.record |= {
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
        }
        if job.recipe.logging.trackers:
            self.record.setdefault("run_id", secrets.token_hex(8))  # kept in later sessions
        if job.recipe.training.hours is not None:
            self.record["reproducible"] = False  # its schedule follows the clock

    def run(self, stop: StopFlag) -> dict[str, Any]:
        """Train until the end or until it is stopped; returns the record."""
        try:
            if self._set_up().train(stop):
                return self._close("finished")
            return self._close("interrupted", "stopped on request; run the same command to resume")
        except Diverged as error:
            return self._close("diverged", str(error))
        except KeyboardInterrupt:
            self._close("interrupted", "stopped at once; run the same command to resume from the last checkpoint")
            raise
        except Exception as error:
            expected = isinstance(error, WellcondError)
            reason = str(error) if expected else f"{type(error).__name__}: {error}"
            self.record |= {"status": "failed", "reason": reason}
            with contextlib.suppress(RunError):  # on a full disk the record cannot be written either
                self.write()
            if expected:
                raise
            details = f"\n{traceback.format_exc()}" if os.environ.get(DEBUG_VARIABLE) else ""
            raise RunError(f"{self.job.title} failed: {reason}; wellcond --debug shows where{details}") from error

    def _set_up(self) -> Engine:
        job, recipe, observer = self.job, self.job.recipe, self.observer
        if recipe.training.threads is not None:
            torch.set_num_threads(recipe.training.threads)
        reset_peak_memory(self.accelerator.device)

        def told(what: str, done: int, total: int) -> None:
            observer({"event": "phase", "phase": f"{what} {done}/{total}"})

        observer({"event": "phase", "phase": "preparing"})
        task = prepare_task(recipe, seed=job.seed, base=job.base, progress=told, local_code=job.local_code)
        self._describe_task(task)
        model = prepare_model(recipe, job.method, task, seed=job.seed, base=job.base, local_code=job.local_code)
        self.record["model"] = {
            "name": recipe.model.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "attentions": len(find_attention(model, strict=False)),
        }
        parts = task, model, self.accelerator, self.folder, self.clock, self._observe
        self.engine = engine = Engine(recipe, job.seed, *parts)
        step = engine.resume()
        self.record["sessions"] = [*self.record["sessions"], describe_session(self.accelerator, step, job.at_once)]
        self.write()
        if recipe.logging.trackers:
            self._begin_tracking(step)
        observer({"event": "start", "step": step, "num_steps": engine.num_steps})
        return engine

    def _begin_tracking(self, step: int) -> None:
        """Start trackers under a name of its own for each run; a resumed run goes on with its own curve."""
        job = self.job
        group = f"{job.recipe.name}-{job.recipe.scale}"
        self.accelerator.init_trackers(
            "wellcond",
            config=flat_settings(job.config),
            init_kwargs=tracker_options(
                name=f"{group} {job.title}",
                group=group,
                tags=(job.recipe.name, job.recipe.scale, job.method.slug, f"seed {job.seed}"),
                id=self.record["run_id"],
                step=step,
                folder=self.folder.path,
            ),
        )

    def _describe_task(self, task: AbstractTask) -> None:
        """Metric, data and tokeniser; RunError if an earlier session had another one, RecipeError without test data."""
        if task.tokenizer is not None:
            found = task.tokenizer.fingerprint
            former = self.record.get("tokenizer", {}).get("fingerprint", found)
            if former != found:
                raise RunError(
                    f"{self.folder.path} holds a run with another tokeniser: expected fingerprint {former}, found "
                    f"{found}. Restore the tokeniser's file, or the text it was trained on, or give another folder"
                )
            self.record["tokenizer"] = {"fingerprint": found, "vocabulary_size": task.tokenizer.vocabulary_size}
        wanted, data = self.job.recipe.evaluation.test, task.data
        if wanted is not None and not task.test:
            raise RecipeError(
                f"evaluation.test: {wanted} needs a labelled split named test, which {data.name} does not have here. "
                "Give other data, or evaluation.test=null: results are then those on the evaluation set"
            )
        self.record["metric"] = asdict(task.metric)
        self.record["data"] = {
            "name": data.name,
            "train": len(task.train),
            "evaluation": len(task.evaluation),
            **({"test": len(task.test)} if wanted is not None and task.test else {}),
            "description": data.description,
            "fingerprint": fingerprint(data),
        }

    def _close(self, status: str, reason: str = "") -> dict[str, Any]:
        self.record |= {"status": status, "reason": reason}
        self.write()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.observer({"event": "end", "record": self.record})
        return self.record

    def _observe(self, event: Event) -> None:
        if event["event"] == "saved":
            self.write()
        self.observer(event)

    def write(self) -> None:
        """Update the record and write it on rank 0."""
        if self.engine is not None:
            self.record |= self.engine.progress()
            if self.record["sessions"]:  # it shares the machine once other processes have been seen
                session = self.record["sessions"][-1]
                processes = session["runs_at_once"] * local_ranks(session["processes"])
                session["alone"] &= has_room(self.accelerator.device, processes)
        self.record |= {"seconds": self.clock.now(), "peak_memory_bytes": peak_memory(self.accelerator.device)}
        if self.accelerator.is_main_process:
            self.record |= {"logs": marks} if (marks := self.folder.log_marks()) else {}
            self.folder.write_record(self.record)


def tracker_options(
    *, name: str, group: str, tags: Sequence[str], id: str, step: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """What each tracker of Accelerate calls a run; with the same `id` it goes on with one that it knows."""
    return {
        "wandb": {"name": name, "group": group, "tags": list(tags), "id": id, "resume": "allow", "dir": str(folder)},
        "trackio": {"name": f"{name} {id}", "group": group, "resume": "allow"},
        "tensorboard": {"purge_step": step} if step else {},  # what came after the checkpoint is drawn again
        "mlflow": {"run_name": name},
        "swanlab": {"experiment_name": name, "group": group, "tags": list(tags), "id": id, "resume": "allow"},
        "aim": {"experiment": group},
    }


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their path, such as ``optimizer.lr``, in the kinds of values that every tracker takes."""
    found = {".".join(path): value for path, value in leaves_of(settings) if not isinstance(value, Mapping)}
    return {path: value if isinstance(value, (bool, int, float, str)) else str(value) for path, value in found.items()}


PACKAGES = ("accelerate", "datasets", "numpy", "scikit-learn", "scipy", "timm", "torchvision", "transformers")


def describe_session(accelerator: Any, step: int, at_once: int = 1) -> dict[str, Any]:
    """Versions, commit and machine, but no user, host or path; `alone`: its cores, or its GPU, are not shared."""
    device, processes, threads = accelerator.device, accelerator.num_processes, torch.get_num_threads()
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "wellcond": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": packages,
        **_commit(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "processes": processes,
        "threads": threads,
        "precision": {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "resumed_at_step": step,
        "runs_at_once": at_once,
        "cores": num_cores(),
        "alone": has_room(device, at_once * local_ranks(processes)),
    }


OTHERS_MEMORY = 2**30
"""Bytes of a GPU's memory that may be in use beside our own: each process has a context of some hundred megabytes."""


def has_room(device: torch.device, processes: int) -> bool:
    """Whether a run shares its cores, or its GPU, with nothing else, as far as the system says.

    `processes` of this comparison are on this machine, each on a GPU of its own if there are as many.
    """
    if device.type == "cpu":
        return processes * torch.get_num_threads() <= num_cores() and has_free_cores()
    if device.type != "cuda":
        return processes == 1
    if processes > count_gpus():
        return False
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) < OTHERS_MEMORY


ALL_GPUS = "WELLCOND_GPUS"
"""Variable that says how many GPUs a comparison has to a process that sees only its own."""


def local_ranks(processes: int) -> int:
    """Processes of a run that are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def count_gpus() -> int:
    """GPUs that the runs of a comparison on this machine share among them."""
    return int(os.environ.get(ALL_GPUS) or torch.cuda.device_count())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_free_cores() -> bool:
    """Whether no more threads wanted to run in the last minute than there are cores, but for our own half a one."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] <= (os.cpu_count() or 1) + 0.5


def _commit() -> dict[str, Any]:
    """Commit of wellcond's own source tree, and whether it was changed; None when it is an installed package."""
    root = Path(__file__).parents[4]
    if (root / ".git").exists():
        asked = "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*".split()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.check_output(asked, cwd=root, stderr=subprocess.DEVNULL, text=True, timeout=20).strip()
            return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
    return {"commit": None, "dirty": None}

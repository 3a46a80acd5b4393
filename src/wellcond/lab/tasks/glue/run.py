"""Fine-tuning and scoring of pre-trained runs: every task and seed is a run of its own, in RUN/glue/TASK/seed-S."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wellcond.errors import MissingExtraError
from wellcond.lab.data.base import DataError, files_or_folders
from wellcond.lab.data.files import BUILDERS
from wellcond.lab.load_recipe import set_field
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError, explain
from wellcond.lab.tasks.glue.benchmark import HUB_ID, NAMES, GlueTask, find_task
from wellcond.lab.tasks.glue.pretrained import CLASSIFIERS, Pretrained, read_pretrained
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.prepare import located
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunError, RunFolder
from wellcond.models import read_hf_config
from wellcond.run_records import COMPLETE

AS_PUBLISHED = {"lr": 4e-5, "batch_size": 16, "epochs": 5, "rows": 0}
TINY = {"lr": 1e-3, "batch_size": 32, "epochs": 3, "rows": 3000}
"""For models of scale tiny, which at the published rate mostly predict one class for every sentence."""
LENGTH = 128
DROPOUT = 0.1
WARMUP = 0.1
"""Share of the length."""
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
"""Names that configurations of transformers have for it."""


def glue_recipe(
    pretrained: Pretrained,
    task: GlueTask,
    *,
    data: Path | None = None,
    limit: int | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """Fine-tuning as in Crammed BERT; models of scale tiny learn faster and from fewer rows.

    Args:
        pretrained: where weights, tokeniser, scale and number formats come from.
        task: what to learn.
        data: folder with one folder for each task; the hub or its mirror by default.
        limit: rows of a split at most; None: 3,000 at scale tiny, all at others; 0: all.
        overrides: ``path.to.field=value``. Unless the warm-up is set, it is a tenth of the length.

    Raises: RecipeError, DataError.
    """
    config = pretrained.record["config"]
    size = TINY if config["scale"] == "tiny" else AS_PUBLISHED
    rows = (size["rows"] if limit is None else limit) or None
    fields: dict[str, Any] = {
        "name": f"glue-{task.name}",
        "scale": config["scale"],
        "task": {
            "name": "glue",
            "task": task.name,
            "tokenizer": {"file": pretrained.tokenizer_file, "sha256": pretrained.tokenizer.fingerprint},
            "length": min(LENGTH, pretrained.task.length),
            "limit_further": rows,
        },
        "data": _data(task, data) | {"limit_train": rows, "limit_evaluation": rows},
        "model": _model(pretrained),
        "seeds": [0],
        "optimizer": {"name": "adamw", "lr": size["lr"], "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.0},
        "schedule": {"name": "cosine"},
        "training": {
            "length": {"epochs": size["epochs"]},
            "batch_size": size["batch_size"],
            "clip_norm": None,
            "diverged_above": None,  # the loss of one batch of a pre-trained model is no measure of what is large
            "threads": config["training"].get("threads"),
        },
        "precision": {"mixed": config["precision"]["mixed"]},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    }
    for override in overrides:
        set_field(fields, override)
    schedule, length = fields.get("schedule"), fields["training"].get("length")
    if isinstance(schedule, dict) and schedule.get("name") == "cosine" and "warmup" not in schedule:
        schedule["warmup"] = length  # a wrong length is reported as one
        if isinstance(length, dict):
            tenth = {unit: WARMUP * amount for unit, amount in length.items()}
            schedule["warmup"] = {u: share if u == "epochs" else max(1, round(share)) for u, share in tenth.items()}
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise explain(error, f"fine-tuning on {task.name}", fields) from error


def _model(pretrained: Pretrained) -> dict[str, Any]:
    """The model with a classifier and with dropout, whatever pre-training did without."""
    settings = pretrained.model
    name = located(settings["name"], pretrained.base)
    names: tuple[str, ...] = ("dropout",)
    if name not in CLASSIFIERS:
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise MissingExtraError("transformers", "text") from error
        folder = Path(name.removeprefix("hf:"))
        hf_config = read_hf_config(folder) if folder.is_dir() else AutoConfig.for_model(str(folder))
        names = tuple(field for field in DROPOUTS if hasattr(hf_config, field))
    return {
        "name": CLASSIFIERS.get(name, name),
        "arguments": pretrained.arguments() | dict.fromkeys(names, DROPOUT),
        "norms": settings.get("norms", "keep"),
        "qk_norm": settings.get("qk_norm", False),
        "encoder": pretrained.encoder_file,
    }


def _data(task: GlueTask, folder: Path | None) -> dict[str, Any]:
    """Settings of the source; every column and class is named, so that other data are an error."""
    named: dict[str, Any] = {
        "input": task.columns[0] if len(task.columns) == 1 else list(task.columns),
        "label": "label",
        "label_kind": "number" if task.classes is None else "class",
        "class_names": None if task.classes is None else list(task.classes),
    }
    if folder is None:
        return {"source": "hub", "id": HUB_ID, "config": task.name, "evaluation_split": task.evaluation} | named
    files = {split: _find_files(folder / task.name, split) for split in ("train", task.evaluation)}
    return {"source": "files", "train": files["train"], "evaluation": files[task.evaluation], "kind": "text"} | named


def _find_files(folder: Path, split: str) -> list[str]:
    """Files of a split, such as train.tsv, or train-00000-of-00002.parquet and its sequel."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    named = [
        path for path in inside if path.suffix.lower() in BUILDERS and path.name.split(".")[0].split("-")[0] == split
    ]
    if not named:
        there = files_or_folders(inside) if folder.is_dir() else "no such folder"
        raise DataError(
            f"{folder}: there is no file of the split {split!r}.",
            expected=f"{split}.tsv, {split}.jsonl, {split}.parquet or {split}-00000-of-00001.parquet",
            found=there,
            todo="Give the folder that has one folder for each task, such as cola and sst2, in --data.",
        )
    return [str(path.resolve()) for path in named]


@dataclass(frozen=True)
class GluePlan:
    """What is to be run."""

    runs: tuple[Pretrained, ...]
    jobs: tuple[Job, ...]
    left_out: tuple[str, ...] = ()
    """Runs of a comparison that did not finish, with their status."""


def plan_glue(
    folder: Path,
    *,
    tasks: Sequence[str] = NAMES,
    seeds: Sequence[int] = (0,),
    data: Path | None = None,
    limit: int | None = None,
    overrides: Sequence[str] = (),
    base: Path | None = None,
    cpu: bool = False,
) -> GluePlan:
    """All fine-tuning runs of a pre-trained run, or of every finished run of a comparison.

    Seeds are those of fine-tuning; `base` is the folder of the recipe of pre-training, where its relative paths start;
    for `data`, `limit` and `overrides` see `glue_recipe`.

    Raises: RunError, RecipeError, DataError, WeightError; before anything is trained.
    """
    chosen = [find_task(name) for name in tasks]
    if not chosen or len(set(tasks)) < len(tasks):
        raise RecipeError(f"--tasks: expected at least one task, and none twice, found {', '.join(tasks) or 'none'}")
    runs, left_out = find_runs(folder, base)
    jobs = [
        Job(
            glue_recipe(run, task, data=data, limit=limit, overrides=overrides),
            MethodSettings(label=f"{run.record['method']} (seed {run.record['seed']}) on {task.name}"),
            seed,
            run.place / task.name / f"seed-{seed}",
            base=run.place,
            cpu=cpu,
        )
        for seed in seeds
        for task in chosen
        for run in runs
    ]
    return GluePlan(runs, tuple(jobs), left_out)


def find_runs(folder: Path, base: Path | None = None) -> tuple[tuple[Pretrained, ...], tuple[str, ...]]:
    """Pre-trained runs of a folder, and the names of those that did not finish.

    Raises: RunError if there is none that finished.
    """
    if not (folder / "comparison.json").is_file():
        return (read_pretrained(folder, base),), ()
    found, left_out = [], []
    for path in sorted(folder.glob("*/seed*/run.json")):
        record = RunFolder(path.parent).read_record()
        assert record is not None
        if record["status"] == "finished":
            found.append(read_pretrained(path.parent, base))
        else:
            left_out.append(f"{record['method']}, seed {record['seed']}: {record['status']}")
    if not found:
        raise RunError(f"{folder}: expected finished runs, found {'; '.join(left_out) or 'none'}")
    return tuple(found), tuple(left_out)


def run_glue(plan: GluePlan, *, num_workers: int, observer: JobObserver, keep_checkpoints: bool = False) -> Outcome:
    """Run what is missing. Checkpoints of complete runs are removed unless they are to be kept.

    Raises: as `run_comparison`.
    """
    waiting = {job.base for job in plan.jobs if not _is_complete(job)}
    for run in plan.runs:
        if run.place in waiting:
            run.write_encoder()
    is_first = os.environ.get("RANK", "0") == "0"

    def observe(job: Job, event: Event) -> None:
        observer(job, event)
        if event["event"] == "end" and event["record"]["status"] in COMPLETE and is_first and not keep_checkpoints:
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)

    outcome = run_comparison(plan.jobs, num_workers=num_workers, observer=observe)
    if is_first and not keep_checkpoints and all(map(_is_complete, plan.jobs)):
        for run in plan.runs:
            (run.place / run.encoder_file).unlink(missing_ok=True)
    return outcome


def _is_complete(job: Job) -> bool:
    record = RunFolder(job.folder).read_record()
    return record is not None and record["status"] in COMPLETE

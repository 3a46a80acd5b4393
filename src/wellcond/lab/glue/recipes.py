"""The recipe by which one pre-trained model is fine-tuned on one task; every field of it can be set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wellcond.errors import MissingExtraError
from wellcond.lab.data.errors import DataError, files_or_folders
from wellcond.lab.data.sources.files import BUILDERS
from wellcond.lab.glue.pretrained import CLASSIFIERS, Pretrained
from wellcond.lab.glue.tasks import HUB_ID, GlueTask
from wellcond.lab.load_recipe import set_field
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import explain
from wellcond.lab.train.prepare import located
from wellcond.models import read_hf_config


@dataclass(frozen=True)
class FineTuning:
    """What depends on the size of the model."""

    lr: float = 4e-5
    batch_size: int = 16
    epochs: int = 5
    rows: int = 0
    """Of a split at most; 0: all."""


AS_PUBLISHED = FineTuning()
TINY = FineTuning(lr=1e-3, batch_size=32, epochs=3, rows=3000)
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
    rows = size.rows if limit is None else limit
    fields: dict[str, Any] = {
        "name": f"glue-{task.name}",
        "scale": config["scale"],
        "task": {
            "name": "glue",
            "task": task.name,
            "tokenizer": {"file": pretrained.tokenizer_file, "sha256": pretrained.tokenizer.fingerprint},
            "length": min(LENGTH, pretrained.task.length),
            "limit_further": rows or None,
        },
        "data": _data(task, data) | {"limit_train": rows or None, "limit_evaluation": rows or None},
        "model": _model(pretrained),
        "seeds": [0],
        "optimizer": {"name": "adamw", "lr": size.lr, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.0},
        "schedule": {"name": "cosine"},
        "training": {
            "length": {"epochs": size.epochs},
            "batch_size": size.batch_size,
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
        schedule["warmup"] = _tenth(length)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise explain(error, f"fine-tuning on {task.name}", fields) from error


def _tenth(length: Any) -> Any:
    if not isinstance(length, dict):
        return length  # refused with the length
    return {
        unit: WARMUP * amount if unit == "epochs" else max(1, round(WARMUP * amount)) for unit, amount in length.items()
    }


def _model(pretrained: Pretrained) -> dict[str, Any]:
    """The model with a classifier and with dropout, whatever pre-training did without."""
    settings = pretrained.model
    name = located(settings["name"], pretrained.base)
    names = ("dropout",) if name in CLASSIFIERS else _dropouts(name.removeprefix("hf:"))
    return {
        "name": CLASSIFIERS.get(name, name),
        "arguments": pretrained.arguments() | dict.fromkeys(names, DROPOUT),
        "norms": settings.get("norms", "keep"),
        "qk_norm": settings.get("qk_norm", False),
        "encoder": pretrained.encoder_file,
    }


def _dropouts(name: str) -> tuple[str, ...]:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingExtraError("transformers", "text") from error
    folder = Path(name)
    config = read_hf_config(folder) if folder.is_dir() else AutoConfig.for_model(name)
    return tuple(field for field in DROPOUTS if hasattr(config, field))


def _data(task: GlueTask, folder: Path | None) -> dict[str, Any]:
    """Settings of the source; every column and class is named, so that other data are refused."""
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

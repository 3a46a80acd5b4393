"""Fine-tuning and scoring of pre-trained runs: every task is a run of its own, in RUN/glue/TASK/seed-0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.errors import RecipeError, RunError
from wellcond.files import write_atomically
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.tasks.glue import COLUMNS, HUB_ID, NAMES, REGRESSION, with_marks
from wellcond.lab.tasks.language_modelling import MaskedLanguageModellingSettings
from wellcond.lab.tokenizers import TrainedTokenizer, make_tokenizer, read_tokenizer
from wellcond.lab.train.prepare import load_cached_data
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunFolder, check_links, read_finished_run, writing

AS_PUBLISHED: dict[str, Any] = {"lr": 4e-5, "batch_size": 16, "epochs": 5, "rows": None}
TINY: dict[str, Any] = {"lr": 1e-3, "batch_size": 32, "epochs": 3, "rows": 3000}
"""For models of scale tiny, which at the published rate mostly predict one class for every sentence."""
CRAMMED = "wellcond:crammed_bert"


def read_pretrained(folder: Path, base: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Record of the run in a folder, and the file of its tokeniser, which is made if it is missing.

    The name of the file tells the weights of the run from others. RecipeError or RunError if this is no run to start
    from, or something of it is damaged or was changed.
    """
    check_links(folder)
    record, weights = read_finished_run(folder, "glue", "comparison.json")
    config = record["config"]
    task, model = config["task"]["name"], config["model"]["name"]
    if task != "masked_language_modelling":
        raise RecipeError(f"{folder}: GLUE starts from a run of masked_language_modelling, found one of {task}")
    if not model.startswith(("hf:", CRAMMED)):
        raise RecipeError(f"{folder}: expected a model hf:TYPE or {CRAMMED}, found {model}")
    recorded = record["tokenizer"]["fingerprint"]
    with open(weights, "rb") as file:
        path = folder / "glue" / f"tokenizer-{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}.json"
    if not path.is_file():
        choice, text = MaskedLanguageModellingSettings.model_validate(config["task"]).tokenizer, None
        if isinstance(choice, TrainedTokenizer):
            text = load_cached_data(json.dumps(config["data"]), base).train
        made = with_marks(make_tokenizer(choice, text, "the text of pre-training", base))
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, made.inner.to_str())
    if (fingerprint := read_tokenizer(path).fingerprint) != recorded:
        raise RunError(
            f"{path} is not the tokeniser of pre-training: expected fingerprint {recorded}, found {fingerprint}. "
            "Delete the file to have it made again, or restore what it is made from"
        )
    return record, path


def glue_recipe(record: dict[str, Any], tokenizer: Path, name: str, limit: int | None = None) -> Recipe:
    """Fine-tuning on a task as in Crammed BERT; models of scale tiny learn faster and from fewer rows.

    `limit` is the largest number of rows of a split; None: 3,000 at scale tiny, all at others; 0: all.
    """
    config, columns = record["config"], COLUMNS[name]
    model, length = config["model"], config["task"]["length"]
    size = TINY if config["scale"] == "tiny" else AS_PUBLISHED
    rows = size["rows"] if limit is None else limit or None
    crammed = model["name"] == CRAMMED
    stored = {"name": tokenizer.name, "sha256": record["tokenizer"]["fingerprint"]}
    # With the dropout that classifiers have by default, whatever pre-training did without.
    arguments = {"length" if crammed else "max_position_embeddings": length}
    arguments |= {field: value for field, value in model["arguments"].items() if "dropout" not in field}
    fields = {
        "name": f"glue-{name}",
        "scale": config["scale"],
        "task": {"name": "glue", "task": name, "tokenizer": stored, "length": min(128, length)},
        "data": {
            "source": "hub",
            "id": HUB_ID,
            "config": name,
            "evaluation_split": "validation_matched" if name == "mnli" else "validation",
            "limit_train": rows,
            "limit_evaluation": rows,
            "input": columns[0] if len(columns) == 1 else list(columns),
            "label": "label",
            "label_kind": "number" if name == REGRESSION else "class",
        },
        "model": {
            "name": model["name"] + "_classifier" * crammed,  # those of transformers keep their name
            "arguments": arguments,
            "qk_norm": model.get("qk_norm", False),
            "encoder": "..",  # from the folder of the tokeniser
        },
        "optimizer": {"name": "adamw", "lr": size["lr"], "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup": {"epochs": 0.1 * size["epochs"]}},
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
    return Recipe.model_validate(fields)


def plan_glue(
    folder: Path, *, tasks: Sequence[str] = NAMES, limit: int | None = None, base: Path | None = None, cpu: bool = False
) -> list[Job]:
    """All fine-tuning runs of a pre-trained run, or of every finished run of a comparison.

    `base` is the folder of the recipe of pre-training, where its relative paths start; for `limit` see `glue_recipe`.
    """
    runs = [folder]
    if (folder / "comparison.json").is_file():
        runs = sorted(folder.glob("*/seed*"))
        runs = [run for run in runs if (RunFolder(run).read_record() or {}).get("status") == "finished"]
        if not runs:
            raise RunError(f"{folder}: expected finished runs of a comparison, found none")
    found = [(run, *read_pretrained(run, base)) for run in runs]
    return [
        Job(
            glue_recipe(record, tokenizer, name, limit),
            MethodSettings(label=f"{record['method']} (seed {record['seed']}) on {name}"),
            0,
            run / "glue" / name / "seed-0",
            base=run / "glue",
            cpu=cpu,
            keep_checkpoints=False,
        )
        for name in dict.fromkeys(tasks)
        for run, record, tokenizer in found
    ]

"""Fine-tuning and scoring of pre-trained runs: every task is a run of its own, in RUN/glue/TASK/seed-0."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.glue import COLUMNS, HUB_ID, NAMES, REGRESSION, with_marks
from wellcond.lab.tasks.language_modelling import MaskedLanguageModellingSettings
from wellcond.lab.tokenizers import TrainedTokenizer, make_tokenizer, read_tokenizer
from wellcond.lab.train.checkpoint import read_finished_run
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.prepare import load_cached_data
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunError, RunFolder, check_links, writing
from wellcond.run_records import COMPLETE

AS_PUBLISHED: dict[str, Any] = {"lr": 4e-5, "batch_size": 16, "epochs": 5, "rows": None}
TINY: dict[str, Any] = {"lr": 1e-3, "batch_size": 32, "epochs": 3, "rows": 3000}
"""For models of scale tiny, which at the published rate mostly predict one class for every sentence."""
LENGTH = 128
WARMUP = 0.1
"""Share of the length."""
CLASSIFIERS = {"wellcond:crammed_bert": "wellcond:crammed_bert_classifier"}
"""Models of ours that share the encoder of one that is pre-trained; those of transformers keep their name."""


def read_pretrained(folder: Path, base: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Record of the run in a folder, and the file of its tokeniser, which is made if it is missing.

    The name of the file tells the weights of the run from others.

    Raises: RecipeError if it is no finished run of masked language modelling whose model has a classifier and whose
        tokeniser marks sentences; RunError if its weights are damaged, a link leads out of its folder, into which
        scores are written, or the text that the tokeniser was trained on, or its file, has changed.
    """
    check_links(folder)
    record, weights = read_finished_run(folder, "glue", "comparison.json")
    config = record["config"]
    if config["task"]["name"] != "masked_language_modelling":
        found = config["task"]["name"]
        raise RecipeError(f"{folder}: GLUE starts from a run of masked_language_modelling, found one of {found}")
    if not config["model"]["name"].startswith(("hf:", *CLASSIFIERS)):
        found = config["model"]["name"]
        raise RecipeError(f"{folder}: expected a model hf:TYPE or {', '.join(CLASSIFIERS)}, found {found}")
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

    Weights, with corrections folded into them, scale and number formats are those of pre-training. `limit` is the
    largest number of rows of a split; None: 3,000 at scale tiny, all at others; 0: all.
    """
    config, columns = record["config"], COLUMNS[name]
    model, length = config["model"], config["task"]["length"]
    size = TINY if config["scale"] == "tiny" else AS_PUBLISHED
    rows = size["rows"] if limit is None else limit or None
    longest = "length" if model["name"] in CLASSIFIERS else "max_position_embeddings"
    # With the dropout that classifiers have by default, whatever pre-training did without.
    arguments = {field: value for field, value in model["arguments"].items() if "dropout" not in field}
    fields = {
        "name": f"glue-{name}",
        "scale": config["scale"],
        "task": {
            "name": "glue",
            "task": name,
            "tokenizer": {"file": tokenizer.name, "sha256": record["tokenizer"]["fingerprint"]},
            "length": min(LENGTH, length),
        },
        "data": {
            "source": "hub",
            "id": HUB_ID,
            "config": name,
            "evaluation_split": "validation_matched" if name == "mnli" else "validation",
            "limit_train": rows,
            "limit_evaluation": rows,
            # Every column is named, so that other data are an error.
            "input": columns[0] if len(columns) == 1 else list(columns),
            "label": "label",
            "label_kind": "number" if name == REGRESSION else "class",
        },
        "model": {
            "name": CLASSIFIERS.get(model["name"], model["name"]),
            "arguments": {longest: length} | arguments,
            "qk_norm": model.get("qk_norm", False),
            "encoder": "..",  # from the folder of the tokeniser,
        },
        "optimizer": {"name": "adamw", "lr": size["lr"], "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup": {"epochs": WARMUP * size["epochs"]}},
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
    folder: Path,
    *,
    tasks: Sequence[str] = NAMES,
    limit: int | None = None,
    base: Path | None = None,
    cpu: bool = False,
) -> list[Job]:
    """All fine-tuning runs of a pre-trained run, or of every finished run of a comparison.

    `base` is the folder of the recipe of pre-training, where its relative paths start; for `limit` see `glue_recipe`.

    Raises: RunError, RecipeError, DataError; before anything is trained.
    """
    runs = [folder]
    if (folder / "comparison.json").is_file():
        records = {run: RunFolder(run).read_record() or {} for run in sorted(folder.glob("*/seed*"))}
        runs = [run for run, record in records.items() if record.get("status") == "finished"]
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
        )
        for name in dict.fromkeys(tasks)
        for run, record, tokenizer in found
    ]


def run_glue(jobs: Sequence[Job], *, num_workers: int, observer: JobObserver) -> Outcome:
    """Run what is missing. Checkpoints of complete runs are removed.

    Raises: as `run_comparison`.
    """

    def observe(job: Job, event: Event) -> None:
        observer(job, event)
        is_first = os.environ.get("RANK", "0") == "0"
        if event["event"] == "end" and event["record"]["status"] in COMPLETE and is_first:
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)

    return run_comparison(jobs, num_workers=num_workers, observer=observe)

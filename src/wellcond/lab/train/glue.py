"""Fine-tuning and scoring of pre-trained runs: every task is a run of its own, in RUN/glue/TASK/seed-0."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from wellcond.files import write_atomically
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.trained import file_sha256, load_folded
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.glue import HUB_ID, NAMES, TASKS, with_marks
from wellcond.lab.tasks.masked_language_modelling import MaskedLanguageModellingSettings
from wellcond.lab.tokenizers import LibraryTokenizer, TrainedTokenizer, make_tokenizer, read_tokenizer
from wellcond.lab.train.checkpoint import read_finished_run
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison
from wellcond.lab.train.engine import Event
from wellcond.lab.train.prepare import load_cached_data, located
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunError, RunFolder, check_links, writing
from wellcond.models import build_model
from wellcond.run_records import COMPLETE
from wellcond.weights import conditioning_in, read_state_dict

AS_PUBLISHED: dict[str, Any] = {"lr": 4e-5, "batch_size": 16, "epochs": 5, "rows": None}
TINY: dict[str, Any] = {"lr": 1e-3, "batch_size": 32, "epochs": 3, "rows": 3000}
"""For models of scale tiny, which at the published rate mostly predict one class for every sentence."""
LENGTH = 128
WARMUP = 0.1
"""Share of the length."""
CLASSIFIERS = {"wellcond:crammed_bert": "wellcond:crammed_bert_classifier"}
"""Models of ours that share the encoder of one that is pre-trained; those of transformers keep their name."""


@dataclass(frozen=True)
class Pretrained:
    """A finished run. Files that it is fine-tuned from have names that tell its weights from others."""

    folder: Path
    record: dict[str, Any]
    weights: Path
    base: Path | None
    """Folder that the relative paths of its recipe start from."""

    @property
    def place(self) -> Path:
        """Where everything about GLUE is written."""
        return self.folder / "glue"

    @cached_property
    def task(self) -> MaskedLanguageModellingSettings:
        """Settings of the task."""
        return MaskedLanguageModellingSettings.model_validate(self.record["config"]["task"])

    @cached_property
    def encoder_file(self) -> str:
        """Name in `place`."""
        return f"encoder-{file_sha256(self.weights)[:16]}.safetensors"

    @property
    def tokenizer_file(self) -> str:
        """Name in `place`."""
        return self.encoder_file.replace("encoder", "tokenizer").replace("safetensors", "json")

    @cached_property
    def tokenizer(self) -> LibraryTokenizer:
        """The tokeniser of pre-training, from its file in `place`, which is made if it is missing.

        Raises: RecipeError if it does not mark sentences; RunError if it is not the one in the record of the run: the
            text that it was trained on, or its file, has changed.
        """
        path, choice = self.place / self.tokenizer_file, self.task.tokenizer
        if not path.is_file():
            text = None
            if isinstance(choice, TrainedTokenizer):
                text = load_cached_data(json.dumps(self.record["config"]["data"]), self.base).train
            made = with_marks(make_tokenizer(choice, text, "the text of pre-training", self.base))
            self._write(path, made.inner.to_str())
        found = read_tokenizer(path)
        recorded = self.record["tokenizer"]["fingerprint"]
        if recorded != found.fingerprint:
            raise RunError(
                f"{path} is not the tokeniser of pre-training: expected fingerprint {recorded}, found "
                f"{found.fingerprint}. Delete the file to have it made again, or restore what it is made from"
            )
        return found

    def _write(self, path: Path, content: str | bytes) -> None:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)

    @property
    def model(self) -> dict[str, Any]:
        """Settings of the model, what its task asked for among its arguments."""
        settings = dict(self.record["config"]["model"])
        special, size = self.tokenizer.special, self.tokenizer.vocabulary_size
        length = "length" if settings["name"].startswith("wellcond:") else "max_position_embeddings"
        needed = {"vocab_size": size + (special.mask is None), length: self.task.length, "pad_token_id": special.pad}
        return settings | {"name": located(settings["name"], self.base), "arguments": needed | settings["arguments"]}

    def write_encoder(self) -> None:
        """Write the encoder into `place`, with corrections folded into its weights.

        Raises: WeightError if the checkpoint does not fit the model that its run names.
        """
        path = self.place / self.encoder_file
        if path.is_file():
            return
        from safetensors.torch import save  # as the checkpoint itself

        with torch.random.fork_rng(devices=[]):
            model = build_model(
                self.model["name"], self.model["arguments"], auto_class="AutoModelForMaskedLM", local_code=False
            )
        state = read_state_dict(self.weights)
        load_folded(model, state, conditioning_in(state), str(self.weights))
        # Tied weights share memory, which the file format does not know.
        prefix = f"{getattr(model, 'base_model_prefix', 'encoder')}."  # what all heads of a family share
        kept = {name: value.clone() for name, value in model.state_dict().items() if name.startswith(prefix)}
        self._write(path, save(kept))


def read_pretrained(folder: Path, base: Path | None = None) -> Pretrained:
    """The run in a folder.

    Raises: RecipeError if it is no finished run of masked language modelling whose model has a classifier; RunError if
        its weights are damaged, or a link leads out of its folder, into which scores are written.
    """
    check_links(folder)
    record, weights = read_finished_run(folder, "glue", "comparison.json")
    task, model = record["config"]["task"]["name"], record["config"]["model"]["name"]
    if task != "masked_language_modelling":
        raise RecipeError(f"{folder}: GLUE starts from a run of masked_language_modelling, found one of {task}")
    if not model.startswith("hf:") and model not in CLASSIFIERS:
        raise RecipeError(f"{folder}: expected a model hf:TYPE or {', '.join(CLASSIFIERS)}, found {model}")
    return Pretrained(folder, record, weights, base)


def glue_recipe(pretrained: Pretrained, name: str, limit: int | None = None) -> Recipe:
    """Fine-tuning on a task as in Crammed BERT; models of scale tiny learn faster and from fewer rows.

    Weights, tokeniser, scale and number formats are those of pre-training. `limit` is the largest number of rows of a
    split; None: 3,000 at scale tiny, all at others; 0: all.
    """
    config, task, model = pretrained.record["config"], TASKS[name], pretrained.model
    size = TINY if config["scale"] == "tiny" else AS_PUBLISHED
    rows = size["rows"] if limit is None else limit or None
    # With the dropout that classifiers have by default, whatever pre-training did without.
    arguments = {field: value for field, value in model["arguments"].items() if "dropout" not in field}
    return Recipe.model_validate({
        "name": f"glue-{name}",
        "scale": config["scale"],
        "task": {
            "name": "glue",
            "task": name,
            "tokenizer": {"file": pretrained.tokenizer_file, "sha256": pretrained.tokenizer.fingerprint},
            "length": min(LENGTH, pretrained.task.length),
        },
        "data": {
            "source": "hub",
            "id": HUB_ID,
            "config": name,
            "evaluation_split": task.evaluation,
            "limit_train": rows,
            "limit_evaluation": rows,
            # Every column and class is named, so that other data are an error.
            "input": task.columns[0] if len(task.columns) == 1 else list(task.columns),
            "label": "label",
            "label_kind": "number" if task.classes is None else "class",
            "class_names": task.classes,
        },
        "model": {
            "name": CLASSIFIERS.get(model["name"], model["name"]),
            "arguments": arguments,
            "qk_norm": model.get("qk_norm", False),
            "encoder": pretrained.encoder_file,
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
    })


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
    limit: int | None = None,
    base: Path | None = None,
    cpu: bool = False,
) -> GluePlan:
    """All fine-tuning runs of a pre-trained run, or of every finished run of a comparison.

    `base` is the folder of the recipe of pre-training, where its relative paths start; for `limit` see `glue_recipe`.

    Raises: RunError, RecipeError, DataError, WeightError; before anything is trained.
    """
    runs, left_out = [folder], []
    if (folder / "comparison.json").is_file():
        records = {run: RunFolder(run).read_record() or {} for run in sorted(folder.glob("*/seed*"))}
        runs = [run for run, record in records.items() if record.get("status") == "finished"]
        others = (record for run, record in records.items() if record and run not in runs)
        left_out = [f"{record['method']}, seed {record['seed']}: {record['status']}" for record in others]
        if not runs:
            raise RunError(f"{folder}: expected finished runs, found {'; '.join(left_out) or 'none'}")
    found = [read_pretrained(run, base) for run in runs]
    jobs = [
        Job(
            glue_recipe(run, name, limit),
            MethodSettings(label=f"{run.record['method']} (seed {run.record['seed']}) on {name}"),
            0,
            run.place / name / "seed-0",
            base=run.place,
            cpu=cpu,
        )
        for name in dict.fromkeys(tasks)
        for run in found
    ]
    return GluePlan(tuple(found), tuple(jobs), tuple(left_out))


def run_glue(plan: GluePlan, *, num_workers: int, observer: JobObserver) -> Outcome:
    """Run what is missing. Checkpoints of complete runs are removed.

    Raises: as `run_comparison`.
    """
    waiting = {job.base for job in plan.jobs if not _is_complete(job)}
    for run in plan.runs:
        if run.place in waiting:
            run.write_encoder()
    is_first = os.environ.get("RANK", "0") == "0"

    def observe(job: Job, event: Event) -> None:
        observer(job, event)
        if event["event"] == "end" and event["record"]["status"] in COMPLETE and is_first:
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)

    outcome = run_comparison(plan.jobs, num_workers=num_workers, observer=observe)
    if is_first and all(map(_is_complete, plan.jobs)):
        for run in plan.runs:
            (run.place / run.encoder_file).unlink(missing_ok=True)
    return outcome


def _is_complete(job: Job) -> bool:
    record = RunFolder(job.folder).read_record()
    return record is not None and record["status"] in COMPLETE

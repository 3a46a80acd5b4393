"""A run of masked language modelling as the start of fine-tuning: its tokeniser and its plain encoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellcond.files import write_atomically
from wellcond.lab.models.changes import remove_norms_
from wellcond.lab.models.trained import file_sha256, load_folded
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.masked_language_modelling import MaskedLanguageModellingSettings
from wellcond.lab.tokenizers.base import LibraryTokenizer, TrainedTokenizer
from wellcond.lab.tokenizers.make import chosen_tokenizer, read_tokenizer, trained_tokenizer
from wellcond.lab.train.checkpoint import read_finished_run
from wellcond.lab.train.prepare import load_cached_data, located
from wellcond.lab.train.run_folder import RunError, check_links, writing
from wellcond.models import build_model
from wellcond.weights import conditioning_in, read_state_dict

CLASSIFIERS = {"wellcond:crammed_bert": "wellcond:crammed_bert_classifier"}
"""Models of ours that share the encoder of one that is pre-trained; those of transformers keep their name."""


@dataclass(frozen=True)
class Pretrained:
    """A finished run."""

    folder: Path
    record: dict[str, Any]
    weights: Path
    base: Path | None
    """Folder that the relative paths of its recipe start from."""

    @property
    def place(self) -> Path:
        """Where everything about GLUE is written."""
        return self.folder / "glue"

    @property
    def model(self) -> dict[str, Any]:
        """Settings of the model."""
        return dict(self.record["config"]["model"])

    @cached_property
    def task(self) -> MaskedLanguageModellingSettings:
        """Settings of the task."""
        return MaskedLanguageModellingSettings.model_validate(self.record["config"]["task"])

    @cached_property
    def encoder_file(self) -> str:
        """Name of the file of the encoder in `place`, which tells these weights from others."""
        return f"encoder-{file_sha256(self.weights)[:16]}.safetensors"

    @property
    def tokenizer_file(self) -> str:
        """Name of the file of the tokeniser, in `place`."""
        return self.encoder_file.replace("encoder", "tokenizer").replace("safetensors", "json")

    @cached_property
    def tokenizer(self) -> LibraryTokenizer:
        """The tokeniser of pre-training, from its file in `place`, which is made if it is missing.

        Raises: RunError if it has no file (bytes), or is not the one in the record of the run: the text that it was
            trained on, or its file, has changed.
        """
        path = self.place / self.tokenizer_file
        if not path.is_file():
            content = self._make_tokenizer().inner.to_str()
            with writing(path):
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, content)
        found = read_tokenizer(path)
        recorded = self.record["tokenizer"]["fingerprint"]
        if recorded != found.fingerprint:
            raise RunError(
                f"{path} is not the tokeniser of pre-training: expected fingerprint {recorded}, found "
                f"{found.fingerprint}. Delete the file to have it made again, or restore what it is made from"
            )
        return found

    def _make_tokenizer(self) -> LibraryTokenizer:
        choice = self.task.tokenizer
        if choice == "bytes":
            raise RunError(
                f"{self.folder} was pre-trained on bytes, which have no tokens [CLS] and [SEP]; GLUE needs a run with "
                "task.tokenizer: {train: wordpiece, vocabulary: 4096} or the like"
            )
        if isinstance(choice, TrainedTokenizer):
            text = load_cached_data(json.dumps(self.record["config"]["data"]), self.base).train
            return trained_tokenizer(choice, text, "the text of pre-training")
        return chosen_tokenizer(choice, self.base or Path.cwd())

    def arguments(self) -> dict[str, Any]:
        """Arguments of the model, what its task asked for among them."""
        special, size = self.tokenizer.special, self.tokenizer.vocabulary_size
        length = "length" if self.model["name"].startswith("wellcond:") else "max_position_embeddings"
        needed = {"vocab_size": size + (special.mask is None), length: self.task.length, "pad_token_id": special.pad}
        return needed | self.model["arguments"]

    def write_encoder(self) -> None:
        """Write the encoder into `place`, with corrections folded into its weights.

        Raises: WeightError if the checkpoint does not fit the model that its run names.
        """
        path = self.place / self.encoder_file
        if path.is_file():
            return
        from safetensors.torch import save  # as the checkpoint itself

        encoder = self._read_encoder()
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, save(encoder))

    def _read_encoder(self) -> dict[str, Tensor]:
        name = located(self.model["name"], self.base)
        with torch.random.fork_rng(devices=[]):
            model = build_model(name, self.arguments(), auto_class="AutoModelForMaskedLM", local_code=False)
        remove_norms_(model, self.model.get("norms", "keep"), lambda: model(input_ids=torch.zeros(1, 8).long()))
        state = read_state_dict(self.weights)
        load_folded(model, state, conditioning_in(state), str(self.weights))
        # Tied weights share memory, which the file format does not know.
        prefix = f"{getattr(model, 'base_model_prefix', 'encoder')}."  # what all heads of a family share
        return {name: value.clone() for name, value in model.state_dict().items() if name.startswith(prefix)}


def read_pretrained(folder: Path, base: Path | None = None) -> Pretrained:
    """The run in a folder.

    Raises: RecipeError if it is no finished run of masked language modelling whose model has a classifier; RunError if
        its weights are damaged, or a link leads out of its folder, into which scores are written.
    """
    check_links(folder)
    record, weights = read_finished_run(folder, "glue", "comparison.json")
    task, model = record["config"]["task"]["name"], record["config"]["model"]["name"]
    if task != MaskedLanguageModellingSettings.model_fields["name"].default:
        raise RecipeError(f"{folder}: GLUE starts from a run of masked_language_modelling, found one of {task}")
    if not model.startswith("hf:") and model not in CLASSIFIERS:
        raise RecipeError(f"{folder}: expected a model hf:TYPE or {', '.join(CLASSIFIERS)}, found {model}")
    return Pretrained(folder, record, weights, base)

"""A checkpoint that every plain model can read, and from which the conditioned one can still resume.

The usual file holds the plain model: its keys, with the effective weights W + C. What training resumes from lies beside
it in a file of its own, `RAW_FILE`: the raw W, the marker and frozen corrections, under their names in the conditioned
model. A plain model never sees that file; a conditioned one reads it where the folder of a checkpoint is known.

| file of a checkpoint | `blocks.0.qkv.weight` | marker |
|---|---|---|
| `model.safetensors` | W + C | absent |
| `wellcond_raw.safetensors` | W | present |
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.effective import corrections_of, is_conditioned
from wellcond.attention.sharding import is_sharded
from wellcond.conditioning.checkpoint import RESUMED, marker_of
from wellcond.conditioning.corrections import FrozenCorrection
from wellcond.errors import CheckpointMismatchError, WeightError
from wellcond.files import opened_atomically

RAW_FILE = "wellcond_raw.safetensors"


@torch.no_grad()
def split_state(
    model: nn.Module, state: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The plain state dict with the effective weights, and those entries of the model's own in which it differs.

    Args:
        model: a model that is conditioned, as a whole or in parts; of a plain one, the second dict is empty.
        state: its state dict, if it was gathered already.

    Example:
        >>> from wellcond import condition_
        >>> model = condition_(nn.MultiheadAttention(8, 2), "polar")
        >>> plain, raw = split_state(model)
        >>> torch.equal(raw["in_proj_weight"], model.in_proj_weight)
        True
        >>> bool(torch.linalg.cond(plain["in_proj_weight"].reshape(6, 4, 8)).max() <= 2.001)
        True
    """
    plain = dict(model.state_dict() if state is None else state)
    own: dict[str, Tensor] = {}
    for root_name, root in model.named_modules():
        marker = marker_of(root)
        if marker is None:
            continue
        prefix = f"{root_name}." if root_name else ""
        # Whoever saves may have left out what is no parameter.
        own[prefix + marker] = plain.pop(prefix + marker, root.get_buffer(marker))
        effective: dict[tuple[int, str], Tensor] = {}
        for module_name, module in root.named_modules(remove_duplicate=False):
            path = f"{module_name}." if module_name else ""
            for name, correction in corrections_of(module).items():
                if prefix + path + name not in plain:
                    continue  # a shared weight that was stored under another name
                raw = plain[prefix + path + name]
                own[prefix + path + name] = raw
                if isinstance(correction, FrozenCorrection):
                    kept = module.get_buffer(correction.buffer_name)
                    frozen = plain.pop(prefix + path + correction.buffer_name, kept)
                    own[prefix + path + correction.buffer_name] = frozen
                    effective.setdefault((id(module), name), raw + frozen)
                elif (id(module), name) not in effective:
                    effective[id(module), name] = correction.effective(module, raw)
                plain[prefix + path + name] = effective[id(module), name]
    return plain, own


def save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
) -> Any:
    """`save_pretrained` of a model of transformers: effective weights, and beside them what it takes to resume."""
    # Trainer resumes with load_state_dict, so keys must be the names in the model. By default, transformers 5 writes
    # those of older versions where they differ (ViT), and Trainer then resumes from weights that were not loaded.
    options.setdefault("save_original_format", False)
    raw: dict[str, Tensor] = {}
    if is_conditioned(model):
        state_dict, raw = split_state(model, state_dict)
    if is_main_process:
        write_raw(Path(save_directory), raw)
    return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, **options)


def write_raw(folder: Path, raw: Mapping[str, Tensor]) -> None:
    """Write what training resumes from into the folder of a checkpoint; with nothing to write, remove what is there."""
    if not raw:
        (folder / RAW_FILE).unlink(missing_ok=True)
        return
    import safetensors.torch  # which transformers needs as well

    folder.mkdir(parents=True, exist_ok=True)
    # A weight under two names is stored twice: safetensors takes no memory that is shared.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in raw.items()}
    with opened_atomically(folder / RAW_FILE) as file:
        file.write(safetensors.torch.save(tensors, {"format": "pt"}))


def read_raw(folder: str | os.PathLike[str]) -> dict[str, Tensor] | None:
    """What `write_raw` wrote into a folder; None if there is nothing.

    Raises: WeightError if the file is damaged.
    """
    path = Path(folder, RAW_FILE)
    if not path.is_file():
        return None
    import safetensors.torch

    try:
        return safetensors.torch.load_file(path)
    except Exception as error:
        raise WeightError(
            f"{path} is damaged ({error}); copy the checkpoint again. The effective weights are in another file: load "
            "them into a plain model to train on from these"
        ) from error


@contextlib.contextmanager
def resuming_from(folder: str | os.PathLike[str], model: nn.Module) -> Iterator[None]:
    """Within this context, a conditioned model that loads the checkpoint in a folder takes its raw weights.

    Raises: CheckpointMismatchError if the checkpoint is that of a conditioned model and this one is plain.
    """
    # Files of a sharded model hold raw weights and the marker.
    raw = None if is_sharded(model) else read_raw(folder)
    if raw is not None and not is_conditioned(model):
        raise CheckpointMismatchError(
            "training resumes from a checkpoint of another conditioning; nothing was loaded.\n"
            f"  expected (the checkpoint): raw weights of a conditioned model, in {Path(folder, RAW_FILE)}\n"
            "  got (this model):          a plain model\n"
            "  Condition the model as the first one was. To train a plain model from the effective weights, load them "
            "with from_pretrained and begin a new run."
        )
    token = RESUMED.set(raw)
    try:
        yield
    finally:
        RESUMED.reset(token)


_RESUMING: set[type] = set()


def resume_in_trainer() -> None:
    """Let the Trainer of transformers, where it is imported, take raw weights from beside the checkpoint that it loads.

    Trainer reads the files of a checkpoint itself and hands the model a state dict; only Trainer knows the folder.
    """
    trainers = sys.modules.get("transformers.trainer")
    if trainers is None or trainers.Trainer in _RESUMING:
        return
    load, load_best = trainers.Trainer._load_from_checkpoint, trainers.Trainer._load_best_model

    @functools.wraps(load)
    def load_from_checkpoint(trainer: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> Any:
        with resuming_from(resume_from_checkpoint, trainer.model if model is None else model):
            return load(trainer, resume_from_checkpoint, model)

    @functools.wraps(load_best)
    def load_best_model(trainer: Any) -> Any:
        with resuming_from(trainer.state.best_model_checkpoint, trainer.model):
            return load_best(trainer)

    trainers.Trainer._load_from_checkpoint = load_from_checkpoint
    trainers.Trainer._load_best_model = load_best_model
    _RESUMING.add(trainers.Trainer)

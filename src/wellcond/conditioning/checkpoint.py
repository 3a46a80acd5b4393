"""What a checkpoint of a conditioned model says, and what happens when it meets another model.

The plain keys of a training checkpoint hold the raw weights, because that is what training resumes from. Raw weights
without their correction are another model, so one more key marks them: the buffer `MARKER` of the conditioned model,
whose value is the settings as JSON. A plain model that is given such a checkpoint reports it as an unexpected key.

A checkpoint that every plain model can read (`save_pretrained`, Lightning) holds the effective weights W + C in the
usual file. What training resumes from lies beside it in `RAW_FILE`: the raw W, the marker, and what corrections keep.

| checkpoint | loaded into | result |
|---|---|---|
| raw, marked | same conditioning | resumes |
| raw, marked | other conditioning | CheckpointMismatchError, nothing loaded |
| raw, marked | plain model | torch's error names the unexpected key; `recondition_(model, state_dict)` first |
| effective, with a file of raw ones | plain model | effective weights; the file is not looked at |
| effective, with a file of raw ones | conditioned model | as raw, marked |
| plain | conditioned model | weights are taken as raw (as if loaded first, then conditioned); CheckpointWarning |
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.sharding import any_distributed, gather_model, is_sharded, to_local
from wellcond.attention.slot import corrections_of, is_conditioned, roots_in, settings_of
from wellcond.errors import CheckpointMismatchError, CheckpointWarning, WeightError, needs_extra
from wellcond.files import opened_atomically
from wellcond.private import wrap_loading_of_trainer

MARKER = "wellcond_conditioning"
"""Name of the buffer that marks raw weights."""
RAW_FILE = "wellcond_raw.safetensors"
RESUMED: ContextVar[Mapping[str, Tensor] | None] = ContextVar("RESUMED", default=None)
"""Raw weights and marker that belong to the effective weights which are being loaded."""


def read_settings(marker: Tensor) -> dict[str, Any]:
    """Settings out of a marker's value.

    Raises: WeightError if it was spoilt.
    """
    try:
        settings = json.loads(bytes(marker.detach().cpu().double().round().long().tolist()))
        kinds = {"method": str, "projections": str, "sites": list}
        if not all(isinstance(settings[key], kind) for key, kind in kinds.items()):
            raise ValueError("expected the name of a method, letters of projections and a list of attention layers")
        return settings
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise WeightError(
            "the checkpoint's wellcond marker is not readable (damaged, or averaged with other weights?); condition a "
            "model as the first one was, and load the checkpoint without its key that ends in 'wellcond_conditioning'"
        ) from error


def check_incoming(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: Any, strict: bool, *_lists: Any
) -> None:
    """Load hook of a conditioned model; runs before anything is copied.

    Raises: CheckpointMismatchError if the checkpoint was made under other settings.
    """
    ours, key = settings_of(module), prefix + MARKER
    _take_raw(module, state_dict, prefix)
    if _is_filled_in(module, state_dict, prefix):
        del state_dict[key]
    found = state_dict.get(key)
    theirs = None if found is None else read_settings(found)
    state_dict[key] = module.get_buffer(MARKER)
    if theirs is not None:
        if theirs != ours:
            where = f"nothing was loaded into {prefix}" if prefix else "nothing was loaded"
            raise CheckpointMismatchError(
                f"the checkpoint holds raw weights of another conditioning; {where}.\n"
                f"  expected (this model): {ours}\n  got (the checkpoint):  {theirs}\n"
                "  Call wellcond.fold_(model), or rebuild it, and condition it as the checkpoint says."
            )
        return
    if _fill_in_state(module, state_dict, prefix):
        warnings.warn(
            "loading a plain checkpoint into a conditioned model: its weights are taken as raw weights, to which the "
            f"correction is added ({ours}). A folded checkpoint already contains it: load that one into a plain model.",
            CheckpointWarning,
            stacklevel=2,
        )


def _corrected(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for module_name, module in model.named_modules(remove_duplicate=False):
        for weight_name, correction in corrections_of(module).items():
            yield (f"{prefix}{module_name}." if module_name else prefix), module, weight_name, correction


def _take_raw(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Put raw weights in the place of the effective ones that are loaded, where they are known.

    Raises: CheckpointMismatchError if they are not those of these effective weights.
    """
    raw, marker = RESUMED.get(), prefix + MARKER
    if raw is None or marker in state_dict:
        return
    same = marker in raw and read_settings(raw[marker]) == settings_of(model)  # else what is to be loaded is refused
    weights = {path + name: (path, correction) for path, _module, name, correction in _corrected(model, prefix)}
    for key, value in raw.items():
        if not key.startswith(prefix):
            continue
        if key in weights and key not in state_dict:
            continue  # in another file of this checkpoint
        if key in weights and same:
            path, correction = weights[key]
            kept = {name: raw[path + name] for name in correction.state_names}
            _check_belongs(key, correction.value(value, kept).detach(), state_dict[key])
        state_dict[key] = value


def _check_belongs(key: str, computed: Tensor, effective: Tensor) -> None:
    """Raise unless W + C of a raw weight is the effective one: the two files may be of different times."""
    difference = (computed - effective.to(computed)).abs().max()
    if not bool(difference <= 0.01 * computed.abs().max()):
        raise CheckpointMismatchError(
            f"{key}: the raw weights beside this checkpoint are not those of its effective weights (another model was "
            "saved into the same folder?); nothing was loaded. Load the effective weights into a plain model, or "
            "resume from another checkpoint."
        )


def _is_filled_in(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Whether the marker is the model's own while the weights are not.

    torch's distributed checkpoint fills what a checkpoint lacks with what the model has, which says nothing about the
    checkpoint.
    """
    marker = state_dict.get(prefix + MARKER)
    if marker is None or not _same_memory(marker, model.get_buffer(MARKER)):
        return False
    for path, module, name, _correction in _corrected(model, prefix):
        weight, stored = state_dict.get(path + name), module._parameters[name]
        if weight is not None and stored is not None and not _same_memory(weight, stored):
            return True
    return False


def _same_memory(first: Tensor, second: Tensor) -> bool:
    first, second = to_local(first), to_local(second)
    if first is second or first.is_meta or second.is_meta:  # meta tensors have no memory to compare
        return first is second
    return first.data_ptr() == second.data_ptr()


def _fill_in_state(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Add what corrections keep beside the weights of a plain checkpoint; True if it holds any conditioned weight."""
    touched = False
    for path, _module, name, correction in _corrected(model, prefix):
        weight = state_dict.get(path + name)
        if weight is not None:
            touched = True
            first = correction.first_state(weight)
            state_dict.update({path + kept: value.detach() for kept, value in first.items()})
    return touched


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
    for root_name, root, _ in roots_in(model):
        prefix = f"{root_name}." if root_name else ""
        # Whoever saves may have left out what is no parameter.
        own[prefix + MARKER] = plain.pop(prefix + MARKER, root.get_buffer(MARKER))
        effective: dict[tuple[int, str], Tensor] = {}
        for path, module, name, correction in _corrected(root, prefix):
            if path + name not in plain:
                continue  # a shared weight that was stored under another name
            raw = own[path + name] = plain[path + name]
            kept = {key: plain.pop(path + key, value) for key, value in correction.state_of(module).items()}
            own.update({path + key: value for key, value in kept.items()})
            if (id(module), name) not in effective:
                effective[id(module), name] = correction.apply(raw, kept)
            plain[path + name] = effective[id(module), name]
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


def resume_in_trainer() -> None:
    """Let the Trainer of transformers, where it is imported, take raw weights from beside the checkpoint that it loads.

    Trainer reads the files of a checkpoint itself and hands the model a state dict; only Trainer knows the folder.
    """
    wrap_loading_of_trainer(resuming_from)


def save_weights(model: nn.Module, path: Path, *, overwrite: bool = False) -> None:
    """Write a model as safetensors, whole or not at all: a new file is made beside it, then renamed.

    If the model is sharded, every rank must call this, and rank 0 writes.

    Raises: WeightError if the file exists and may not be replaced, is not named ``.safetensors``, or cannot be written.
    """
    if path.suffix != ".safetensors":
        raise WeightError(f"expected an output named *.safetensors, got {path}")
    if path.exists() and not overwrite:
        raise WeightError(f"{path} exists; give another name or --force")
    if not path.parent.is_dir():
        raise WeightError(f"no such folder: {path.parent}")
    gathered = gather_model(model) if any_distributed(model) else None
    if gathered == {}:
        return
    with needs_extra("safetensors", "cli"):
        import safetensors.torch
    try:
        with opened_atomically(path) as file:
            if gathered is None:
                safetensors.torch.save_model(model, file.name)
            else:
                tensors = {key: value.contiguous() for key, value in gathered.items()}
                safetensors.torch.save_file(tensors, file.name)
    except OSError as error:
        raise WeightError(f"{path} could not be written: {error.strerror or error}; give another folder") from error

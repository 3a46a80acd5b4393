"""What a checkpoint of a conditioned model says, and what happens when it meets another model.

The plain keys of a training checkpoint hold the raw weights, because that is what training resumes from. Raw weights
without their correction are another model, so one more key marks them. It is a buffer of the conditioned model whose
*name* is the line to run: a plain model that is given such a checkpoint reports the name as an unexpected key, and so
tells its user what to do. Its value is the settings as JSON.

| checkpoint | loaded into | result |
|---|---|---|
| raw, marked | same conditioning | resumes |
| raw, marked | other conditioning | CheckpointMismatchError, nothing loaded |
| raw, marked | plain model | torch's error; the unexpected key is the line to run |
| effective, with a file of raw ones | plain model | effective weights; the file is not looked at |
| effective, with a file of raw ones | conditioned model | as raw, marked (`wellcond.conditioning.effective_state`) |
| plain | conditioned model | weights are taken as raw (as if loaded first, then conditioned); CheckpointWarning |
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.effective import SETTINGS_ATTRIBUTE, corrections_of
from wellcond.attention.sharding import local_part
from wellcond.conditioning.corrections import FrozenCorrection
from wellcond.errors import CheckpointMismatchError, CheckpointWarning, WeightError

PREFIX = "wellcond: "
RESUMED: ContextVar[Mapping[str, Tensor] | None] = ContextVar("RESUMED", default=None)
"""Raw weights and marker that belong to the effective weights which are being loaded."""
ATTRIBUTE = "_wellcond_marker"


@dataclass(frozen=True)
class Marker:
    """A buffer that marks raw weights: its name, its value, and the settings that the value spells."""

    name: str
    value: Tensor
    settings: dict[str, Any]


def make_marker(call: str, settings: dict[str, Any]) -> Marker:
    """The marker for a model that was conditioned by `call`."""
    text = json.dumps(settings, sort_keys=True).encode()
    return Marker(f"{PREFIX}load this after {call}", torch.tensor(list(text), dtype=torch.uint8), settings)


def taken_marker(model: nn.Module) -> Marker:
    """The marker of a model that has one, to be given back to it later."""
    name = model.__dict__[ATTRIBUTE]
    return Marker(name, model.get_buffer(name), model.__dict__[SETTINGS_ATTRIBUTE])


def mark(model: nn.Module, marker: Marker) -> None:
    """Give a conditioned model its marker and its load hook."""
    model.register_buffer(marker.name, marker.value)
    # The buffer is for checkpoints; averages over whole state dicts (EMA) may spoil its value, so this is what counts.
    model.__dict__[ATTRIBUTE], model.__dict__[SETTINGS_ATTRIBUTE] = marker.name, marker.settings
    model.register_load_state_dict_pre_hook(check_incoming)


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    del model._buffers[model.__dict__.pop(ATTRIBUTE)]
    del model.__dict__[SETTINGS_ATTRIBUTE]
    hooks = model._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is check_incoming]:
        del hooks[key]


def marker_of(model: nn.Module) -> str | None:
    """Name of the model's marker, if it was conditioned as a whole."""
    return model.__dict__.get(ATTRIBUTE)


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """Settings of a model that was conditioned as a whole."""
    return model.__dict__.get(SETTINGS_ATTRIBUTE)


def read_settings(marker: Tensor) -> dict[str, Any]:
    """Settings out of a marker's value.

    Raises: WeightError if it was spoilt.
    """
    try:
        settings = json.loads(bytes(marker.cpu().tolist()))
        if not isinstance(settings, dict) or not {"method", "projections", "sites"} <= settings.keys():
            raise ValueError("expected method, projections and sites")
        return settings
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightError(
            "the checkpoint's wellcond marker is not readable (averaged with other weights?); condition a model as the "
            "marker's name says, then load into it"
        ) from error


def find_markers(state_dict: dict[str, Tensor], prefix: str = "") -> list[str]:
    """Keys of a state dict that mark raw weights."""
    return [key for key in state_dict if key.startswith(prefix + PREFIX)]


def check_incoming(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: Any, strict: bool, *_lists: Any
) -> None:
    """Load hook of a conditioned model; runs before anything is copied.

    Raises: CheckpointMismatchError if the checkpoint was made under other settings.
    """
    own = marker_of(module)
    assert own is not None
    own_marker = module._buffers[own]
    assert own_marker is not None
    _take_raw(module, state_dict, prefix)
    if _is_filled_in(module, state_dict, prefix, own):
        del state_dict[prefix + own]
    found = find_markers(state_dict, prefix)
    for key in found:
        ours = settings_of(module)
        try:
            theirs: dict[str, Any] | None = read_settings(state_dict[key])
        except WeightError:
            if key != prefix + own:
                raise
            theirs = ours  # the name agrees; only the value was spoilt
        state_dict.pop(key)
        state_dict[prefix + own] = own_marker
        if theirs != ours:
            where = f"nothing was loaded into {prefix}" if prefix else "nothing was loaded"
            raise CheckpointMismatchError(
                f"the checkpoint holds raw weights of another conditioning; {where}.\n"
                f"  expected (this model): {ours}\n  got (the checkpoint):  {theirs}\n"
                "  Call wellcond.fold_(model), or rebuild it, and condition it as the checkpoint says."
            )
    if found:
        return
    state_dict[prefix + own] = own_marker
    if _fill_in_frozen(module, state_dict, prefix):
        warnings.warn(
            "loading a plain checkpoint into a conditioned model: its weights are taken as raw weights, to which the "
            f"correction is added ({own.removeprefix(PREFIX)}). A folded checkpoint already contains it: "
            "load that one into a plain model.",
            CheckpointWarning,
            stacklevel=6,
        )


def _take_raw(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Put raw weights in the place of the effective ones that are loaded, where they are known.

    Raises: CheckpointMismatchError if they are not those of these effective weights.
    """
    raw = RESUMED.get()
    if raw is None or find_markers(state_dict, prefix):
        return
    same = prefix + str(marker_of(model)) in raw  # else what is to be loaded is refused
    weights = {path + name: (module, name) for path, module, name in _corrected(model, prefix)}
    for key, value in raw.items():
        if not key.startswith(prefix):
            continue
        if key in weights and key not in state_dict:
            continue  # in another file of this checkpoint
        if key in weights and same:
            _check_belongs(*weights[key], value, state_dict[key], key, raw)
        state_dict[key] = value


def _check_belongs(
    module: nn.Module, name: str, raw: Tensor, effective: Tensor, key: str, everything: Mapping[str, Tensor]
) -> None:
    """Raise unless W + C of a raw weight is the effective one: the two files may be of different times."""
    correction = corrections_of(module)[name]
    if isinstance(correction, FrozenCorrection):
        computed = raw + everything[key.removesuffix(name) + correction.buffer_name]
    else:
        computed = correction.value(module, raw)
    difference = (computed - effective.to(computed)).abs().max()
    if not bool(difference <= 0.01 * computed.abs().max()):
        raise CheckpointMismatchError(
            f"{key}: the raw weights beside this checkpoint are not those of its effective weights (another model was "
            "saved into the same folder?); nothing was loaded. Load the effective weights into a plain model, or "
            "resume from another checkpoint."
        )


def _is_filled_in(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, own: str) -> bool:
    """Whether the marker is the model's own while the weights are not.

    torch's distributed checkpoint fills what a checkpoint lacks with what the model has, which says nothing about the
    checkpoint.
    """
    marker, own_marker = state_dict.get(prefix + own), model._buffers[own]
    if marker is None or own_marker is None or not _same_memory(marker, own_marker):
        return False
    for path, module, name in _corrected(model, prefix):
        weight, stored = state_dict.get(path + name), module._parameters[name]
        if weight is not None and stored is not None and not _same_memory(weight, stored):
            return True
    return False


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first is second or local_part(first).data_ptr() == local_part(second).data_ptr()


def _corrected(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, module and name of every conditioned weight."""
    for module_name, module in model.named_modules(remove_duplicate=False):
        for weight_name in corrections_of(module):
            yield (f"{prefix}{module_name}." if module_name else prefix), module, weight_name


def _fill_in_frozen(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Add what a plain checkpoint lacks; True if it holds any conditioned weight."""
    touched = False
    for path, module, weight_name in _corrected(model, prefix):
        weight, correction = state_dict.get(path + weight_name), corrections_of(module)[weight_name]
        if weight is None:
            continue
        touched = True
        if isinstance(correction, FrozenCorrection):
            state_dict[path + correction.buffer_name] = correction.first(weight)
    return touched

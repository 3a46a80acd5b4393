"""Training state on disk: tensors as safetensors, everything else as JSON; optimiser state by parameter name.

    checkpoints/step-00000120/{model,optimizer,average,best}.safetensors  state.json

Average and best weights are there where the recipe asks for them. Best weights that are no newer than the checkpoint
before are its file once more (a hard link), not another copy.

A checkpoint is a folder that is written under another name and then renamed, so that it is whole or absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.wrappers import unwrap
from wellcond.errors import MissingExtraError
from wellcond.experiments.run_folder import RunError, writing
from wellcond.files import to_json

NAME = re.compile(r"step-(\d{8,})")
OURS = re.compile(r"step-\d{8,}|\.step-\d{8,}(\.former)?\.partial")
SEPARATOR = "//"
BEST = "best.safetensors"


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError("safetensors", "train") from error
    return safetensors.torch


def gather_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `gather_model`, for the optimiser's state by parameter name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def scatter_(model: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[dict, dict], *, broadcast: bool) -> None:
    """The reverse of gathering both; with `broadcast` only the first process needs to have the state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    scatter_model_(model, states[0], broadcast=broadcast)
    rows = states[1]["state"]
    if rows:
        # Not strict: a parameter that has had no gradient has no state. torch then makes one up, which is taken away.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
        set_optimizer_state_dict(model, optimizer, states[1], options=options)
        _drop_state_except(model, optimizer, set(rows))
    # torch turns tuples into lists, and refuses an optimiser without state (SGD without momentum).
    for group, stored in zip(optimizer.param_groups, states[1]["param_groups"], strict=True):
        group.update({key: value for key, value in stored.items() if key != "params"})


def scatter_model_(model: nn.Module, state: dict[str, Any], *, broadcast: bool) -> None:
    """The reverse of `gather_model`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, state, options=options)


def _drop_state_except(model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    named = list(unwrap(model).named_parameters(remove_duplicate=False))
    if not names <= {name for name, _ in named}:  # under a wrapper that renames: rather too much state than too little
        return
    kept = {parameter for name, parameter in named if name in names}
    for _, parameter in named:
        if parameter not in kept:
            optimizer.state.pop(parameter, None)


def save_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Any],
    state: dict[str, Any],
    average: dict[str, Tensor] | None = None,
    best: dict[str, Tensor] | Path | None = None,
) -> Path:
    """Write one checkpoint and remove the older ones.

    Args:
        folder: where checkpoints are.
        step: number of updates done.
        model: as `gather_model` gives it.
        optimizer: as `gather_optimizer` gives it.
        state: plain data.
        average: averaged weights, if there are any.
        best: weights of the best evaluation, or the file of an older checkpoint that holds them.

    Raises: RunError if it cannot be written; the older ones are then kept.
    """
    place = folder / f"step-{step:08d}"
    partial = folder / f".{place.name}.partial"
    tensors = {
        f"{name}{SEPARATOR}{key}": value for name, row in optimizer["state"].items() for key, value in row.items()
    }
    plain = {key: value for key, value in tensors.items() if not isinstance(value, Tensor)}
    files = {"model": model, "optimizer": {k: v for k, v in tensors.items() if k not in plain}}
    if average is not None:
        files["average"] = average
    try:
        with writing(place):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, values in files.items():
                _write_tensors(partial / f"{name}.safetensors", values)
            if isinstance(best, Path):
                link_or_copy(best, partial / BEST)
            elif best is not None:
                _write_tensors(partial / BEST, best)
            groups = [dict(group) for group in optimizer["param_groups"]]
            text = to_json(state | {"step": step, "optimizer": {"groups": groups, "values": plain}})
            _write_synced(partial / "state.json", text.encode("utf-8"))
            if place.exists():  # removing it would take longer than renaming it
                os.replace(place, folder / f".{place.name}.former.partial")
            os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for older in folder.iterdir():
        if older != place and OURS.fullmatch(older.name):
            shutil.rmtree(older, ignore_errors=True)
    return place


def _write_tensors(path: Path, values: dict[str, Tensor]) -> None:
    # Tied weights share storage, which safetensors refuses; each name gets a copy of its own.
    seen: set[int] = set()
    own = {}
    for name, value in values.items():
        value = value.detach().contiguous()
        storage = value.untyped_storage().data_ptr()
        own[name] = value.clone() if storage in seen else value
        seen.add(storage)
    _write_synced(path, _safetensors().save(own))


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under a second name, or a copy where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        _write_synced(target, source.read_bytes())


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; None if there is none."""
    places = list(folder.iterdir()) if folder.is_dir() else []
    found = [place for place in places if NAME.fullmatch(place.name) and place.is_dir()]
    return max(found, key=lambda place: int(place.name.removeprefix("step-")), default=None)


def read_checkpoint(place: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any], dict[str, Tensor] | None]:
    """Model, optimiser, state and average of a checkpoint.

    Raises: RunError if a file is missing or damaged.
    """
    load_file = _safetensors().load_file
    try:
        state = json.loads((place / "state.json").read_text("utf-8"))
        stored = state.pop("optimizer")
        model = load_file(place / "model.safetensors")
        tensors = load_file(place / "optimizer.safetensors")
        path = place / "average.safetensors"
        average = load_file(path) if path.exists() else None
    except Exception as error:
        raise RunError(
            f"{place} is damaged ({error}); delete it to go on from an earlier one or from the start"
        ) from error
    rows: dict[str, dict[str, Any]] = {}
    for joined, value in (tensors | stored["values"]).items():
        name, _, key = joined.rpartition(SEPARATOR)
        rows.setdefault(name, {})[key] = value
    groups = [_as_stored(group) for group in stored["groups"]]
    return model, {"state": rows, "param_groups": groups}, state, average


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of one file of a checkpoint.

    Raises: RunError if it is missing or damaged.
    """
    with _naming(path):
        tensors: dict[str, Tensor] = _safetensors().load_file(path)
        return tensors


def check_tensors(path: Path) -> None:
    """Read only the header of a file of a checkpoint.

    Raises: RunError if it is missing or cut off.
    """
    with _naming(path), _safetensors().safe_open(path, framework="pt"):
        pass


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RunError(
            f"{path} is missing or damaged ({error}); restore it, or delete the run's folder to start it anew"
        ) from error


def _as_stored(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; the betas of Adam are one."""
    return {key: tuple(value) if key == "betas" else value for key, value in group.items()}

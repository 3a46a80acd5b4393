"""Training state on disk: tensors as safetensors, everything else as JSON; optimiser state by parameter name.

    checkpoints/step-00000120/{model,optimizer,average,best}.safetensors  state.json

Average and best weights are there where the recipe asks for them. Best weights that are no newer than the checkpoint
before are its file once more (a hard link), not another copy.

A checkpoint is a folder that is written under another name and then renamed, so that it is whole or absent. Its
`state.json` has a checksum, and lists those of the other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.distributed import unwrap
from wellcond.errors import MissingExtraError
from wellcond.files import to_json
from wellcond.lab.train.run_folder import RunError, writing
from wellcond.run_records import CHECKSUM, find_change, seal

NAME = re.compile(r"step-(\d{8,})")
OURS = re.compile(r"step-\d{8,}|\.step-\d{8,}(\.former)?\.partial")
SEPARATOR = "//"
MODEL, BEST = "model.safetensors", "best.safetensors"
FILES = (MODEL, "optimizer.safetensors", "average.safetensors", BEST)


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
            sums = {
                f"{name}.safetensors": _write_tensors(partial / f"{name}.safetensors", values)
                for name, values in files.items()
            }
            if isinstance(best, Path):
                link_or_copy(best, partial / BEST)
                with _naming(best):
                    sums[BEST] = _listed_sums(best.parent).get(BEST) or _sum(best)
            elif best is not None:
                sums[BEST] = _write_tensors(partial / BEST, best)
            groups = [dict(group) for group in optimizer["param_groups"]]
            whole = state | {"step": step, "optimizer": {"groups": groups, "values": plain}, "files": sums}
            _write_synced(partial / "state.json", to_json(seal(whole)).encode("utf-8"))
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


def _write_tensors(path: Path, values: dict[str, Tensor]) -> str:
    """Write a file; returns its checksum."""
    # Tied weights share storage, which safetensors refuses; each name gets a copy of its own.
    seen: set[int] = set()
    own = {}
    for name, value in values.items():
        value = value.detach().contiguous()
        storage = value.untyped_storage().data_ptr()
        own[name] = value.clone() if storage in seen else value
        seen.add(storage)
    content = _safetensors().save(own)
    _write_synced(path, content)
    return hashlib.sha256(content).hexdigest()


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
        state = _read_state(place)
        sums = state.pop("files", None)
        present = [name for name in FILES if (place / name).exists()] if sums is None else list(sums)
        _check_files(place, sums or {})
        stored = state.pop("optimizer")
        model = load_file(place / MODEL)
        tensors = load_file(place / "optimizer.safetensors")
        average = load_file(place / "average.safetensors") if "average.safetensors" in present else None
        rows: dict[str, dict[str, Any]] = {}
        for joined, value in (tensors | stored["values"]).items():
            name, _, key = joined.rpartition(SEPARATOR)
            rows.setdefault(name, {})[key] = value
        groups = [_as_stored(group) for group in stored["groups"]]
    except Exception as error:
        raise RunError(
            f"{place} is damaged ({error}); delete it to resume from an earlier one, or to restart"
        ) from error
    return model, {"state": rows, "param_groups": groups}, state, average


def _read_state(place: Path) -> dict[str, Any]:
    """state.json.

    Raises: OSError, ValueError, KeyError if it is missing, damaged or of another step.
    """
    state: dict[str, Any] = json.loads((place / "state.json").read_text("utf-8"))
    if changed := find_change(state):
        raise ValueError(f"state.json {changed}")
    if state["step"] != int(place.name.removeprefix("step-")):
        raise ValueError(f"it is of step {state['step']}")
    state.pop(CHECKSUM, None)
    return state


def _listed_sums(place: Path) -> dict[str, str]:
    """Checksums of a checkpoint's files; none in older ones."""
    sums: dict[str, str] = _read_state(place).get("files", {}) if (place / "state.json").exists() else {}
    return sums


def _check_files(place: Path, sums: dict[str, str]) -> None:
    """Raise OSError or ValueError if a file is not what its checkpoint lists."""
    for name, expected in sums.items():
        if name not in FILES:
            raise ValueError(f"state.json lists {name!r}, which is no file of a checkpoint")
        if _sum(place / name) != expected:
            raise ValueError(f"{name} was changed after it was written: its checksum does not match")


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of one file of a checkpoint.

    Raises: RunError if it is missing or damaged.
    """
    check_tensors(path)
    with _naming(path):
        tensors: dict[str, Tensor] = _safetensors().load_file(path)
        return tensors


def check_tensors(path: Path) -> None:
    """Check a file against the checksum that its checkpoint lists, and read its header.

    Raises: RunError if it is missing or damaged.
    """
    with _naming(path):
        listed = _listed_sums(path.parent)
        _check_files(path.parent, {path.name: listed[path.name]} if path.name in listed else {})
        with _safetensors().safe_open(path, framework="pt"):
            pass


def trained_weights(place: Path, record: dict[str, Any]) -> Path:
    """The file of weights in the last checkpoint of a finished run.

    Raises: RunError if it is missing or damaged, or the checkpoint is of another run than the record.
    """
    path = place / MODEL
    check_tensors(path)
    with _naming(path):
        marks = _read_state(place).get("logs") if (place / "state.json").exists() else None
        if "logs" in record and marks is not None and marks != record["logs"]:
            raise ValueError("it is of another run than run.json")
    return path


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RunError(
            f"{path} is missing or damaged ({error}); restore it, or delete the run's folder to start it anew"
        ) from error


def _as_stored(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; the betas of Adam are one, and the coefficients of Muon."""
    return {key: tuple(value) if key in ("betas", "ns_coefficients") else value for key, value in group.items()}

"""One run, one folder: a record, three logs and checkpoints, each written atomically.

`run.json` and checkpoints are replaced in one step. Logs are append-only; a checkpoint stores their lengths and
checksums, and resuming truncates them to those, so that a run killed at any moment ends with the same files. Nothing
outside the folder is ever written or deleted, whatever links it contains.

    checkpoints/step-00000120/{model,optimizer,average,best}.safetensors  state.json       plain weights
    checkpoints/step-00000120/{model,optimizer,average,best}/shard-*.safetensors  state.json     sharded (FSDP2)

Average and best weights are there where the recipe asks for them. Of sharded weights every rank writes and reads its
own part: nothing is gathered on one host, nothing is pickled, and a run resumes on another number of ranks. A folder is
written under another name and then renamed: it is whole or absent. `state.json` lists the checksums of its files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from wellcond.attention.sharding import from_local, is_distributed, local_shard, to_local, unwrap
from wellcond.errors import FolderInUse, RecipeError, RunError
from wellcond.files import opened_atomically, to_json, write_atomically
from wellcond.lab.records import LOGS, find_change, log_mark, read_record, seal

NAME = re.compile(r"step-(\d{8,})")
OURS = re.compile(r"step-\d{8,}|\.step-\d{8,}\.partial")
SEPARATOR = "//"
Tensors = dict[str, Tensor]


class RunFolder:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logs: dict[str, tuple[int, hashlib._Hash]] = {}

    @contextlib.contextmanager
    def opened(self, patience: float = 0) -> Iterator[RunFolder]:
        """Create and lock the folder; FolderInUse if another process has it for longer than `patience`, in seconds."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            check_links(self.path)
            lock = FileLock(self.path / "lock", timeout=patience, thread_local=False)
            try:
                lock.acquire()
            except Timeout as error:
                raise FolderInUse(
                    f"{self.path}: another process is writing this run; wait for it or stop it, or give another folder"
                ) from error
        try:
            yield self
        finally:
            self._logs.clear()
            lock.release()

    def append(self, log: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add one line for each row."""
        path, content = self.path / log, "".join(to_json(row) + "\n" for row in rows).encode("utf-8")
        with writing(path):
            size, digest = self._logs.get(log) or _start_of(path, path.stat().st_size if path.exists() else 0)
            with open(path, "ab") as file:
                file.write(content)
        digest.update(content)
        self._logs[log] = size + len(content), digest

    def log_marks(self) -> dict[str, dict[str, Any]]:
        """Length and checksum of each log that was written or truncated."""
        return {name: log_mark(*state) for name, state in self._logs.items()}

    def cut_logs(self, marks: dict[str, Any]) -> None:
        """Truncate the logs to their marks at a checkpoint; none, but RunError, if one of them does not match."""
        cut = {}
        for name in LOGS:
            path, mark = self.path / name, marks.get(name, log_mark(0, hashlib.sha256()))
            cut[name] = _start_of(path, mark["bytes"])
            if log_mark(*cut[name]) != mark:
                raise RunError(
                    f"{path}: lines were lost or changed, or the checkpoint beside it is of another run. Delete "
                    f"{self.path / 'checkpoints'} to restart the run"
                )
        # The record has the new marks first: after a kill in between, the logs are longer than their marks.
        self._logs, record = cut, self.read_record()
        if record is not None and "logs" in record:
            self.write_record(record | {"logs": self.log_marks()})
        for name, (size, _) in cut.items():
            with writing(self.path / name), open(self.path / name, "ab") as file:
                file.truncate(size)

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        write_sealed(self.path / "run.json", record)

    def read_record(self) -> dict[str, Any] | None:
        """run.json; None if there is none, RunError if it is not a record, was changed, or has impossible scores."""
        path = self.path / "run.json"
        advice = f"Restore it, or delete {self.path} to restart this run"
        return read_sealed(path, "wellcond-run", advice) if path.exists() else None


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """Replace a record in its folder, with a checksum."""
    with writing(path):
        write_atomically(path, to_json(seal(record), indent=1) + "\n")


def read_sealed(path: Path, kind: str, advice: str, needed: Iterable[str] = ()) -> dict[str, Any]:
    """A record of a kind with the fields needed; RunError with the advice if it is anything else, or was changed."""
    try:
        record = read_record(path, kind)
        if missing := ", ".join(sorted(set(needed) - set(record))):
            raise ValueError(f"{missing} missing")
        return record
    except ValueError as error:
        raise RunError(f"{path}: {error}\n  {advice}") from error


def check_links(folder: Path) -> None:
    """Raise RunError if a link in a run folder points outside it, where other files could be overwritten."""
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise RunError(f"{path} is a link to {os.readlink(path)}, outside the run's folder; remove the link")


def _start_of(path: Path, size: int) -> tuple[int, hashlib._Hash]:
    """Length and checksum of the first bytes of a file, which may be missing if there are none."""
    with open(path, "rb") if size and path.exists() else io.BytesIO() as file:
        content = file.read(size)
    return len(content), hashlib.sha256(content)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of writing a file into a RunError with its path and what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}. Make room or give another folder, then run the "
            "same command: it resumes from the last checkpoint"
        ) from error


# Checkpoints: weights and the state of the optimiser by the names of parameters.


def model_tensors(model: nn.Module) -> Tensors:
    """State of a model by plain names; every rank has its shards of what is sharded."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model)  # type: ignore[return-value]


def load_model_(model: nn.Module, tensors: dict[str, Any]) -> None:
    """The reverse of `model_tensors`."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, tensors)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """State of an optimiser, such as ``blocks.0.attn.qkv.weight//exp_avg``."""
    return {
        f"{name}{SEPARATOR}{key}": value
        for name, parameter in unwrap(model).named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path, groups: list[Any]) -> None:
    """Give an optimiser the state in a checkpoint, and the options of its groups."""
    named = dict(unwrap(model).named_parameters())
    fused = {id(weight) for group in optimizer.param_groups if group.get("fused") for weight in group["params"]}

    def parameter_of(joined: str) -> Tensor | None:  # torch keeps counts of steps on the CPU, unless a step is fused
        name, _, key = joined.rpartition(SEPARATOR)
        return None if key == "step" and id(named[name]) not in fused else named[name]

    optimizer.state.clear()
    for joined, value in read_tensors(place, "optimizer", parameter_of).items():
        name, _, key = joined.rpartition(SEPARATOR)
        optimizer.state[named[name]][key] = value
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        # JSON has no tuples; the betas of Adam are one, and the coefficients of Muon.
        group.update({k: tuple(v) if k in ("betas", "ns_coefficients") else v for k, v in stored.items()})


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Options of an optimiser's groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensors | None], state: dict[str, Any], *, sharded: bool = False
) -> Path:
    """Write tensors, by kind, and plain data after `step` updates; then remove older checkpoints.

    If tensors are `sharded`, every rank has its own part and must call it.
    """
    place = folder / f"step-{step:08d}"
    partial = folder / f".{place.name}.partial"
    is_main = not sharded or _rank() == 0
    sums: dict[str, str] = {}
    try:
        with writing(place):
            if is_main:
                folder.mkdir(exist_ok=True)  # but not the run's own: it may have been deleted
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
            if sharded:
                _gather(None)  # the folder is there before another rank writes into it
            for kind, values in tensors.items():
                if values is not None and sharded:
                    sums |= _write_shards(partial / kind, values)
                elif values is not None:
                    sums[f"{kind}.safetensors"] = _write_whole(partial / f"{kind}.safetensors", values)
            if is_main:
                write_atomically(partial / "state.json", to_json(seal(state | {"step": step, "files": sums})))
                os.replace(partial, place)
    except BaseException:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for older in folder.iterdir() if is_main else ():
        if older != place and OURS.fullmatch(older.name):
            shutil.rmtree(older, ignore_errors=True)
    return place


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _gather(mine: Any) -> list[Any]:
    """The objects of all ranks; every rank must call it."""
    if not torch.distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def _untied(values: Tensors) -> Tensors:
    """Tied weights share storage, which safetensors refuses; each name gets a copy of its own."""
    seen: set[int] = set()
    own = {}
    for name, value in values.items():
        value = value.detach().contiguous()
        storage = to_local(value).untyped_storage().data_ptr()
        own[name] = value.clone() if storage in seen else value
        seen.add(storage)
    return own


def _write_whole(file: Path, values: Tensors) -> str:
    """Write tensors from where they are, without a copy of all of them in memory; returns the checksum."""
    with opened_atomically(file) as opened:
        try:
            safetensors.torch.save_file(_untied(values), opened.name)
        except safetensors.SafetensorError as error:  # such as a full disk
            raise OSError(errno.EIO, str(error), str(file)) from error
    return _sum(file)


def _write_shards(folder: Path, values: Tensors) -> dict[str, str]:
    """Let every rank write its part; returns all checksums by name."""
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.9 itself uses storages that it calls deprecated
            save(_untied(values), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # the same on every rank
        raise next(iter(error.failures.values()))[0] from error
    mine = folder / f"shard-{_rank() + 1:05d}-model-00001-of-00001.safetensors"
    found = _gather({f"{folder.name}/{mine.name}": _sum(mine)} if mine.exists() else {})
    return {name: value for sums in found for name, value in sums.items()}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; None if there is none."""
    places = list(folder.iterdir()) if folder.is_dir() else []
    found = [place for place in places if NAME.fullmatch(place.name) and place.is_dir()]
    return max(found, key=lambda place: int(place.name.removeprefix("step-")), default=None)


def read_checkpoint(place: Path) -> dict[str, Any]:
    """The plain data of a checkpoint, all of whose files are checked (RunError); every rank must call it."""
    state, problem = {}, ""
    try:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        state = _read_state(place, share=slice(_rank(), None, ranks))  # each file is read by one rank
    except Exception as error:
        problem = str(error) or type(error).__name__
    with _damage(place):
        if problems := list(filter(None, _gather(problem))):
            raise ValueError(problems[0])
    return state


def _read_state(place: Path, kind: str = "", share: slice = slice(None)) -> dict[str, Any]:
    """state.json; raises an error if it, or a file of this kind and share, is missing, damaged or of another step."""
    state: dict[str, Any] = json.loads((place / "state.json").read_text("utf-8"))
    if changed := find_change(state):
        raise ValueError(f"state.json {changed}")
    if state["step"] != int(place.name.removeprefix("step-")):
        raise ValueError(f"it is of step {state['step']}")
    for name in [name for name in state["files"] if name.startswith(kind)][share]:
        if _sum(place / name) != state["files"][name]:
            raise ValueError(f"{name} was changed after it was written: its checksum does not match")
    return state


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(place: Path, kind: str, placed: Callable[[str], Tensor | None] = lambda name: None) -> Tensors:
    """All tensors of one kind, each on the device and sharded like what `placed` gives for its name and shape."""
    with _damage(place):
        if not (place / kind).is_dir():
            whole = safetensors.torch.load_file(place / f"{kind}.safetensors")
            return {name: _place_like(value, placed(name)) for name, value in whole.items()}
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load

        reader = HuggingFaceStorageReader(str(place / kind))
        stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        found = {}
        for name, about in stored.items():
            empty = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
            found[name] = _place_like(empty, placed(name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # each rank reads for itself, as is meant
            load(found, storage_reader=reader, no_dist=True)
        return found


def _place_like(value: Tensor, other: Tensor | None) -> Tensor:
    """A tensor on the device of another one, and sharded like that if of its shape; uninitialised if it is on meta."""
    if other is None or other.shape != value.shape:
        other = torch.empty(0, device="cpu" if other is None else other.device)
    part = local_shard(other).of(value) if is_distributed(other) else value
    part = torch.empty_like(part, device=other.device) if value.is_meta else part.to(other.device, copy=True)
    return from_local(other, part) if is_distributed(other) else part


@contextlib.contextmanager
def _damage(place: Path) -> Iterator[None]:
    """Say which checkpoint cannot be read, and what to do."""
    try:
        yield
    except Exception as error:
        raise RunError(
            f"{place} is damaged ({error}); delete it to resume from an earlier one, or to restart"
        ) from error


def read_finished_run(path: Path, field: str, instead: str) -> tuple[dict[str, Any], Path]:
    """Record and file of weights of the run in a folder; a `field` of the recipe names it, or something `instead`.

    The file of a sharded run is made from its shards.
    """
    record = RunFolder(path).read_record()
    if record is None:
        raise RecipeError(f"{field}: no run in {path}: expected run.json there, or {instead}")
    place = last_checkpoint(path / "checkpoints")
    if record["status"] != "finished" or place is None:
        found = "has no checkpoint" if place is None else f"is not finished but {record['status']}"
        raise RecipeError(f"{field}: the run in {path} {found}")
    weights = place / "model.safetensors"
    with _damage(place):
        marks = _read_state(place, "model")["logs"]
        if marks != record.get("logs", marks):
            raise ValueError("it is of another run than run.json")
        if not weights.exists():
            write_atomically(weights, safetensors.torch.save(read_tensors(place, "model")))
    return record, weights

"""What a measurement is asked for (settings), what it is of (model, input, version), and the file that resumes it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_choice, check_flag, check_int
from wellcond.attention.sharding import unwrap
from wellcond.errors import ReportError
from wellcond.files import read_regular, to_json, write_atomically
from wellcond.jacobian.problem import METHODS
from wellcond.jacobian.records import Convention
from wellcond.linalg.records import restore
from wellcond.measurement.records import Combine, Grouped, HeadReport, Kappa
from wellcond.version import __version__

SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """What `measure` computes of every head; each field is also a keyword of `measure`.

    Attributes:
        convention: ``wide``, the Jacobian, or ``stack``, the papers' matrix.
        kappa: which condition number `samples` and means are about.
        samples: how many samples (or windows) of the batch to measure.
        combine: ``mean`` measures them one by one; ``stack`` as one Jacobian, since they share the weights.
        grouped: query heads that share keys and values: ``joint``, one Jacobian of all of them, or ``each`` by itself,
            which is smaller.
        jacobian: False measures weights and attention maps only, which takes milliseconds.
        method: of `jacobian_spectrum`.
        biases: biases count as parameters.
        output: also measure each layer's output through W_O, with respect to all its Q, K, V together.
        memory_limit: bytes that may be used.

    Raises: UnknownChoiceError, TypeError, ValueError: values that do not exist or exclude each other.

    Example:
        >>> MeasureSettings(samples=4, kappa="pseudo").combine
        'mean'
    """

    convention: Convention = "wide"
    kappa: Kappa = "strict"
    samples: int = 1
    combine: Combine = "mean"
    grouped: Grouped = "joint"
    jacobian: bool = True
    method: str = "auto"
    biases: bool = False
    output: bool = False
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_choice("convention", self.convention, get_args(Convention))
        check_choice("kappa", self.kappa, get_args(Kappa))
        check_choice("combine", self.combine, get_args(Combine))
        check_choice("grouped", self.grouped, get_args(Grouped))
        check_choice("Jacobian method", self.method, ("auto", *METHODS))
        check_int("samples", self.samples, at_least=1)
        for name in ("jacobian", "biases", "output"):
            check_flag(name, getattr(self, name))
        if self.memory_limit is not None:
            check_int("memory_limit", self.memory_limit, at_least=1)
        if self.convention == "stack" and self.biases:
            raise ValueError(
                "biases=True: the stacked convention is defined without biases; leave them out, or use "
                "convention='wide'"
            )
        if self.output and not self.jacobian:
            raise ValueError("output=True is about the Jacobian, and jacobian=False leaves it out")


class MeasureOptions(TypedDict, total=False):
    """The fields of `MeasureSettings` as keywords."""

    convention: Convention
    kappa: Kappa
    samples: int
    combine: Combine
    grouped: Grouped
    jacobian: bool
    method: str
    biases: bool
    output: bool
    memory_limit: int | None


def run_facts(model: nn.Module, batch: Any) -> dict[str, str]:
    """Model, input and version, in words."""
    return {"model": describe_model(model), "input": describe_input(batch), "version": __version__}


def describe_model(model: nn.Module) -> str:
    """Its class, the name under which its library knows it, and its size; parameters that are tied count once.

    Example:
        >>> describe_model(nn.Linear(3, 2))
        'Linear, 8 parameters'
    """
    plain = unwrap(model)
    name = _library_name(plain)
    size = sum(parameter.numel() for parameter in plain.parameters())
    return f"{type(plain).__name__}{f' ({name})' if name else ''}, {size:,} parameters"


def _library_name(model: nn.Module) -> str:
    cfg: Any = getattr(model, "pretrained_cfg", None)  # timm
    config: Any = getattr(model, "config", None)  # transformers
    named = cfg.get("architecture") if isinstance(cfg, Mapping) else None
    for found in (named, getattr(config, "_name_or_path", None), getattr(config, "model_type", None)):
        if isinstance(found, str) and found:
            return found
    return ""


def describe_input(batch: Any) -> str:
    """Types and shapes of its tensors, and a digest by which the same input is recognised.

    Example:
        >>> describe_input({"input_ids": torch.arange(6).view(1, 6)})
        'input_ids int64 (1, 6), sha256 f4609d52'
    """
    if batch is None:
        return "not given"
    found = list(named_tensors(batch))
    if not found:
        return type(batch).__name__
    shapes = [f"{name} {_kind(tensor)}".strip() for name, tensor in found]
    known = all(has_bytes(tensor) for _, tensor in found)
    return ", ".join(shapes) + (f", sha256 {digest([tensor for _, tensor in found])}" if known else "")


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a batch, or of a state dict, under their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from named_tensors(inner, name)
    elif hasattr(value, "args") and hasattr(value, "kwargs"):
        yield from named_tensors((value.args, value.kwargs), name)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def has_bytes(tensor: Tensor) -> bool:
    """Whether there is an array behind it: not of a sharded, quantised or meta tensor."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized


def digest(tensors: list[Tensor]) -> str:
    """Eight hexadecimal digits by which the same types, shapes and bytes are recognised."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(_kind(tensor).encode())
        flat = tensor.detach().cpu().reshape(-1)
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
        found.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:8]


@dataclasses.dataclass(frozen=True, eq=False)
class MeasurementLog:
    """A file of JSON lines: what is measured, then one line for each head that was measured.

    A last line that was being written when the process died is dropped.
    """

    path: Path
    found: dict[str, HeadReport]
    """The heads that were measured before."""

    @classmethod
    def open(cls, path: str | Path, model: nn.Module, batch: Any, task: MeasureSettings) -> MeasurementLog:
        """A new file, or the one of an earlier call of the same measurement.

        Raises: ReportError for a file of another model, input or settings, or that is no such file.
        """
        path = Path(path)
        tensors = [tensor for _, tensor in named_tensors((model.state_dict(), batch)) if has_bytes(tensor)]
        settings = hashlib.sha256(repr(task).encode()).hexdigest()[:8]
        first = to_json({"schema": SCHEMA, "measurement": f"{digest(tensors)} {settings}"})
        try:
            lines = read_regular(path).decode("utf-8", "replace").splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            if not lines:
                write_atomically(path, first + "\n")
            elif not whole or whole[0].strip() != first:
                raise ReportError(
                    f"{path}: expected what an earlier call of this measurement wrote, found a file of another model, "
                    "input or settings; name another file, or delete it"
                )
            elif len(whole) < len(lines):
                write_atomically(path, "".join(whole))
        except OSError as error:
            raise ReportError(f"{path} cannot be used to resume a measurement: {error}") from error
        return cls(path, dict(_read_line(path, line) for line in whole[1:]))

    def add(self, name: str, report: HeadReport) -> None:
        """Append a head that was measured now.

        Raises: ReportError if the file cannot be written.
        """
        line = to_json({"head": name, "report": dataclasses.asdict(report)}, compact=True) + "\n"
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ReportError(f"{self.path}: {name} was measured but cannot be noted: {error}") from error


def _read_line(path: Path, line: str) -> tuple[str, HeadReport]:
    try:
        data = json.loads(line)
        return data["head"], restore(HeadReport, data["report"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReportError(f"{path}: expected a head's report, found {line[:80]!r}; delete the file") from error

"""The file that resumes a measurement."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.attention.evaluation import digest, has_bytes, named_tensors
from wellcond.errors import ReportError
from wellcond.files import read_regular, restore, to_json, write_atomically
from wellcond.measurement.records import SCHEMA, HeadReport, MeasureSettings


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

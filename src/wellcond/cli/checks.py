"""What every command checks before torch is loaded: names, numbers and files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from wellcond.errors import WeightError, WellcondError


class OutputError(WellcondError, ValueError):
    """A file that may not or cannot be written."""


def check_outputs(paths: Sequence[Path], *, force: bool, suffix: str = "") -> None:
    """Raise OutputError unless every file may be written."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise OutputError(f"expected different files for JSON and HTML, found {paths[0]} for both")
    for path in paths:
        if path.suffix != (suffix or path.suffix):
            raise OutputError(f"expected an output named *{suffix}, got {path}")
        if path.is_dir():
            raise OutputError(f"expected a file to write, found the folder {path}")
        if path.exists() and not force:
            raise OutputError(f"{path} exists; give another name or --force")
        if not path.parent.is_dir():
            raise OutputError(f"no such folder: {path.parent}")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}; give another folder") from error


def check_weights(*paths: Path | None) -> None:
    """Raise WeightError unless every file that is given is there."""
    for path in paths:
        if path is not None and not path.is_file():
            raise WeightError(f"no such weights file: {path}")


def describe_spec(model: str, arguments: Sequence[str], weights: Path | None, seed: int) -> str:
    """Which model a command is about: its name, arguments, and weights, or the seed of random ones.

    Example:
        >>> describe_spec("timm:vit_tiny_patch16_224", ["depth=1"], None, 0)
        'timm:vit_tiny_patch16_224 depth=1, seed 0'
    """
    source = f"seed {seed}" if weights is None else f"weights {weights.name}"
    return f"{' '.join([model, *arguments])}, {source}"

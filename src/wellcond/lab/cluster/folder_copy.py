"""A run's folder on the way between machines without a common file system: piece by piece, and put in place whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from wellcond.lab.train.checkpoint import OURS, link_or_copy
from wellcond.lab.train.run_folder import RunError, writing

CHUNK = 8 * 2**20
INCOMING = ".incoming.partial"


def safe_path(folder: Path, name: str) -> Path:
    """The file of a folder with a relative name.

    Raises: RunError if the name leads out of the folder.

    Example:
        >>> safe_path(Path("/runs/a"), "checkpoints/step-00000001/state.json").as_posix()
        '/runs/a/checkpoints/step-00000001/state.json'
    """
    parts = name.split("/")
    path = folder.joinpath(*parts)
    if {"", ".", ".."} & set(parts) or "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise RunError(f"a worker named a file {name!r} that is not inside the run's folder {folder}; nothing written")
    return path


def list_files(folder: Path) -> dict[str, int]:
    """Relative names and sizes of what is to be copied: whole files, no links."""
    sizes = {}
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not name.endswith(".partial"))
        for name in sorted(names):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if relative != "lock" and not name.endswith(".partial") and not path.is_symlink() and path.is_file():
                sizes[relative] = path.stat().st_size
    return sizes


def take_snapshot(folder: Path, place: Path) -> dict[str, int]:
    """Keep the files of a run as they are now, while the run goes on; returns names and sizes.

    Links do, not copies: files of a run are replaced or only grow, and are read up to the size noted here.
    """
    shutil.rmtree(place, ignore_errors=True)
    sizes = list_files(folder)
    for name in sizes:
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(folder / name, target)
    return sizes


def read_chunk(path: Path, offset: int, end: int) -> bytes:
    """A piece of a file, up to a limit."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(min(CHUNK, end - offset))


def write_chunk(folder: Path, name: str, offset: int, chunk: bytes) -> None:
    """Put a piece of a file where it belongs.

    Raises: RunError if the name leads out of the folder.
    """
    path = safe_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(chunk)


def chunks_of(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """All pieces of a folder: name, offset, content; an empty file is one empty piece."""
    for name, size in list_files(folder).items():
        for offset in range(0, max(size, 1), CHUNK):
            yield name, offset, read_chunk(folder / name, offset, size)


class Incoming:
    """A folder that arrives in pieces; ask for `wanted` and give what came to `take` until nothing is wanted."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        """Pieces are gathered beside the run's files.

        Raises: RunError if a name leads out of the folder.
        """
        self.folder, self.sizes = folder, sizes
        self.partial = folder / INCOMING
        for name in sizes:
            safe_path(folder, name)
        with writing(folder):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        self._left = [(name, offset) for name, size in sizes.items() for offset in range(0, max(size, 1), CHUNK)]

    @property
    def wanted(self) -> tuple[str, int, int] | None:
        """Name, offset and size of the file of which a piece is missing; None at the end."""
        if not self._left:
            return None
        name, offset = self._left[0]
        return name, offset, self.sizes[name]

    def take(self, chunk: bytes) -> None:
        """The piece that was wanted.

        Raises: RunError if it is not whole, or cannot be written.
        """
        name, offset = self._left.pop(0)
        expected = min(CHUNK, self.sizes[name] - offset)
        if len(chunk) != expected:
            raise RunError(f"{name}: expected {expected} bytes at {offset} from the worker, found {len(chunk)}")
        with writing(self.folder / name):
            write_chunk(self.partial, name, offset, chunk)

    def put_in_place(self) -> None:
        """Replace the run's files: at every moment the folder can be resumed from.

        Logs go first, since a checkpoint needs logs that are at least as long as when it was made; the record goes
        last, since it says what is complete.
        """
        logs = [name for name in self.sizes if name != "run.json" and not name.startswith("checkpoints/")]
        with writing(self.folder):
            for name in logs:
                self._move(name)
            self._move_checkpoints()
            if "run.json" in self.sizes:
                self._move("run.json")
            shutil.rmtree(self.partial, ignore_errors=True)

    def _move(self, name: str) -> None:
        target = safe_path(self.folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial / name, target)

    def _move_checkpoints(self) -> None:
        theirs, ours = self.partial / "checkpoints", self.folder / "checkpoints"
        if not theirs.is_dir():
            return
        ours.mkdir(exist_ok=True)
        arrived = {place.name for place in theirs.iterdir()}
        for name in arrived:
            if not (ours / name).exists():  # a checkpoint of the same step is whole, and the same
                os.replace(theirs / name, ours / name)
        for place in list(ours.iterdir()):
            if place.name not in arrived and OURS.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)

"""What a command that trains leaves behind when a mistake ends it before training: nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from wellcond.cli.runs import is_first_process
from wellcond.errors import WellcondError
from wellcond.files import write_atomically
from wellcond.lab.train.run_folder import FolderInUse, RunFolder

LISTS = ("comparison.json", "tuning.json")
"""Files of a comparison that list its runs."""


@contextlib.contextmanager
def removing_untrained(folder: Path) -> Iterator[None]:
    """Where an error ends the block, remove the runs and folders made in it in which nothing was trained."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    former = set(_runs(folder))
    lists = {path: path.read_text("utf-8") if path.exists() else None for path in (folder / name for name in LISTS)}
    try:
        yield
    except WellcondError:
        if is_first_process():
            kept = [run for run in _runs(folder) if run not in former and not _remove_untrained(run, folder)]
            for path, text in lists.items() if not kept else ():
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    write_atomically(path, text)
            for place in missing:
                _remove_if_empty(place)
        raise


def _runs(folder: Path) -> list[Path]:
    return [lock.parent for lock in folder.rglob("lock")]


def _remove_untrained(run: Path, folder: Path) -> bool:
    """Remove a run without logs and checkpoints that no process holds, and the folders around it that it empties."""
    with contextlib.suppress(FolderInUse), RunFolder(run).opened():
        if all(path.name in ("lock", "run.json") or not path.stat().st_size for path in run.rglob("*")):
            shutil.rmtree(run)
    if run.exists():
        return False
    for place in run.parents:
        if place == folder or not place.is_relative_to(folder):
            break
        _remove_if_empty(place)
    return True


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()

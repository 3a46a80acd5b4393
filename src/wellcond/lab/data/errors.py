"""The error of every data source."""

from __future__ import annotations

from wellcond.errors import WellcondError


class DataError(WellcondError, ValueError):
    """Data that cannot be used as asked: which file and row, what was expected, what was found, what to do."""

    def __init__(self, problem: str, *, expected: str, found: str, todo: str) -> None:
        """Put the four parts on four lines."""
        self.problem = problem
        super().__init__(f"{problem}\n  expected: {expected}\n  found:    {found}\n  {todo}")


def listed(names: object, *, most: int = 12) -> str:
    """Names joined by commas, cut after `most` of them."""
    items = [str(name) for name in names]  # type: ignore[attr-defined]
    if not items:
        return "none"
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def files_or_folders(paths: object) -> str:
    """Sorted names of the entries of a folder, hidden ones left out."""
    return listed(sorted(path.name for path in paths if not path.name.startswith(".")))  # type: ignore[attr-defined]

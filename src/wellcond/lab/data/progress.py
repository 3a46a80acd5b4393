"""Who is told how far the loading of data is; sources tell, `load_data` and whoever calls it say who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and how much there is."""

_LISTENER: ContextVar[Progress | None] = ContextVar("listener", default=None)


@contextmanager
def telling(progress: Progress | None) -> Iterator[None]:
    """Within the block `tell` calls `progress`; None leaves it to the one who listens already."""
    if progress is None:
        yield
        return
    token = _LISTENER.set(progress)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(what: str, done: int, total: int) -> None:
    """Say how far something is, if anybody listens.

    Example:
        >>> with telling(lambda what, done, total: print(f"{what} {done}/{total}")):
        ...     tell("reading", 1, 2)
        reading 1/2
    """
    listener = _LISTENER.get()
    if listener is not None:
        listener(what, done, total)

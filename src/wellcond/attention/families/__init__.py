"""Attention classes of libraries, one file per library, named after it.

Each file has a `TABLE` from dotted class names to functions that describe such a module. None imports its library, and
each is imported when the first class of its library is looked up.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache

from wellcond.attention.site import AttentionSite, ModuleContext

Adapter = Callable[[ModuleContext], AttentionSite | None]
LIBRARIES = frozenset(file.name for file in pkgutil.iter_modules(__path__))


@cache
def table_of(library: str) -> Mapping[str, Adapter]:
    """The attention classes of a library by dotted name; empty for one that has no file here.

    Example:
        >>> list(table_of("torch"))
        ['torch.nn.modules.activation.MultiheadAttention']
    """
    if library not in LIBRARIES:
        return {}
    return getattr(importlib.import_module(f"{__name__}.{library}"), "TABLE", {})


def known_classes() -> list[str]:
    """Dotted names of all classes in all tables."""
    return [name for library in sorted(LIBRARIES) for name in table_of(library)]

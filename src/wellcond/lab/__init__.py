"""The laboratory: everything that needs data or an optimiser. The core never imports it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellcond.lab.models import build_architecture
from wellcond.lab.models.build import BUILDERS

if TYPE_CHECKING:
    from wellcond.lab.comparison import Result, compare

BUILDERS["wellcond"] = build_architecture

__all__ = ["Result", "compare"]


def __getattr__(name: str) -> Any:
    """Import what trains when it is first asked for."""
    if name in __all__:
        return getattr(importlib.import_module("wellcond.lab.comparison"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

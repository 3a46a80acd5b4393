"""The laboratory: everything that needs data or an optimiser. The core never imports it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellcond.lab.models import build_architecture
from wellcond.lab.models.build import BUILDERS

if TYPE_CHECKING:
    from wellcond.lab.comparison import Result, compare
    from wellcond.lab.trial import Answer, try_

BUILDERS["wellcond"] = build_architecture

__all__ = ["Answer", "Result", "compare", "try_"]
_HOMES = {"Answer": "trial", "Result": "comparison", "compare": "comparison", "try_": "trial"}


def __getattr__(name: str) -> Any:
    """Import what trains when it is first asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"wellcond.lab.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

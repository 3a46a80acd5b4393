"""The laboratory: everything that needs data or an optimiser. The core never imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wellcond.models import BUILDERS

if TYPE_CHECKING:
    from torch import nn


def _build_architecture(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The model ``wellcond:name``."""
    from wellcond.lab.models import build_architecture

    return build_architecture(name, arguments)


BUILDERS["wellcond"] = _build_architecture

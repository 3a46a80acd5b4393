"""The laboratory: everything that needs data or an optimiser. The core never imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wellcond.errors import MissingExtraError
from wellcond.models import BUILDERS, ModelSpecError

if TYPE_CHECKING:
    from torch import nn


def _build_architecture(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The model ``wellcond:name``."""
    try:
        import pydantic
    except ImportError as error:
        raise MissingExtraError("pydantic", "train") from error
    from wellcond.lab.models import build_architecture
    from wellcond.lab.settings import list_problems

    try:
        return build_architecture(name, arguments)
    except pydantic.ValidationError as error:
        raise ModelSpecError(f"wellcond:{name} cannot be built:\n" + "\n".join(list_problems(error))) from error


BUILDERS["wellcond"] = _build_architecture

"""Models that no library has in the form an experiment needs: `wellcond:NAME`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellcond.arguments import check_choice
from wellcond.errors import MissingExtraError, ModelSpecError, needs_extra

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {
    "crammed_bert": ("crammed_bert", "CrammedBertForMaskedLM", "CrammedBertOptions", "train"),
    "crammed_bert_classifier": ("crammed_bert", "CrammedBertClassifier", "CrammedBertClassifierOptions", "train"),
    "long_range": ("long_range", "LongRangeClassifier", "LongRangeOptions", "text"),
    "nanogpt": ("nanogpt", "NanoGPT", "NanoGPTOptions", "train"),
    "mask_rcnn": ("mask_rcnn", "Detector", "MaskRcnnOptions", "detection"),
}
"""Module, class, its options (what a recipe writes under `model.arguments`), and the extra it needs."""


def build_architecture(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build the model `wellcond:name`; ModelSpecError if an option is wrong."""
    check_choice("architecture", name, sorted(ARCHITECTURES))
    file, *classes, extra = ARCHITECTURES[name]
    with needs_extra("pydantic", "train"):
        import pydantic
    try:
        module = importlib.import_module(f"wellcond.lab.models.{file}")
    except ImportError as error:
        raise MissingExtraError(error.name or file, extra) from error
    from wellcond.lab.settings import list_problems

    model, options = (getattr(module, name) for name in classes)
    try:
        return model(options.model_validate(arguments))
    except pydantic.ValidationError as error:
        raise ModelSpecError("\n  ".join([f"wellcond:{name} cannot be built:", *list_problems(error)])) from error

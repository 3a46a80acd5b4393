"""Models that no library has in the form an experiment needs: `wellcond:NAME`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellcond.errors import MissingExtraError, check_choice, needs_extra
from wellcond.models import ModelSpecError

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {
    "crammed_bert": ("crammed_bert", "CrammedBertForMaskedLM", "train"),
    "crammed_bert_classifier": ("crammed_bert", "CrammedBertForSequenceClassification", "train"),
    "long_range": ("long_range", "LongRangeClassifier", "text"),
    "mask_rcnn": ("mask_rcnn", "Detector", "detection"),
}
"""Module, class and the extra it needs; what a recipe writes under `model.arguments` is the class's `options_class`."""


def build_architecture(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build the model `wellcond:name`; ModelSpecError if an option is wrong."""
    check_choice("architecture", name, sorted(ARCHITECTURES))
    module, class_name, extra = ARCHITECTURES[name]
    with needs_extra("pydantic", "train"):
        import pydantic
    try:
        model = getattr(importlib.import_module(f"wellcond.lab.models.{module}"), class_name)
    except ImportError as error:
        raise MissingExtraError(error.name or module, extra) from error
    from wellcond.lab.settings import list_problems

    try:
        return model(model.options_class.model_validate(arguments))
    except pydantic.ValidationError as error:
        raise ModelSpecError("\n  ".join([f"wellcond:{name} cannot be built:", *list_problems(error)])) from error

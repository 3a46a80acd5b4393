"""Layers of PEFT stand around the layers of a model and hide where its weights are stored."""

from __future__ import annotations

from torch import nn

from wellcond.errors import WeightError


def refuse_adapters(module: nn.Module, where: str) -> None:
    """Raise WeightError if a module is, or contains, an adapter of PEFT around another layer."""
    if any(type(part).__module__.startswith("peft.") and hasattr(part, "base_layer") for part in module.modules()):
        raise WeightError(
            f"{where} carries an adapter of PEFT, which hides its weights. Initialise, condition and measure the base "
            "model before the adapter is added, or merge the adapter first; see docs/training/peft.md."
        )

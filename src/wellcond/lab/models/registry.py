"""Architectures by name: a class of options and a function that builds the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from wellcond.errors import check_choice
from wellcond.lab.settings import Settings


class ArchitectureOptions(Settings):
    """Base of the options of every architecture: what a recipe writes under `model.arguments`."""


OptionsT = TypeVar("OptionsT", bound=ArchitectureOptions)
Build = Callable[[OptionsT], nn.Module]


@dataclass(frozen=True)
class Architecture:
    """The options of an architecture and its builder."""

    options_class: type[ArchitectureOptions]
    build: Callable[[Any], nn.Module]


ARCHITECTURES: dict[str, Architecture] = {}


def register_architecture(name: str, options_class: type[OptionsT]) -> Callable[[Build[OptionsT]], Build[OptionsT]]:
    """Decorate `build(options)`; recipes then name the model `wellcond:name`."""

    def register(build: Build[OptionsT]) -> Build[OptionsT]:
        ARCHITECTURES[name] = Architecture(options_class, build)
        return build

    return register


def build_architecture(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The model with this name.

    Raises:
        UnknownChoiceError: no such architecture; lists those registered.
        pydantic.ValidationError: an option is wrong.
    """
    check_choice("architecture", name, sorted(ARCHITECTURES))
    entry = ARCHITECTURES[name]
    return entry.build(entry.options_class.model_validate(arguments))

"""Base of every part of a recipe: frozen, strict about names, and clear about what is wrong."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from wellcond.errors import WellcondError

Scale = Literal["tiny", "small", "paper"]
SequenceLength = Annotated[int, Field(gt=0, le=2**20)]
"""In tokens; a batch is padded to it."""
ImageSide = Annotated[int, Field(gt=0, le=2**14)]
"""In pixels."""
MOST_INTEGER, MOST_FLOAT = 2**63 - 1, 1e38
"""What torch holds in 64 and in 32 bits."""


class RecipeError(WellcondError, ValueError):
    """A recipe that cannot be run, with the path, the value and what was expected."""


class Settings(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, values: Any) -> Any:
        unknown = [name for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
        if unknown:
            known = list(cls.model_fields)
            problems = [
                _problem(f"unknown field {name!r}{suggest(str(name), known)}", str(name), values[name])
                for name in unknown
            ]
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return values

    @model_validator(mode="before")
    @classmethod
    def _only_numbers_that_fit(cls, values: Any) -> Any:
        items = values.items() if isinstance(values, dict) else ()
        problems = [
            _problem(f"expected a number of at most {most:g}", str(name), found)
            for name, found in items
            for kind, most in ((int, MOST_INTEGER), (float, MOST_FLOAT))
            if isinstance(found, kind) and most < abs(found) < math.inf
        ]
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return values


def _problem(message: str, field: str, found: Any) -> InitErrorDetails:
    # The message is an argument of the template, since it may hold braces.
    kind = PydanticCustomError("unknown_field", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=(field,), input=found)


def suggest(name: str, allowed: Sequence[str]) -> str:
    """What may stand there instead, the nearest first.

    Example:
        >>> suggest("momentun", ["lr", "momentum"])
        "; did you mean 'momentum'? Allowed: lr, momentum"
    """
    close = difflib.get_close_matches(name, allowed, 1)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" Allowed: {', '.join(allowed)}"


class Interval(Settings):
    """A length of training, in epochs or in optimiser steps."""

    epochs: PositiveFloat | None = None
    steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Interval:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self

    def in_steps(self, steps_per_epoch: int) -> int:
        """At least one step; a part of an epoch is rounded."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * steps_per_epoch))


def explain(error: ValidationError, where: str, data: Any = None) -> RecipeError:
    """A pydantic error as one message: a line for each problem with its path in `data` and the value found."""
    return RecipeError(f"{where} is not a valid recipe:\n" + "\n".join(list_problems(error, data)))


def list_problems(error: ValidationError, data: Any = None) -> list[str]:
    """A line for each problem of a pydantic error."""
    lines = []
    for problem in error.errors():
        path = ".".join(_as_written(problem["loc"], data)) or "(top level)"
        message = problem["msg"].removeprefix("Value error, ")
        found = problem.get("input")
        shown = "" if isinstance(found, (dict, list)) or problem["type"] == "missing" else f" (found {found!r})"
        lines.append(f"  {path}: {message}{shown}")
    return lines


def _as_written(loc: Sequence[int | str], data: Any) -> list[str]:
    """A path without the names by which pydantic tells apart what may stand in one place (optimizer.adamw.lr)."""
    parts = []
    for part in loc:
        if isinstance(data, dict) and part not in data and part == data.get("name"):
            continue
        parts.append(str(part))
        inside = isinstance(data, dict) or (isinstance(data, list) and isinstance(part, int) and part < len(data))
        data = (data.get(part) if isinstance(data, dict) else data[part]) if inside else None
    return parts


def divide_exactly(total: int, parts: int, what: str) -> int:
    """Total / parts, or a RecipeError."""
    if total % parts:
        raise RecipeError(
            f"{what}: {total} cannot be divided into {parts} equal parts; "
            f"expected a multiple of {parts}, for instance {parts * math.ceil(total / parts)}"
        )
    return total // parts

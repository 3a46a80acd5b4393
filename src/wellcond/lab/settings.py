"""Base of every part of a recipe (frozen, strict about names, clear about what is wrong), and its YAML."""

from __future__ import annotations

import copy
import difflib
import functools
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from wellcond.errors import WellcondError

Scale = Literal["tiny", "small", "paper"]
Fraction = Annotated[float, Field(ge=0, le=1)]
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
    def _known_fields_and_numbers_that_fit(cls, values: Any) -> Any:
        problems = []
        for name, found in values.items() if isinstance(values, dict) else ():
            most = MOST_INTEGER if isinstance(found, int) else MOST_FLOAT
            if name not in cls.model_fields:
                message = f"unknown field {name!r}{suggest(str(name), list(cls.model_fields))}"
            elif isinstance(found, (int, float)) and most < abs(found) < math.inf:
                message = f"expected a number of at most {most:g}"
            else:
                continue
            # The message is an argument of the template, since it may hold braces.
            kind = PydanticCustomError("unknown_field", "{message}", {"message": message})
            problems.append(InitErrorDetails(type=kind, loc=(str(name),), input=found))
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return values


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


def plain_number(value: float) -> float:
    """25.0 as 25, which fields of whole numbers take too, and which is the same setting."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else value


def first_problem(error: ValueError) -> str:
    """What is wrong first, by a pydantic error or another one."""
    return error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else str(error)


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


# YAML as plain data: no code, 1e-3 is a number, and a key that appears twice is an error.


class _Loader(yaml.SafeLoader):
    """A SafeLoader with the constructor and the resolver below."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (dict, list, set)) or key in found:
            problem = f"the key {key!r} appears twice" if key.__hash__ else f"a key cannot be {key!r}"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
MOST_CHARACTERS = 2**20
MOST_VALUES = 100_000
"""With aliases written out: nine lines of them can stand for a billion values."""


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a document with its aliases written out.

    Raises: YAMLError if there are too many, or an alias stands within what it names.
    """
    count = known.setdefault(id(node), -1)
    if count > 0:
        return count
    if count == 0:
        raise yaml.composer.ComposerError(None, None, "an alias stands within what it names", node.start_mark)
    known[id(node)] = 0
    inside = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for pair in inside for part in pair] if isinstance(node, yaml.MappingNode) else inside
    known[id(node)] = count = 1 + sum(_count_values(part, known) for part in parts)
    if count > MOST_VALUES:
        raise yaml.composer.ComposerError(None, None, f"expected at most {MOST_VALUES} values", node.start_mark)
    return count


@functools.lru_cache(maxsize=256)  # parsing takes milliseconds, and many recipes extend the same one
def _parse(text: str) -> Any:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _count_values(node, {})
    return loader.construct_document(node)


def read_yaml(text: str, where: str = "the value") -> Any:
    """Plain data from YAML.

    Raises: RecipeError for text that is not YAML, or asks for more than plain data.

    Example:
        >>> read_yaml("lr: 1e-3")
        {'lr': 0.001}
    """
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{where}: expected at most {MOST_CHARACTERS} characters, found {len(text)}")
    try:
        return copy.deepcopy(_parse(text))
    # ValueError: a date with a 13th month; RecursionError: thousands of brackets
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML: {error}") from error

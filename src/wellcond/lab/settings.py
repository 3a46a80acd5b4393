"""Base of every part of a recipe (frozen, strict about names, clear about what is wrong), and its YAML."""

from __future__ import annotations

import copy
import difflib
import functools
import math
import re
from collections.abc import Callable, Sequence
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
MOST = 2**63 - 1
"""What torch holds in 64 bits."""


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
            if name not in cls.model_fields:
                message = f"unknown field {name!r}{suggest(str(name), list(cls.model_fields))}"
            elif isinstance(found, (int, float)) and MOST < abs(found) < math.inf:
                message = f"expected a number of at most {MOST}"
            else:
                continue
            # The message is an argument of the template, since it may hold braces.
            kind = PydanticCustomError("unknown_field", "{message}", {"message": message})
            problems.append(InitErrorDetails(type=kind, loc=(str(name),), input=found))
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return values


def suggest(name: str, allowed: Sequence[str]) -> str:
    """What may stand there instead, the nearest first."""
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
    """The first thing wrong by a pydantic error, or another error as it is."""
    return error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else str(error)


def explain(error: ValidationError, where: str) -> RecipeError:
    """A pydantic error as one message: a line for each problem with its path and the value found."""
    return RecipeError(f"{where} is not a valid recipe:\n" + "\n".join(list_problems(error)))


def list_problems(error: ValidationError) -> list[str]:
    """A line for each problem of a pydantic error."""
    lines = []
    for problem in error.errors():
        path = ".".join(map(str, problem["loc"])) or "(top level)"
        message = problem["msg"].removeprefix("Value error, ")
        found = problem.get("input")
        shown = "" if isinstance(found, (dict, list)) or problem["type"] == "missing" else f" (found {found!r})"
        lines.append(f"  {path}: {message}{shown}")
    return lines


def choose_by_name(what: str, *settings: type[Settings]) -> Callable[[Any], Any]:
    """A validator of fields whose `name` says which of several settings they have."""
    kinds = {kind.model_fields["name"].default: kind for kind in settings}

    def choose(raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        name = str(raw.get("name"))
        if name not in kinds:
            raise ValueError(f"unknown {what} {name!r}{suggest(name, sorted(kinds))}")
        return kinds[name].model_validate(raw)

    return choose


def set_path(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at ``path.to.field`` in place; ValueError if that leads through something without fields."""
    *above, last = path.split(".")
    for depth, key in enumerate(above, start=1):
        data[key] = {} if data.get(key) is None else data[key]
        data = data[key]
        if not isinstance(data, dict):
            raise ValueError(f"{'.'.join(above[:depth])} is {data!r}, which has no fields")
    data[last] = value


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


def _check_size(node: yaml.Node) -> None:
    """Raise YAMLError if a document has too many values, or endless ones: an alias within what it names."""
    left, waiting = MOST_VALUES, [node]
    while waiting:
        node, left = waiting.pop(), left - 1
        if left < 0:
            raise yaml.composer.ComposerError(None, None, f"expected at most {MOST_VALUES} values", node.start_mark)
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        waiting += [part for pair in inside for part in pair] if isinstance(node, yaml.MappingNode) else inside


@functools.lru_cache(maxsize=256)  # parsing takes milliseconds, and many recipes extend the same one
def _parse(text: str) -> Any:
    loader = _Loader(text)
    if (node := loader.get_single_node()) is None:
        return None
    _check_size(node)
    return loader.construct_document(node)


def read_yaml(text: str, where: str = "the value") -> Any:
    """Plain data from YAML; RecipeError for text that is not YAML, or asks for more than plain data."""
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{where}: expected at most {MOST_CHARACTERS} characters, found {len(text)}")
    try:
        return copy.deepcopy(_parse(text))
    # ValueError: a date with a 13th month; RecursionError: thousands of brackets
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML: {error}") from error

"""Base of every part of a recipe (frozen, strict about names, clear about what is wrong), and its YAML."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from wellcond.errors import RecipeError, UnknownChoiceError

Scale = Literal["tiny", "small", "paper"]
Fraction = Annotated[float, Field(ge=0, le=1)]
SequenceLength = Annotated[int, Field(gt=0, le=2**20)]
"""In tokens; a batch is padded to it."""
ImageSide = Annotated[int, Field(gt=0, le=2**14)]
"""In pixels."""
MOST = 2**63 - 1
"""What torch holds in 64 bits."""


class Settings(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_and_numbers_that_fit(cls, values: Any) -> Any:
        problems = []
        for name, found in values.items() if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                message = str(UnknownChoiceError("field", name, list(cls.model_fields)))
            elif holds_boolean(found) and takes_only_numbers(cls.model_fields[name].annotation):
                message = "expected a number; YAML reads on, yes and true, off, no and false as booleans"
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


def holds_boolean(value: Any) -> bool:
    """Whether a value is a boolean, or a list of values with one in it."""
    return any(map(holds_boolean, value)) if isinstance(value, (list, tuple)) else isinstance(value, bool)


def takes_only_numbers(annotation: Any) -> bool:
    """Whether a type takes numbers and no booleans: pydantic, left alone, makes 1 of true."""
    types = set(_types_in(annotation))
    return bool(types & {int, float}) and not types & {bool, Any}


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types that a type is made of, such as those of a union, of a tuple and of their parts."""
    if get_origin(annotation) is Annotated:
        yield from _types_in(get_args(annotation)[0])
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif arguments := get_args(annotation):
        for argument in arguments:
            yield from _types_in(argument)
    else:
        yield annotation


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


def plain_numbers(value: Any) -> Any:
    """25.0 as 25, which fields of whole numbers take too, and which is the same setting; in lists and mappings too."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain_numbers, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def list_problems(error: ValueError) -> list[str]:
    """Each problem of a pydantic error with its path and the value found; another error as it is."""
    if not isinstance(error, ValidationError):
        return [str(error)]
    lines = []
    for problem in error.errors():
        path, found = ".".join(map(str, problem["loc"])), problem.get("input")
        shown = "" if isinstance(found, (dict, list)) or problem["type"] == "missing" else f" (found {found!r})"
        lines.append(f"{path}: " * bool(path) + problem["msg"].removeprefix("Value error, ") + shown)
    return lines


def choose_by_name(what: str, *settings: type[Settings], field: str = "name") -> Callable[[Any], Any]:
    """A validator that makes those settings of a mapping whose name is in its `field`; UnknownChoiceError for none."""
    kinds = {kind.model_fields[field].default: kind for kind in settings}

    def choose(raw: Any) -> Any:
        if isinstance(raw, Settings):
            return raw
        name = raw.get(field) if isinstance(raw, Mapping) else None
        if name not in list(kinds):
            advice = "" if name else f"expected a mapping such as {{{field}: {min(kinds)}}}, found {raw!r}"
            raise UnknownChoiceError(what, name, sorted(kinds), advice=advice)
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


@functools.lru_cache(maxsize=256)  # parsing takes milliseconds, and many recipes extend the same one
def _parse(text: str) -> Any:
    loader = _Loader(text)
    document = loader.get_single_node()
    left, waiting = MOST_VALUES, [document]
    while waiting:
        node, left = waiting.pop(), left - 1
        if left < 0:  # too many, or endless ones: an alias within what it names
            raise yaml.composer.ComposerError(None, None, f"expected at most {MOST_VALUES} values", node.start_mark)
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        waiting += [part for pair in inside for part in pair] if isinstance(node, yaml.MappingNode) else inside
    return None if document is None else loader.construct_document(document)


def read_yaml(text: str, where: str = "the value") -> Any:
    """Plain data from YAML; RecipeError for text that is not YAML, or asks for more than plain data."""
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{where}: expected at most {MOST_CHARACTERS} characters, found {len(text)}")
    try:
        return copy.deepcopy(_parse(text))
    # ValueError: a date with a 13th month; RecursionError: thousands of brackets
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML: {error}") from error

"""Recipes as plain data: the base of their parts, their YAML, those that ship, and changes of their fields.

Parts are frozen, strict about names and clear about what is wrong. Nothing here needs torch, so mistakes are reported
at once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from wellcond.errors import RecipeError, UnknownChoiceError
from wellcond.files import read_regular

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[str, ...] = get_args(Scale)
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


# Fields of recipes: those that ship, those of a file, and changes of them.


@functools.cache
def shipped_recipes() -> dict[str, str]:
    """The text of the package's own recipes, each by its ``scale/name``; in the order of scales and names."""
    shipped: dict[str, str] = {}
    for scale in SCALES:
        files = (resources.files("wellcond.lab") / "recipes" / scale).iterdir()
        named = {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
        shipped |= {f"{scale}/{name}": named[name].read_text(encoding="utf-8") for name in sorted(named)}
    return shipped


def read_fields(name_or_path: str, scale: str | None = None) -> tuple[dict[str, Any], Path | None, str]:
    """The fields of a recipe, the folder of its relative paths, and what messages call it; torch is not needed."""
    where, base = name_or_path, None
    if name_or_path.endswith((".yaml", ".yml")):
        base = Path(name_or_path).parent
        try:
            text = read_regular(name_or_path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"the recipe {name_or_path} cannot be read as text: {error}") from error
    else:
        shipped = shipped_recipes()
        scales = [one for one in SCALES if f"{one}/{name_or_path}" in shipped]
        if not scales:
            advice = "expected a file of your own that ends in .yaml, or a recipe that `wellcond recipes` lists"
            names = sorted({name.partition("/")[2] for name in shipped})
            raise UnknownChoiceError("recipe", name_or_path, names, advice=advice)
        if scale not in (None, *scales):
            listed = ", ".join(scales)
            raise RecipeError(f"the recipe {name_or_path!r} exists at scale {listed}, not {scale!r}; correct --scale")
        where = f"{scale or scales[0]}/{name_or_path}"
        text = shipped[where]
    fields = _extended(text, where)
    if base is not None and scale not in (None, fields.get("scale")):
        found = fields.get("scale")
        raise RecipeError(f"{where} is a recipe of scale {found!r}, not {scale!r}; leave out --scale")
    return fields, base, where


def check_text(name_or_path: str, scale: str | None, overrides: Sequence[str]) -> None:
    """Raise RecipeError for what is wrong with a recipe's name, its scale or the text of its changes."""
    fields, _, _ = read_fields(name_or_path, scale)
    for override in overrides:
        set_field(fields, override)


def change_fields(fields: dict[str, Any], overrides: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe with parts replaced by `changes`, then with `overrides`, without texts that they make untrue.

    What was searched for it does not count for a field that is changed, and `tuned.changed` names what it had not.
    """
    changed_fields, changed = copy.deepcopy(fields), set(changes)
    for part, value in changes.items():
        changed_fields[part] = copy.deepcopy(value)
        _forget_searched(changed_fields, part)
    for override in overrides:
        path = set_field(changed_fields, override)
        changed.add(path.partition(".")[0])
        _forget_searched(changed_fields, path)
    _note_changes(fields, changed_fields)
    return _without_untrue(changed_fields, changed)


def set_field(data: dict[str, Any], override: str, what: str = "--set") -> str:
    """Apply ``path.to.field=value`` in place and return the path."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise RecipeError(f"{what}: expected path.to.field=value, found {override!r}")
    try:
        set_path(data, path, read_yaml(text, "the value"))
    except ValueError as error:
        raise RecipeError(f"{what} {override}: {error}") from error
    return path


def _extended(text: str, where: str) -> dict[str, Any]:
    """Fields of a recipe, on top of those of the shipped recipe it ``extends``."""
    data = read_yaml(text, where)
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected a mapping of fields, found {type(data).__name__}")
    base = data.pop("extends", None)
    if base is None:
        return data
    shipped = shipped_recipes()
    if base not in list(shipped):
        raise RecipeError(f"{where}: extends: {UnknownChoiceError('recipe', base, list(shipped))}")
    inherited = _extended(shipped[base], base)
    own = "tuned" in data
    if own:
        inherited.pop("tuned", None)
    merged = merge(_without_untrue(inherited, set(data)), data)
    if not own:
        _note_changes(inherited, merged)
        for path, _ in _leaves(data):
            _forget_searched(merged, ".".join(path))
    return merged


def _forget_searched(fields: dict[str, Any], path: str) -> None:
    """Take a field out of what was searched: a value that the user sets counts for all methods."""
    with contextlib.suppress(KeyError, AttributeError, TypeError):  # another form is refused when it is validated
        for found in fields["tuned"]["values"].values():
            for field in [field for field in found if f"{field}.".startswith(f"{path}.")]:
                del found[field]


WITHOUT_EFFECT = {
    "data.limit_evaluation",
    "data.limit_test",
    "data.num_evaluation",
    "data.num_test",
    "optimizer.fused",
    "precision.channels_last",
    "precision.compile",
    "precision.tf32",
    "training.accumulate",
    "training.diverged_above",
    "training.log_every",
    "training.recompute",
    "training.shard",
    "training.threads",
    "training.workers",
}
"""Fields that change nothing about how a model trains."""
TRAINED = ("task", "data", "model", "proxy", "optimizer", "schedule", "augmentation", "training", "precision")
"""Parts of a recipe that searched values depend on."""


def _note_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Put into `tuned.changed` the fields that have other values than in the recipe."""
    tuned, former = after.get("tuned"), before.get("tuned")
    if not isinstance(tuned, dict) or not isinstance(former, dict):
        return  # none, or what the user sets now; another form is refused when it is validated
    noted, values = (former.get(key) or [] for key in ("changed", "values"))
    if not isinstance(noted, list) or not isinstance(values, dict):
        return
    old, new = (dict(_leaves({part: fields.get(part) for part in TRAINED})) for fields in (before, after))
    tuned_fields = {field for found in values.values() if isinstance(found, dict) for field in found}
    changed = [
        ".".join(path[:2])
        for path in {**old, **new}
        if new.get(path) != old.get(path) and ".".join(path) not in tuned_fields
    ]
    listed = [path for path in dict.fromkeys([*noted, *changed]) if path not in WITHOUT_EFFECT]
    if listed:
        tuned["changed"] = listed


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Everything that is set and no mapping, by its keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif value is not None:
        yield path, value


DESCRIBED = {
    "title": {"data", "model", "task"},
    "description": {"augmentation", "data", "evaluation", "model", "optimizer", "schedule", "task", "training"},
}
"""Fields that a recipe's own title and description speak of: a change of one of them makes the text untrue."""


def _without_untrue(data: dict[str, Any], changed: set[str]) -> dict[str, Any]:
    """Fields without a title or description that would speak of other data, another model or another length."""
    untrue = [key for key, fields in DESCRIBED.items() if changed & fields and key not in changed]
    return {key: value for key, value in data.items() if key not in untrue}


LENGTHS = ("length", "every", "weights_every", "warmup", "cooldown")
"""Fields that are given in epochs or in steps: one replaces the other."""


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields of `changes` over those of `base`, mapping by mapping; one of another kind is replaced whole.

    Example:
        >>> merge({"optimizer": {"name": "muon", "lr": 1}}, {"optimizer": {"lr": 2}})
        {'optimizer': {'name': 'muon', 'lr': 2}}
        >>> merge({"data": {"source": "digits"}}, {"data": {"source": "hub", "id": "a/b"}})
        {'data': {'source': 'hub', 'id': 'a/b'}}
    """
    merged = dict(base)
    for key, value in changes.items():
        former = base.get(key)
        if isinstance(former, dict) and isinstance(value, dict) and key not in LENGTHS:
            same_kind = all(value.get(tag, former.get(tag)) == former.get(tag) for tag in ("name", "source"))
            merged[key] = merge(former, value) if same_kind else value
        else:
            merged[key] = value
    return merged

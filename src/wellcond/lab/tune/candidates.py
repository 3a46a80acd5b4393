"""Methods at values of the tuned fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from wellcond.lab.methods import MethodSettings, parse_method, read_calls, write_call
from wellcond.lab.recipe import PARTS, Recipe, field_value, override_recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tune.grid import TunedField

Values = Mapping[str, float]
"""By field."""


def of_recipe(field: str) -> bool:
    """Whether a field is one of the recipe; the others are options of parts of methods."""
    return field.partition(".")[0] in PARTS


def has_field(method: MethodSettings, field: str) -> bool:
    """Whether a method is tuned over a field: it has that part; and it does not set the field itself."""
    if of_recipe(field):
        return field not in method.set
    part = field.partition(".")[0]
    return part in [name for name, _ in read_calls(method.canonical())]


def at_values(recipe: Recipe, method: MethodSettings, values: Values, label: str | None = None) -> MethodSettings:
    """The method with these values.

    Args:
        recipe: of the runs.
        method: tuned over the fields of `values`.
        values: by field.
        label: of the result; that of the method by default.

    Raises: RecipeError for a value that its field does not take.
    """
    label = label or method.label
    options = {field: value for field, value in values.items() if not of_recipe(field)}
    try:
        fields = _with_options(method, options) if options else method.model_dump()
        own = {field: value for field, value in values.items() if of_recipe(field)}
        made = MethodSettings.model_validate(fields | {"label": label, "set": method.set | own})
    except (ValidationError, ValueError) as error:
        found = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise RecipeError(f"--tune: {show_values(values)}: {found.removeprefix('Value error, ')}") from error
    override_recipe(recipe, made)
    return made


def _with_options(method: MethodSettings, options: Values) -> dict[str, Any]:
    """Fields of a method whose parts have other options; through its text."""
    parts = read_calls(method.canonical())
    for field, value in options.items():
        owner, _, option = field.partition(".")
        for name, written in parts:
            if name == owner:
                written[option] = value
    return parse_method("+".join(write_call(*part) for part in parts))


def check_fields(recipe: Recipe, methods: Sequence[MethodSettings], fields: Sequence[TunedField]) -> None:
    """Raise RecipeError for a field that no method has, or a value that it does not take."""
    for field in fields:
        if of_recipe(field.name):
            now = field_value(recipe, field.name)
            if isinstance(now, bool) or not (now is None or isinstance(now, (int, float))):
                raise RecipeError(f"--tune {field.name}: expected a field with a number, found {now!r} in the recipe")
        concerned = [method for method in methods if has_field(method, field.name)]
        if not concerned:
            raise RecipeError(
                f"--tune {field.name}: expected a field of the recipe that a method may set ({', '.join(PARTS)}), or "
                f"PART.OPTION of a method such as identity.lam; none of the methods "
                f"({', '.join(method.label for method in methods)}) has it to tune"
            )
        for method in concerned:
            for value in field.values:
                at_values(recipe, method, {field.name: value})


def show_values(values: Values) -> str:
    """Values in words.

    Example:
        >>> show_values({"optimizer.lr": 0.003, "tokens.positions": 25})
        'optimizer.lr=0.003, tokens.positions=25'
    """
    return ", ".join(f"{field}={value!r}" for field, value in values.items())


def values_slug(values: Values) -> str:
    """Name of the folder of runs at these values.

    Example:
        >>> values_slug({"optimizer.lr": 0.003, "tokens.positions": 25})
        'optimizer.lr-0.003-tokens.positions-25'
    """
    return "-".join(f"{field}-{value!r}" for field, value in values.items())

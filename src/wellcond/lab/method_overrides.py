"""`set(...)` of a method: fields of the recipe that one method changes for its own runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError

from wellcond.lab.settings import RecipeError, Settings, list_problems, suggest

if TYPE_CHECKING:
    from wellcond.lab.methods import MethodSettings
    from wellcond.lab.recipe import Recipe

PARTS = ("optimizer", "schedule", "augmentation", "model", "training")
ONLY = {"training": ("clip_norm", "averaging")}
"""Of these parts a method may change no other field."""
NEVER = {"model": ("name", "arguments", "weights", "encoder")}
"""What makes another model; its runs would be no pairs with those of the other methods."""


def override_recipe(recipe: Recipe, method: MethodSettings) -> Recipe:
    """The recipe of a method's runs: its `set` applied; the recipe itself if it has none.

    Raises: RecipeError that names the method, the field, what was expected and what was found.

    Example:
        >>> from wellcond.lab.load_recipe import load_recipe
        >>> from wellcond.lab.methods import MethodSettings
        >>> method = MethodSettings.model_validate("conditioned+set(optimizer.lr=3e-3)")
        >>> override_recipe(load_recipe("digits")[0], method).optimizer.lr
        0.003
    """
    changes: dict[str, dict[str, Any]] = {}
    for field, value in method.set.items():
        _check_field(field, method.label)
        part, _, rest = field.partition(".")
        changes.setdefault(part, {})[rest] = value
    changed = {part: _override_part(recipe, part, values, method.label) for part, values in changes.items()}
    return recipe.model_copy(update=changed) if changed else recipe


def _check_field(field: str, label: str) -> None:
    part, _, rest = field.partition(".")
    name = rest.partition(".")[0]
    if part not in PARTS or not name or name in NEVER.get(part, ()) or name not in ONLY.get(part, (name,)):
        allowed = [f"{part}.{name}" for part in PARTS for name in ONLY.get(part, ("*",))]
        raise RecipeError(
            f"{label}: set: expected a field that one method may change ({', '.join(allowed)}; not "
            f"{', '.join(f'{part}.{name}' for part, names in NEVER.items() for name in names)}), found {field!r}: all "
            "runs of a comparison share the others; change those for all methods with --set"
        )


def _override_part(recipe: Recipe, part: str, values: Mapping[str, Any], label: str) -> Settings:
    """One part of the recipe with new values, by their paths in it."""
    former: Settings = getattr(recipe, part)
    data = former.model_dump(mode="json", exclude_unset=True)
    if hasattr(former, "name"):
        data["name"] = former.name
    if values.get("name", data.get("name")) != data.get("name"):  # of another kind: what that one has stays
        known = _kinds(recipe, part).get(values["name"])
        data = {key: value for key, value in data.items() if known is None or key in known.model_fields}
    for path, value in values.items():
        *above, last = path.split(".")
        place = data
        for key in above:
            place[key] = dict(place[key]) if isinstance(place.get(key), dict) else {}
            place = place[key]
        place[last] = value
    try:
        return _adapter(type(recipe), part).validate_python(data)
    except ValidationError as error:
        problems = "; ".join(line.strip() for line in list_problems(error, data))
        raise RecipeError(f"{label}: set: {part}.{problems}") from error


@functools.cache
def _adapter(recipe: type[Recipe], part: str) -> TypeAdapter:
    field = recipe.model_fields[part]
    kind: Any = Annotated[field.annotation, field]
    return TypeAdapter(kind)


def _kinds(recipe: Recipe, part: str) -> dict[str, type[Settings]]:
    """Classes among which `name` chooses, where there are several."""
    return {kind.model_fields["name"].default: kind for kind in get_args(type(recipe).model_fields[part].annotation)}


def field_value(recipe: Recipe, field: str) -> Any:
    """Value of a dotted field in a recipe.

    Raises: RecipeError if there is no such field.
    """
    found: Any = recipe
    for key in field.split("."):
        names = list(found) if isinstance(found, dict) else list(getattr(type(found), "model_fields", ()))
        if key not in names:
            raise RecipeError(f"{field}: no field {key!r} there{suggest(key, names)}")
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    return found

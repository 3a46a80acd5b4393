"""Reading recipes: those that ship, and a user's own files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from wellcond.lab.settings import RecipeError, Scale, explain, read_yaml, set_path, suggest

if TYPE_CHECKING:
    from wellcond.lab.recipe import Recipe

SCALES: tuple[str, ...] = get_args(Scale)


@dataclass(frozen=True)
class ShippedRecipe:
    """One of the package's own recipes."""

    name: str
    scale: str
    text: str


def shipped_recipes() -> list[ShippedRecipe]:
    """All of them, by scale and name."""
    root = resources.files("wellcond.lab") / "recipes"
    return [
        ShippedRecipe(file.name.removesuffix(".yaml"), scale, file.read_text(encoding="utf-8"))
        for scale in SCALES
        if (root / scale).is_dir()
        for file in sorted((root / scale).iterdir(), key=lambda file: file.name.removesuffix(".yaml"))
        if file.name.endswith(".yaml")
    ]


Fields = dict[str, Any]
"""A recipe as it is written, before its fields are checked."""


def load_recipe(
    name_or_path: str, *, scale: str | None = None, overrides: Sequence[str] = ()
) -> tuple[Recipe, Path | None]:
    """A recipe, shipped or in a YAML file, and the folder its relative paths start from (None for one that ships).

    `scale` is by default the smallest that ships; `overrides` are ``path.to.field=value``, values in YAML.
    """
    fields, where, base = read_recipe(name_or_path, scale=scale, overrides=overrides)
    return _validate(fields, where), base


def _validate(fields: Fields, where: str) -> Recipe:
    from wellcond.lab.recipe import Recipe

    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise explain(error, where) from error


def read_recipe(
    name_or_path: str, *, scale: str | None = None, overrides: Sequence[str] = ()
) -> tuple[Fields, str, Path | None]:
    """`load_recipe` as far as it goes without torch: the fields of the recipe, where they are from, and its folder."""
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if not path.is_file():
            raise RecipeError(f"no such recipe file: {path}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} cannot be read as text: {error}") from error
        fields = _fields(text, str(path), overrides)
        if scale not in (None, fields.get("scale")):
            raise RecipeError(f"{path} is a recipe of scale {fields.get('scale')!r}, not {scale!r}; leave out --scale")
        return fields, str(path), path.parent
    shipped = shipped_recipes()
    named = [recipe for recipe in shipped if recipe.name == name_or_path]
    if not named:
        raise RecipeError(
            f"no recipe {name_or_path!r}{suggest(name_or_path, sorted({recipe.name for recipe in shipped}))}. "
            "`wellcond recipes` lists them; a file of your own ends in .yaml"
        )
    found = next((recipe for recipe in named if scale in (None, recipe.scale)), None)
    if found is None:
        scales = ", ".join(recipe.scale for recipe in named)
        raise RecipeError(f"the recipe {name_or_path!r} exists at scale {scales}, not {scale!r}; correct --scale")
    where = f"{found.scale}/{found.name}"
    return _fields(found.text, where, overrides), where, None


def parse_recipe(text: str, where: str, overrides: Sequence[str] = ()) -> Recipe:
    """Validate the text of a recipe."""
    return _validate(_fields(text, where, overrides), where)


def _fields(text: str, where: str, overrides: Sequence[str] = ()) -> Fields:
    data = _extended(text, where)
    paths = [override.partition("=")[0].strip() for override in overrides]
    for override, path in zip(overrides, paths, strict=True):
        set_field(data, override)
        # What the user sets counts for all methods, whatever was found for some; another form is refused later.
        with contextlib.suppress(KeyError, AttributeError, TypeError):
            for found in data["tuned"]["values"].values():
                for field in [field for field in found if f"{field}.".startswith(f"{path}.")]:
                    del found[field]
    return _without_untrue(data, {path.partition(".")[0] for path in paths})


def _without_untrue(data: Fields, changed: set[str]) -> Fields:
    """Fields without a title or description that would speak of other data, another model or another length."""
    untrue = [key for key, fields in DESCRIBED.items() if changed & fields and key not in changed]
    return {key: value for key, value in data.items() if key not in untrue}


def _extended(text: str, where: str) -> Fields:
    """Fields of a recipe, on top of those of the shipped recipe it ``extends``."""
    data = read_yaml(text, where)
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected a mapping of fields, found {type(data).__name__}")
    base = data.pop("extends", None)
    if base is None:
        return data
    shipped = {f"{recipe.scale}/{recipe.name}": recipe.text for recipe in shipped_recipes()}
    if base not in shipped:
        raise RecipeError(f"{where}: extends: no recipe {base!r}{suggest(str(base), sorted(shipped))}")
    inherited = _extended(shipped[base], base)
    inherited.pop("tuned", None)  # found for that one
    return merge(_without_untrue(inherited, set(data)), data)


def merge(base: Fields, changes: Fields) -> Fields:
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


DESCRIBED = {
    "title": {"data", "model", "task"},
    "description": {"augmentation", "data", "evaluation", "model", "optimizer", "schedule", "task", "training"},
}
"""Fields that a recipe's own title and description speak of: a change of one of them makes the text untrue."""
LENGTHS = ("length", "every", "weights_every", "warmup", "cooldown")
"""Fields that are given in epochs or in steps: one replaces the other."""


def set_field(data: Fields, override: str) -> None:
    """Apply ``path.to.field=value`` in place; RecipeError if it is none, or leads through what has no fields."""
    path, equals, text = override.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise RecipeError(f"--set: expected path.to.field=value, found {override!r}")
    try:
        set_path(data, path.strip(), read_yaml(text, "the value"))
    except ValueError as error:
        raise RecipeError(f"--set {override}: {error}") from error

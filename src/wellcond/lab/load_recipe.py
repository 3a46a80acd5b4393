"""Reading recipes: those that ship, and a user's own files."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from wellcond.errors import RecipeError, UnknownChoiceError
from wellcond.files import read_regular
from wellcond.lab.settings import Scale, list_problems, read_yaml, set_path

if TYPE_CHECKING:
    from wellcond.lab.recipe import Recipe

SCALES: tuple[str, ...] = get_args(Scale)


@functools.cache
def shipped_recipes() -> dict[str, str]:
    """The text of the package's own recipes, each by its ``scale/name``; in the order of scales and names."""
    shipped: dict[str, str] = {}
    for scale in SCALES:
        files = (resources.files("wellcond.lab") / "recipes" / scale).iterdir()
        named = {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
        shipped |= {f"{scale}/{name}": named[name].read_text(encoding="utf-8") for name in sorted(named)}
    return shipped


def load_recipe(
    name_or_path: str,
    *,
    scale: str | None = None,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> tuple[Recipe, Path | None]:
    """A recipe, shipped or in a YAML file, and the folder its relative paths start from (None for one that ships).

    `scale` is by default the smallest that ships; `overrides` are ``path.to.field=value``, values in YAML; before them,
    parts of it are replaced by `changes`. What is wrong can often be seen before torch is imported.
    """
    fields, base, where = read_fields(name_or_path, scale)
    return recipe_from(fields, overrides, changes or {}, where), base


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


def recipe_from(fields: dict[str, Any], overrides: Sequence[str], changes: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from its fields, with parts replaced by `changes`, then with `overrides`; `where` is for messages."""
    before, changed = copy.deepcopy(fields), set(changes)
    for part, value in changes.items():
        fields[part] = copy.deepcopy(value)
        _forget_searched(fields, part)
    for override in overrides:
        path = set_field(fields, override)
        changed.add(path.partition(".")[0])
        _forget_searched(fields, path)
    _note_changes(before, fields)
    from wellcond.lab.recipe import Recipe

    try:
        return Recipe.model_validate(_without_untrue(fields, changed))
    except ValidationError as error:
        raise RecipeError("\n  ".join([f"{where} is not a valid recipe:", *list_problems(error)])) from error


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

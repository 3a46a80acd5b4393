"""What a comparison runs: methods at values that are fair to all of them, its jobs, and the file that describes it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wellcond.errors import FairnessWarning, RecipeError, RunError
from wellcond.lab.methods import MethodSettings, check_distinct
from wellcond.lab.recipe import Recipe, config_hash, override_recipe
from wellcond.lab.records import SCHEMA
from wellcond.lab.train.run import Job, describe_change
from wellcond.lab.train.run_folder import RunFolder, read_sealed, write_sealed, writing

KIND = "wellcond-comparison"
RATE = "optimizer.lr"


def plan_comparison(
    recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], folder: Path, **options: Any
) -> list[Job]:
    """All runs, seed by seed, so that an interrupted comparison has complete pairs.

    Methods train at the values that the recipe has from a search if it has them for all of them (`settle_methods`);
    FairnessWarning if some of them have such values and are left without.
    """
    check_distinct(methods)
    if not methods:
        raise RecipeError("expected methods to compare, found none; give --methods, or `methods` in the recipe")
    if recipe.baseline not in [method.label for method in methods]:
        raise RecipeError(f"the baseline {recipe.baseline!r} is not among the methods; add it, or set baseline")
    settled = settle_methods(recipe, methods)
    if settled.unsearched:
        warnings.warn(settled.note, FairnessWarning, stacklevel=2)
    return [
        Job(recipe, method, seed, folder / method.slug / f"seed{seed}", **options)
        for seed in seeds
        for method in settled.methods
    ]


def settings_hash(recipe: Recipe) -> str:
    """Hash of the settings that all runs of a comparison share."""
    return config_hash(recipe.config(MethodSettings(init="default"), 0))


def check_settings(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """comparison.json, if any; RunError if it is of another recipe, or under other settings."""
    path = folder / "comparison.json"
    if not path.exists():
        return {"methods": [], "seeds": []}
    former, settings = read_comparison(path), settings_hash(recipe)
    if (former["recipe"], former["scale"]) != (recipe.name, recipe.scale):
        problem = f"a comparison of {former['recipe']} ({former['scale']}), not of {recipe.name} ({recipe.scale})"
    elif former.get("settings_hash", settings) != settings:
        problem = f"a comparison of {recipe.name} under other settings"
        if runs := sorted(folder.glob("*/seed*/run.json")):
            there = (RunFolder(runs[0].parent).read_record() or {})["config"]
            method = recipe.at_tuned(MethodSettings.model_validate(there["method"] | {"set": {}}))
            problem += describe_change(there, override_recipe(recipe, method).config(method, there["seed"]))
    else:
        return former
    raise RunError(f"{folder} holds {problem}. Give another folder with --folder")


def write_comparison(
    folder: Path, recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], rates: str = ""
) -> None:
    """Write comparison.json; methods and seeds of an earlier call stay listed.

    `rates` says which learning rates the methods have and where those are from.
    """
    former, path = check_settings(folder, recipe), folder / "comparison.json"
    listed = [{"label": method.label, "slug": method.slug} for method in methods]
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "name": recipe.name,
        "title": recipe.title,
        "recipe": recipe.name,
        "scale": recipe.scale,
        "settings_hash": settings_hash(recipe),
        "methods": [*former["methods"], *(row for row in listed if row not in former["methods"])],
        "baseline": recipe.baseline,
        "seeds": sorted({*seeds, *former["seeds"]}),
        "notes": recipe.description,
        **({"rates": rates} if rates else {}),
    }
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_sealed(path, content)


def read_comparison(path: Path) -> dict[str, Any]:
    """comparison.json; RunError if it is not one, or was changed."""
    advice = "Delete it, then run the same command: it is written again, and the runs are kept"
    return read_sealed(path, KIND, advice, ("methods", "seeds", "recipe", "scale"))


# Searched values in a comparison: every method has them, or none has.


class Settled(NamedTuple):
    """Methods as a comparison trains them."""

    methods: tuple[MethodSettings, ...]
    note: str
    """Which learning rates they have and where those are from, for people and for the record."""
    lacking: tuple[str, ...] = ()
    """Methods without a searched value, because of which the others do without theirs."""
    outdated: bool = False
    """Whether searched values are left out because they are of another model or other data."""

    @property
    def unsearched(self) -> bool:
        """Whether searched values of some methods are left out."""
        return self.outdated or bool(self.lacking)


def settle_methods(
    recipe: Recipe, methods: Sequence[MethodSettings], *, but: Collection[str] = (), command: str = ""
) -> Settled:
    """Methods of a comparison at the values that the recipe has from a search, if it has them for all of them.

    If one method has no searched value of a field, and does not set it itself, none gets one: all of them train at the
    recipe's own values, and the note names the ``--tune`` option that searches them, to be added to `command`, by
    default the one that is running. Fields of `but` are searched by the comparison itself.
    """
    methods, tuned, add = tuple(methods), recipe.tuned, f"run {command}" if command else "add"
    if tuned is None or not any(tuned.values.values()):
        return Settled(methods, _describe_recipe(recipe, but, add))
    current = tuned.model_copy(update={"changed": ()})
    found = {method.label: current.find(method) for method in methods}
    fields = sorted({field for values in found.values() for field in values} - set(but))
    if not fields:
        return Settled(methods, _describe_recipe(recipe, but, add))
    own = {field: value_at(recipe, field) for field in fields}
    at_own = ", ".join(f"{field}={show_value(value)}" for field, value in own.items())
    for_all = f"every method trains at the recipe's own {at_own}"
    if tuned.outdated:
        changed = ", ".join(tuned.outdated)
        search = _tune_options({field: around(value) for field, value in own.items()})
        note = (
            f"The values of {', '.join(fields)} that were searched for this recipe ({tuned.record}) are not used, "
            f"since {changed} changed: {for_all}. To compare each method at its best, {add} {search}"
        )
        return Settled(methods, note, outdated=True)
    lacking = [
        method.label
        for method in methods
        if any(field not in method.set and field not in found[method.label] for field in fields)
    ]
    if lacking:
        known = {field: [values[field] for values in found.values() if field in values] for field in fields}
        search = _tune_options({field: sorted_numbers([own[field], *known[field]]) for field in fields})
        note = (
            f"There is no searched value of {', '.join(fields)} for {', '.join(lacking)}, so {for_all}, also those "
            f"that have one ({tuned.record}). To compare each method at its best, {add} {search}"
        )
        return Settled(methods, note, tuple(lacking))
    where = tuned.record
    if tuned.changed:
        where += f", which had other values of {', '.join(tuned.changed)}"
    note = f"Each method trains at its searched value of {', '.join(fields)} ({where})"
    return Settled(tuple(recipe.at_tuned(method, but=but) for method in methods), note)


def describe_rate(recipe: Recipe, method: MethodSettings) -> str:
    """The learning rate of a method in a run by itself, and where it is from."""
    tuned = recipe.tuned
    rate = recipe.at_tuned(method).set.get(RATE, value_at(recipe, RATE))
    if RATE in method.set:
        origin = "as the method sets it"
    elif tuned is not None and RATE in tuned.find(method):
        origin = (
            f"searched for this method ({tuned.record}); `compare` with a method for which none was searched trains "
            f"all at {show_value(value_at(recipe, RATE))}"
        )
    else:
        origin = "of the recipe; none was searched for this method"
        if tuned is not None and tuned.outdated and any(tuned.values.values()):
            origin = f"of the recipe; searched ones are not used, since {', '.join(tuned.outdated)} changed"
    return f"learning rate {show_value(rate)}, {origin}"


def _describe_recipe(recipe: Recipe, but: Collection[str], add: str) -> str:
    if RATE in but:
        return ""
    rate = value_at(recipe, RATE)
    search = _tune_options({RATE: around(rate)})
    return (
        f"Learning rates were not searched: {show_value(rate)} for every method that sets none itself. To compare each "
        f"method at its best, {add} {search}"
    )


def _tune_options(grids: Mapping[str, Sequence[float]]) -> str:
    """Options of `wellcond compare` that search fields, each over its values."""
    return " ".join(f"--tune {field}={','.join(map(show_value, values))}" for field, values in grids.items())


def value_at(recipe: Recipe, path: str) -> Any:
    """The value of a field such as ``optimizer.lr``; None where it is not set."""
    value: Any = recipe.model_dump(include={path.partition(".")[0]})
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def around(value: Any) -> list[float]:
    """A grid of three values around a number, a factor of three apart."""
    return [float(f"{value * factor:.3g}") for factor in (1 / 3, 1, 3)] if is_number(value) else [0.1, 1]


def sorted_numbers(values: Sequence[Any]) -> list[float]:
    """Different numbers among some values, ascending; with neighbours if there is only one."""
    found = sorted({value for value in values if is_number(value)})
    return found if len(found) > 1 else around(found[0] if found else None)


def is_number(value: Any) -> bool:
    """Whether a value is a positive number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def show_value(value: Any) -> str:
    """A value as an option takes it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)

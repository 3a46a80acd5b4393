"""Searched values in a comparison: every method has them, or none has."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe

RATE = "optimizer.lr"


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
    other = [*tuned.settings, *(f"other values of {', '.join(tuned.changed)}" for _ in tuned.changed[:1])]
    where = f"{tuned.record}, which had {', '.join(other)}" if other else tuned.record
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

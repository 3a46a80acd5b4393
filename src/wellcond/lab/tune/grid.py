"""Fields to tune and their values, and how a grid grows at its edges; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wellcond.lab.settings import RecipeError, read_yaml

FIRST_TUNING_SEED = 1000


@dataclass(frozen=True)
class TunedField:
    """A field and the values that every method tries."""

    name: str
    """Of the recipe (``optimizer.lr``) or of a part of methods (``identity.lam``)."""
    values: tuple[float, ...]
    """In ascending order."""


def read_tuned_field(text: str) -> TunedField:
    """`optimizer.lr=3e-4,1e-3` as a field with its values.

    Raises: RecipeError.

    Example:
        >>> read_tuned_field("optimizer.lr=1e-2,1e-3")
        TunedField(name='optimizer.lr', values=(0.001, 0.01))
    """
    name, equals, listed = (part.strip() for part in text.partition("="))
    keys = name.split(".")
    if not equals or len(keys) < 2 or not all(key.isidentifier() for key in keys):
        raise RecipeError(f"--tune: expected FIELD=VALUE,VALUE,... such as optimizer.lr=1e-3,3e-3, found {text!r}")
    values = [read_yaml(value, f"--tune {name}") for value in listed.split(",")]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RecipeError(f"--tune {name}: expected numbers such as 1e-3,3e-3, found {value!r}")
    if len(set(values)) < max(2, len(values)):
        raise RecipeError(f"--tune {name}: expected at least two values, none twice, found {listed!r}")
    return TunedField(name, tuple(sorted(map(_plain, values))))


def read_tuned_fields(texts: Sequence[str]) -> tuple[TunedField, ...]:
    """All fields to tune.

    Raises: RecipeError.
    """
    fields = tuple(read_tuned_field(text) for text in texts)
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(
                f"--tune: expected every field once, found {name} twice; list all its values in one --tune"
            )
    return fields


def extend_grid(values: Sequence[float], *, upwards: bool) -> float | None:
    """The value beyond one end of a grid, by the mean factor between its values, to three digits.

    None for a grid that ends at zero or below, which cannot grow by a factor.

    Example:
        >>> extend_grid([0.001, 0.003, 0.01], upwards=True), extend_grid([1, 5, 25], upwards=False)
        (0.0316, 0.2)
        >>> extend_grid([0, 0.1, 0.2], upwards=False) is None
        True
    """
    positive = [value for value in values if value > 0]
    edge = max(values) if upwards else min(values)
    if len(positive) < 2 or edge <= 0:
        return None
    factor = (max(positive) / min(positive)) ** (1 / (len(positive) - 1))
    return _plain(float(f"{edge * factor if upwards else edge / factor:.3g}"))


def _plain(value: float) -> float:
    """25.0 as 25, which fields of whole numbers take too."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else value

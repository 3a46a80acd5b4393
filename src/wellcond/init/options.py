"""Values of a method's options, checked against its signature: before a model is there, and before one is touched.

An annotation says what a value may be: numbers are finite, ``Literal`` lists choices, ``PositiveFloat`` is a range.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from wellcond.errors import WeightError, check_choice


@dataclass(frozen=True)
class Range:
    """Numbers that satisfy a condition, in words."""

    words: str
    holds: Callable[[Any], bool]


ABOVE_ZERO = Range("above 0", lambda number: number > 0)
WORDS = {float: "a finite number", int: "a whole number", bool: "True or False", str: "text", types.NoneType: "None"}
PositiveFloat = Annotated[float, ABOVE_ZERO]


def check_values(method: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Raise for an option whose value is not of the type, the choices or the range that a method declares.

    Args:
        method: its keyword arguments are the options; options that it does not have are passed over.
        name: of the method, for messages.
        options: their values.

    Raises:
        UnknownChoiceError: none of the choices, which are listed.
        WeightError: another type, a number that is not finite or out of range.
    """
    hints = get_type_hints(method, include_extras=True)
    for option, value in options.items():
        if option not in hints:
            continue
        if get_origin(hints[option]) is Literal and isinstance(value, (str, int, float)):
            check_choice(option, value, get_args(hints[option]))
        if not _fits(value, hints[option]):
            lost = ", which is not finite" if isinstance(value, float) and not math.isfinite(value) else ""
            raise WeightError(f"{option} of {name!r}: expected {_said(hints[option])}, got {value!r}{lost}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Annotated:
        return _fits(value, arguments[0]) and all(rule.holds(value) for rule in arguments[1:])
    if origin is Literal:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in arguments)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(part, arguments[0]) for part in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, hint)


def _said(hint: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_said(one) for one in arguments)
    if origin is Annotated:
        return " ".join([_said(arguments[0]), *(rule.words for rule in arguments[1:])])
    if origin is Literal:
        return "one of " + ", ".join(repr(one) for one in arguments)
    if origin is tuple:
        return f"a list of {_said(arguments[0])}"
    if origin is not None:
        return f"a mapping of {_said(arguments[0])} to {_said(arguments[1])}"
    return WORDS.get(hint) or f"a {hint.__name__}"

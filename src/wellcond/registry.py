"""The methods of `init_` and `condition_` by name, and the options of a method.

A method is a function with a decorator; its keyword arguments are its options. The registry is the only list of
methods: those of wellcond are found in the files of their package, users add theirs with the same decorator.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import types
from collections import UserDict
from collections.abc import Callable, Mapping
from numbers import Integral, Number, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from wellcond.errors import OptionError, UnknownChoiceError, check_choice

Method = Callable[..., Any]


class Registry(UserDict[str, Method]):
    """Methods of a verb by name; the first look imports the files of the verb's package, which register theirs."""

    def __init__(self, verb: str, kind: str, meaning: str, package: str) -> None:
        """Name the verb and say what its methods are, for messages."""
        self.verb = verb
        self.kind = kind
        self.meaning = meaning
        self.package = package
        self._methods: dict[str, Method] = {}
        self._complete = False

    @property
    def data(self) -> dict[str, Method]:  # type: ignore[override]
        """All methods: those of the package and those that users have added."""
        if not self._complete:
            package = importlib.import_module(self.package)
            for file in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{file.name}")
            self._complete = True
        return self._methods

    def register(self, name: str, method: Method) -> None:
        """Add a method; a user's may replace a user's, as when a cell of a notebook runs again.

        Raises: OptionError for a name that a method of wellcond has, or that is no name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(f"name of a method: expected a word such as 'my_method', got {name!r}", found=name)
        if not _is_ours(method):
            for registry in (INITIALISATIONS, CORRECTIONS):
                if name in registry and (registry is not self or _is_ours(registry[name])):
                    raise OptionError(f"{name!r} is {registry.meaning}, already; choose another name", found=name)
        self._methods[name] = method

    def check(self, name: object, *, instead: str = 'wellcond.{verb}(model, "{name}")') -> None:
        """Raise UnknownChoiceError for a name that no method has; a method of the other verb is recognised.

        Args:
            name: what was asked for.
            instead: what to type for a method of the other verb.
        """
        if isinstance(name, str) and name in self:
            return
        other = CORRECTIONS if self is INITIALISATIONS else INITIALISATIONS
        advice = ""
        if isinstance(name, str) and name in other:
            advice = f"{name!r} is {other.meaning}: use {instead.format(verb=other.verb, name=name)}"
        raise UnknownChoiceError(self.kind, name, sorted(self), advice=advice)


def _is_ours(method: Method) -> bool:
    return getattr(method, "__module__", "").partition(".")[0] == "wellcond"


INITIALISATIONS = Registry(
    "init_", "initialisation method", "an initialisation, written once before training", "wellcond.init"
)
CORRECTIONS = Registry(
    "condition_", "conditioning method", "a correction in every forward pass", "wellcond.conditioning"
)


# Options: the keyword arguments of a method. An annotation says what a value may be: numbers are finite, Literal lists
# choices.


PositiveFloat = Annotated[float, "above 0"]
PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    float: (
        "a finite number",
        lambda value: isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value),
    ),
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    types.NoneType: ("None", lambda value: value is None),
}


def options_of(method: Method) -> dict[str, inspect.Parameter]:
    """Keyword arguments of a method by name."""
    parameters = inspect.signature(method).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def with_defaults(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all options of a method: those given, and the defaults of the others."""
    return {name: options.get(name, parameter.default) for name, parameter in options_of(method).items()}


def check_names(method: Method, name: str, options: Mapping[str, Any]) -> None:
    """Raise UnknownChoiceError for an option that a method does not have, OptionError if one is missing."""
    known = options_of(method)
    for option in options:
        if option not in known:
            raise UnknownChoiceError(f"option of {name!r}", option, list(known))
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise OptionError(f"{name!r} needs the option {option}=")


def check_values(method: Method, name: str, options: Mapping[str, Any]) -> None:
    """Raise for an option whose value is not of the type, the choices or the range that a method declares.

    Args:
        method: options that it does not have, and annotations that mean nothing here, are passed over.
        name: of the method, for messages.
        options: their values.

    Raises:
        UnknownChoiceError: none of the choices, which are listed.
        OptionError: another type, a number that is not finite or out of range.
    """
    try:
        hints = get_type_hints(method, include_extras=True)
    except NameError:  # names that only a type checker imports
        return
    for option, value in options.items():
        if option not in hints:
            continue
        hint = hints[option]
        if get_origin(hint) is Literal and isinstance(value, (str, int, float)):
            check_choice(option, value, get_args(hint))
        words, fits = _rule(hint)
        if not fits(value):
            lost = ", which is not finite" if isinstance(value, float) and not math.isfinite(value) else ""
            text = f"{option} of {name!r}: expected {words}, got {value!r}{lost}"
            raise OptionError(text, expected=words, found=value)


def _rule(hint: Any) -> tuple[str, Callable[[Any], bool]]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        rules = [_rule(part) for part in parts]
        return " or ".join(words for words, _ in rules), lambda value: any(fits(value) for _, fits in rules)
    if origin is Annotated:
        words, fits = _rule(parts[0])
        if hint != PositiveFloat:
            return words, fits
        return f"{words} above 0", lambda value: fits(value) and value > 0
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts)), lambda value: any(_equal(value, part) for part in parts)
    if origin in (tuple, list):
        words, fits = _rule(parts[0])
        return f"a list of {words}", lambda value: isinstance(value, (list, tuple)) and all(map(fits, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        (key_words, key_fits), (words, fits) = (_rule(part) for part in parts)
        return (
            f"a mapping of {key_words} to {words}",
            lambda value: (
                isinstance(value, Mapping) and all(key_fits(key) and fits(item) for key, item in value.items())
            ),
        )
    if hint in PLAIN or not isinstance(hint, type):
        return PLAIN.get(hint, PLAIN[Any])
    return f"a {hint.__name__}", lambda value: isinstance(value, hint)


def _equal(value: Any, choice: Any) -> bool:
    same_kind = isinstance(value, (str, Number)) and isinstance(value, bool) == isinstance(choice, bool)
    return same_kind and value == choice

"""What a user may pass: checks of arguments, the methods of `init_` and `condition_` by name, and their options.

An error says what was expected, what was found and what to do, before anything happens. A method is a function with a
decorator; its keyword arguments are its options. The registry is the only list of methods: those of wellcond are found
in the files of their package, users add theirs with the same decorator.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import operator
import pkgutil
import sys
import types
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from wellcond.errors import OptionError, UnknownChoiceError

if TYPE_CHECKING:  # the command line checks its arguments before it loads torch
    from torch import Tensor

HINTS = {
    str: "; build the model first, for example with timm.create_model(name) or AutoModel.from_pretrained(name)",
    type: "; give an instance of the class",
    dict: "; build the model and call load_state_dict",
}
SHAPES = {1: "a vector", 2: "a matrix", 3: "several matrices"}


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe(value: object) -> str:
    """A value in an error message: its type, and its shape or its beginning."""
    if _is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"  # type: ignore[attr-defined]
    shown = repr(value).splitlines()[0][:60]
    return f"{type(value).__name__} {shown}"


def check_model(model: object) -> None:
    """Raise TypeError unless this is a module."""
    from torch import nn

    if not isinstance(model, nn.Module):
        hint = next((text for kind, text in HINTS.items() if isinstance(model, kind)), "")
        raise TypeError(f"model: expected a torch.nn.Module, got {describe(model)}{hint}")


def check_batch(batch: object) -> None:
    """Raise TypeError for what no model is called with, ValueError for a batch without samples."""
    if batch is None or isinstance(batch, (str, bytes, numbers.Number)):
        raise TypeError(
            "batch: expected what the model is called with: a tensor, a mapping of keyword arguments, a tuple of "
            f"arguments or a function of the model, got {describe(batch)}"
        )
    if _is_tensor(batch) and batch.numel() == 0:  # type: ignore[attr-defined]
        raise ValueError(f"batch: expected at least one sample, got {describe(batch)}")


def check_int(name: str, value: Any, *, at_least: int | None = None) -> int:
    """The value as an int; a bool or a float is none, whatever its value.

    Raises: TypeError, ValueError.
    """
    if isinstance(value, bool) or _is_tensor(value) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {describe(value)}")
    found = operator.index(value)
    if at_least is not None and found < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {found}")
    return found


def check_ints(name: str, values: Any, *, at_least: int | None = None) -> list[int]:
    """The values as a list of ints.

    Raises: TypeError, ValueError.
    """
    if isinstance(values, (str, bytes)) or _is_tensor(values) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of whole numbers such as [0, 2], got {describe(values)}")
    return [check_int(name, value, at_least=at_least) for value in values]


def check_number(
    name: str, value: Any, *, at_least: float | None = None, below: float | None = None, finite: bool = True
) -> float:
    """The value as a float; a bool is none.

    Raises: TypeError, ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    try:
        found = float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that float64 can hold, got {describe(value)}") from error
    if math.isnan(found) or (finite and math.isinf(found)):
        raise ValueError(f"{name}: expected a finite number, got {found}")
    if (at_least is not None and found < at_least) or (below is not None and not found < below):
        upper = "" if below is None else f" and below {below:g}"
        raise ValueError(f"{name}: expected at least {at_least:g}{upper}, got {found:g}")
    return found


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless this is True or False (numpy's too)."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")


def check_tensor(name: str, value: Any, dims: Sequence[int] = ()) -> None:
    """Raise TypeError unless this is a tensor of real numbers that are there, ValueError for other dimensions or none.

    Args:
        name: of the argument.
        value: what was given.
        dims: numbers of dimensions that it may have; any if empty.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        hint = "; torch.as_tensor(...) makes one" if hasattr(value, "__array__") or isinstance(value, list) else ""
        raise TypeError(f"{name}: expected a tensor, got {describe(value)}{hint}")
    if value.dtype.is_complex:
        raise TypeError(f"{name}: expected real numbers, got {describe(value)}")
    if value.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor, got {describe(value)} in layout {value.layout}; use to_dense()"
        )
    if value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{name}: expected numbers, got {describe(value)} on the meta device, which has none")
    if dims and value.dim() not in dims:
        expected = " or ".join(SHAPES[number] for number in dims)
        raise ValueError(f"{name}: expected {expected}, got {describe(value)}")
    if value.numel() == 0:
        raise ValueError(f"{name}: expected at least one entry, got {describe(value)}")


def check_mapping(name: str, value: Any) -> None:
    """Raise TypeError unless this is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a mapping, got {describe(value)}")


def check_biases(biases: object) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Biases of q, k and v.

    Raises: TypeError, ValueError for anything but three tensors or Nones.
    """
    if biases is None:
        return None, None, None
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise TypeError("biases: expected a tuple of three, of q, k and v, each a tensor or None")
    for role, bias in zip("qkv", biases, strict=True):
        if bias is not None:
            check_tensor(f"biases, of {role}", bias, (1, 2) if role == "q" else (1,))
    b_q, b_k, b_v = biases
    return b_q, b_k, b_v


def check_choice(what: str, got: object, choices: Sequence[object]) -> None:
    """Raise `UnknownChoiceError` unless `got` is one of `choices`."""
    try:
        known = got in choices
    except (RuntimeError, ValueError):  # tensors and arrays compare entry by entry
        known = False
    if not known:
        raise UnknownChoiceError(what, got, choices)


# Methods by name


Method = Callable[..., Any]


class Registry(UserDict[str, Method]):
    """Methods of a verb by name; the first look imports the files of the verb's package, which register theirs."""

    def __init__(self, verb: str, kind: str, meaning: str, package: str) -> None:
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
# choices


PositiveFloat = Annotated[float, "above 0"]
PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    float: (
        "a finite number",
        lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value),
    ),
    int: ("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
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
    same_kind = isinstance(value, (str, numbers.Number)) and isinstance(value, bool) == isinstance(choice, bool)
    return same_kind and value == choice

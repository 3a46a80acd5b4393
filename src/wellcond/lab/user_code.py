"""Code that a user brings to a comparison: models and methods as functions, and files to import.

It comes from the user's own call or command, never from a recipe's file or a record. Every process that trains gets it
with its job.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

from wellcond.arguments import CORRECTIONS, INITIALISATIONS, check_names, check_values
from wellcond.errors import OptionError, RecipeError

MODELS: dict[str, Callable[..., Any]] = {}
"""Functions that return a model, by the name after ``python:`` in `model.name`."""
METHODS: dict[str, Callable[..., Any]] = {}
"""Functions that change a model, by the name that methods have."""
GIVEN = ("generator", "batch")
"""Keyword arguments of such a function that are no options of the method; see docs/extend/own-comparison.md."""
_IMPORTED: dict[Path, ModuleType] = {}


@dataclass(frozen=True)
class UserCode:
    """What a job needs besides its recipe."""

    files: tuple[Path, ...] = ()
    """Python files that register methods, or define functions that are methods."""
    models: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    data: tuple[Any, Any] | None = None
    """Settings of data that were given as an object, and the data."""

    def install(self) -> None:
        """Make it known in this process."""
        for file in self.files:
            import_file(file)
        MODELS.update(self.models)
        METHODS.update(self.methods)
        if self.data is not None:
            from wellcond.lab.data.own import hold_again

            hold_again(*self.data)

    def find_obstacle(self) -> str:
        """Why another process cannot get it, such as a lambda; empty if it can."""
        for name, value in {**self.models, **self.methods, "data": self.data}.items():
            try:
                ForkingPickler.dumps(value)
            except Exception as error:  # pickling raises what it likes
                return f"{name} cannot be sent to another process ({type(error).__name__}: {error})"
        return ""


def import_file(path: Path) -> ModuleType:
    """Import a Python file once per process; functions that it defines can be named as methods.

    Raises: OptionError if it cannot be read, or raises an error.
    """
    path = path.resolve()
    if path in _IMPORTED:
        return _IMPORTED[path]
    spec = importlib.util.spec_from_file_location(f"wellcond_user_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise OptionError(f"expected a Python file to import, found {path}", found=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise OptionError(f"{path} cannot be imported: {type(error).__name__}: {error}", found=path) from error
    for name, value in vars(module).items():
        taken = name in INITIALISATIONS or name in CORRECTIONS
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_" and not taken:
            METHODS[name] = value
    _IMPORTED[path] = module
    return module


def name_of(function: Callable[..., Any], known: Iterable[str] = ()) -> str:
    """A word that names a function in recipes, folders and tables.

    Raises: OptionError if it has no such name, or one that is `known` already.
    """
    name = getattr(function, "__name__", type(function).__name__)
    name = "lambda_function" if name == "<lambda>" else name
    if not name.isidentifier() or name in known:
        reason = "another method has that name" if name in known else "it is no word"
        raise OptionError(f"expected a function with a name of its own, found {name!r}: {reason}", found=name)
    return name


def takes(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Names of the arguments that a function takes, and whether it takes any others."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}, any(
        one.kind is one.VAR_KEYWORD for one in parameters
    )


def choose_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], offered: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Arguments for a function that builds a model.

    Args:
        function: whose signature decides.
        given: what the recipe says, all of it.
        offered: what the data ask for, in the words of each library; the function gets those that it names or, if it
            takes any (``**arguments``) and names none, those of the first library.
    """
    names, takes_any = takes(function)
    everything = {name: value for words in offered.values() for name, value in words.items()}
    chosen = {name: value for name, value in everything.items() if name in names}
    if takes_any and not chosen:
        chosen = dict(next(iter(offered.values())))
    return chosen | dict(given)


def check_method(name: str, options: Mapping[str, Any]) -> None:
    """Raise OptionError for options that a user's method does not take, or that are missing or of another type."""
    function = METHODS[name]
    if taken := [key for key in GIVEN if key in options]:
        raise OptionError(f"{taken[0]} of {name!r} is no option: every run gives its own", found=taken[0])
    given = dict.fromkeys(key for key in GIVEN if key in takes(function)[0])
    check_names(function, name, {**options, **given})
    check_values(function, name, options)


def apply_method(function: Callable[..., Any], model: Any, options: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Call a user's method; it changes the model in place, or returns the changed one.

    Raises: RecipeError for options that it does not take, and for whatever it raises.
    """
    names, _ = takes(function)
    offered = {name: value for name, value in given.items() if name in names}
    try:
        changed = function(model, **offered, **options)
    except Exception as error:  # the user's code
        name = getattr(function, "__name__", "the method")
        raise RecipeError(f"method {name}: {type(error).__name__}: {error}") from error
    return model if changed is None else changed

"""A method of a comparison: an initialisation, a conditioning, or one after the other.

In text: ``default``, ``conditioned``, ``identity(lam=10)``, ``conditioned+balanced(target=1.5)``.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import yaml
from pydantic import Field, model_validator
from torch import nn

from wellcond.conditioning.apply import condition_, make_method
from wellcond.conditioning.methods import METHODS as CONDITIONS
from wellcond.errors import NumericalWarning, WellcondError
from wellcond.experiments.settings import RecipeError, Settings, suggest
from wellcond.init.apply import check_options, init_
from wellcond.init.plan import METHODS as INITS


class MethodSettings(Settings):
    """How the attention starts and what acts on it in every forward pass."""

    label: str = ""
    init: str = "default"
    init_options: dict[str, Any] = Field(default_factory=dict)
    condition: str | None = None
    condition_options: dict[str, Any] = Field(default_factory=dict)
    projections: str = "qkv"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        return parse_method(values) if isinstance(values, str) else values

    @model_validator(mode="after")
    def _exists(self) -> MethodSettings:
        if self.init not in INITS:
            raise ValueError(f"unknown initialisation {self.init!r}{suggest(self.init, sorted(INITS))}")
        if self.condition is not None and self.condition not in CONDITIONS:
            raise ValueError(f"unknown conditioning {self.condition!r}{suggest(self.condition, sorted(CONDITIONS))}")
        try:
            check_options(self.init, self.init_options)
            if self.condition is not None:
                make_method(self.condition, self.condition_options)
        except WellcondError as error:
            raise ValueError(str(error)) from error
        if not self.label:
            object.__setattr__(self, "label", self.canonical())
        return self

    def canonical(self) -> str:
        """The method as text that `parse_method` reads."""
        parts = [] if self.init == "default" and self.condition else [_call(self.init, self.init_options)]
        if self.condition:
            parts.append(_call(self.condition, self.condition_options))
        return "+".join(parts)

    @property
    def slug(self) -> str:
        """Name of its folder."""
        return slug(self.label)

    def apply_(self, model: nn.Module, *, seed: int) -> nn.Module:
        """Initialise and condition a freshly built model; `default` leaves it as its library made it."""
        if self.init != "default" or self.init_options:
            init_(model, self.init, generator=torch.Generator().manual_seed(seed), **self.init_options)
        if self.condition is not None:
            with warnings.catch_warnings():
                # The report shows the saturation that this warns of, from the measured entropy.
                warnings.simplefilter("ignore", NumericalWarning)
                condition_(model, self.condition, projections=self.projections, **self.condition_options)
        return model


def slug(label: str) -> str:
    """A file name for a label; labels that differ give names that differ.

    Example:
        >>> slug("identity(lam=10)"), slug("conditioned+balanced")
        ('identity-lam-10', 'conditioned-balanced')
    """
    plain = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")
    if re.sub(r"[()+=, ]+", "-", label).strip("-") == plain:
        return plain
    return f"{plain or 'method'}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def _call(name: str, options: dict[str, Any]) -> str:
    written = ", ".join(f"{key}={_plain(value)}" for key, value in options.items())
    return f"{name}({written})" if options else name


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def split_top_level(text: str, separator: str) -> list[str]:
    """Split, but not inside brackets.

    Example:
        >>> split_top_level("default,identity(lam=2, layout=joint),polar", ",")
        ['default', 'identity(lam=2, layout=joint)', 'polar']
    """
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()]


def parse_method(text: str) -> dict[str, Any]:
    """Fields of `MethodSettings` from text.

    Raises: ValueError for text that names no method, or two of the same kind.

    Example:
        >>> parse_method("conditioned+identity(lam=2)")["condition_options"]
        {'lam': 2}
    """
    fields: dict[str, Any] = {"label": text.strip()}
    for part in split_top_level(text, "+"):
        matched = re.fullmatch(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?", part, flags=re.DOTALL)
        if matched is None:
            raise ValueError(f"expected a method such as conditioned or identity(lam=10), found {part!r}")
        name, options = matched[1], _options(matched[2] or "", part)
        kind = "condition" if name in CONDITIONS else "init"
        if name not in CONDITIONS and name not in INITS:
            raise ValueError(f"unknown method {name!r}{suggest(name, [*sorted(INITS), *sorted(CONDITIONS)])}")
        if kind in fields:
            raise ValueError(f"{text!r} names two methods of the same kind: {fields[kind]} and {name}")
        fields[kind], fields[f"{kind}_options"] = name, options
    return fields


def _options(text: str, part: str) -> dict[str, Any]:
    options = {}
    for pair in split_top_level(text, ",") if text.strip() else []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"expected options such as lam=10 in {part!r}, found {pair!r}")
        options[key.strip()] = yaml.safe_load(value)
    return options


def parse_methods(text: str) -> tuple[MethodSettings, ...]:
    """A comma-separated list of methods.

    Raises: RecipeError.
    """
    from pydantic import ValidationError

    methods = []
    for part in split_top_level(text, ","):
        try:
            methods.append(MethodSettings.model_validate(part))
        except ValidationError as error:
            raise RecipeError(f"--methods: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    check_distinct(methods)
    return tuple(methods)


def check_distinct(methods: Sequence[MethodSettings]) -> None:
    """Raise RecipeError if two methods would share a label or a folder."""
    for field in ("label", "slug"):
        names = [getattr(method, field) for method in methods]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RecipeError(f"expected every method once, found {twice[0]!r} twice; give them different labels")

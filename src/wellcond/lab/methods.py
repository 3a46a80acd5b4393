"""A method of a comparison: an initialisation, a conditioning, or one after the other, and scales of the tokens.

In text: ``default``, ``conditioned``, ``identity(lam=10)``, ``conditioned+balanced(target=1.5)``,
``conditioned(sites="blocks.*")``, ``tokens(positions=25)+gaussian``. ``conditioned+set(optimizer.lr=3e-3)`` changes
fields of the recipe for this method.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError, field_validator, model_validator
from torch import nn

from wellcond.attention.checks import choose_projections
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.conditioning.apply import condition_, make_method
from wellcond.conditioning.methods import METHODS as CONDITIONS
from wellcond.errors import EvidenceWarning, NumericalWarning, WellcondError
from wellcond.init.apply import check_names, check_options, init_
from wellcond.init.options import check_values
from wellcond.init.plan import METHODS as INITS
from wellcond.lab.method_text import read_calls, split_methods, write_call
from wellcond.lab.models.teachers import OPTIONS as TEACHER_OPTIONS
from wellcond.lab.models.teachers import Build, check_teacher, pin_teacher, selection_options
from wellcond.lab.models.token_scales import check_factors, scale_tokens_
from wellcond.lab.settings import RecipeError, Settings, suggest


class MethodSettings(Settings):
    """How the attention starts and what acts on it in every forward pass."""

    label: str = ""
    init: str = "default"
    init_options: dict[str, Any] = Field(default_factory=dict)
    condition: str | None = None
    condition_options: dict[str, Any] = Field(default_factory=dict)
    projections: str = "qkv"
    sites: str = "*"
    """Pattern of the names of the attentions that it acts on, such as ``blocks.*``."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields of the recipe that this method changes, such as ``optimizer.lr``; see `override_recipe`."""
    tokens: dict[str, Any] = Field(default_factory=dict)
    """Factors on the start's ``embeddings`` (of words or patches) and ``positions``."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        return parse_method(values) if isinstance(values, str) else values

    @field_validator("set")
    @classmethod
    def _in_one_order(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: _whole(fields[name]) for name in sorted(fields)}

    @field_validator("init_options", "condition_options", "tokens")
    @classmethod
    def _plain_numbers(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {name: _whole(value) for name, value in options.items()}

    @field_validator("tokens")
    @classmethod
    def _factors(cls, factors: dict[str, Any]) -> dict[str, Any]:
        return check_factors(factors)

    @model_validator(mode="after")
    def _exists(self) -> MethodSettings:
        if self.init not in INITS:
            raise ValueError(f"unknown initialisation {self.init!r}{suggest(self.init, sorted(INITS))}")
        if self.condition is not None and self.condition not in CONDITIONS:
            raise ValueError(f"unknown conditioning {self.condition!r}{suggest(self.condition, sorted(CONDITIONS))}")
        try:
            self._check_init()
            if self.condition is not None:
                make_method(self.condition, self.condition_options)
                check_values(CONDITIONS[self.condition], self.condition, self.condition_options)
            object.__setattr__(self, "projections", choose_projections(self.projections))
        except WellcondError as error:
            raise ValueError(str(error)) from error
        if self.condition is None and (self.condition_options or self.projections != "qkv"):
            raise ValueError("condition_options and projections belong to a condition, which is missing")
        if not self.label:
            object.__setattr__(self, "label", self.canonical())
        return self

    def _check_init(self) -> None:
        if self.init == "default" and "library" in self.init_options:
            if self.init_options != {"library": True}:
                raise ValueError(
                    "default(library=true) is the start of the library, which takes no other value and no other option"
                )
            return
        if self.init != "weight_selection":
            check_options(self.init, self.init_options)
            return
        # The teacher is a path here, and a model only when the method is applied.
        check_names(
            self.init, {name: value for name, value in self.init_options.items() if name not in TEACHER_OPTIONS}
        )
        check_teacher(self.init_options)

    @property
    def library(self) -> bool:
        """Whether it asks for the start of the model's library, whatever the recipe is a proxy for."""
        return "library" in self.init_options

    def canonical(self) -> str:
        """The method as text that `parse_method` reads."""
        untouched = self.init == "default" and not self.init_options
        where = {} if self.sites == "*" else {"sites": self.sites}
        parts = [write_call("tokens", self.tokens)] if self.tokens else []
        if not untouched or not (self.condition or (self.tokens and not where)):
            parts.append(write_call(self.init, self.init_options | where))
        if self.condition:
            chosen = {} if self.projections == "qkv" else {"projections": self.projections}
            parts.append(write_call(self.condition, self.condition_options | chosen | where))
        parts += [write_call("set", self.set)] if self.set else []
        return "+".join(parts)

    @property
    def slug(self) -> str:
        """Name of its folder."""
        return slug(self.label)

    def pinned(self, base: Path | None) -> MethodSettings:
        """The same method with the digest of its teacher, if it has one and does not name it."""
        if self.init != "weight_selection" or "teacher_sha256" in self.init_options:
            return self
        return self.model_copy(update={"init_options": pin_teacher(self.init_options, base)})

    def apply_(
        self,
        model: nn.Module,
        *,
        seed: int,
        base: Path | None = None,
        build: Build | None = None,
        forward: Callable[[nn.Module], Any] | None = None,
    ) -> nn.Module:
        """Initialise and condition a freshly built model; `default` leaves it as its library made it.

        Args:
            model: initialised and conditioned in place.
            seed: of the initialisation.
            base: folder that the path of a teacher starts from.
            build: builds a teacher; see `load_teacher`.
            forward: calls the model on samples of the training set, for starts that are calibrated on data.
        """
        sites = self._chosen(model)
        if self.init == "weight_selection":
            options = selection_options(self.init_options, base, build)
            try:
                init_(model, self.init, sites=sites, **options)
            except WellcondError as error:
                raise RecipeError(f"weight_selection from {self.init_options['teacher']}: {error}") from error
        elif self.init != "default" or (self.init_options and not self.library):
            options = self.init_options | ({"batch": forward} if self.init == "calibrated" else {})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EvidenceWarning)  # a comparison shows whether it is so
                init_(model, self.init, sites=sites, generator=torch.Generator().manual_seed(seed), **options)
        if self.tokens:
            scale_tokens_(model, self.tokens)
        if self.condition is not None:
            with warnings.catch_warnings():
                # The report shows the saturation that this warns of, from the measured entropy.
                warnings.simplefilter("ignore", NumericalWarning)
                condition_(model, self.condition, sites=sites, projections=self.projections, **self.condition_options)
        return model

    def _chosen(self, model: nn.Module) -> list[AttentionSite] | None:
        if self.sites == "*":
            return None
        found = find_attention(model)
        chosen = [site for site in found if fnmatch.fnmatchcase(site.name, self.sites)]
        if not chosen:
            names = ", ".join(site.name for site in found[:4])
            raise RecipeError(
                f"sites: expected a pattern of names such as {names}, found {self.sites!r}, which fits none"
            )
        return chosen


# Of these, the number of words tells the form: 1 a, 2 a+b, odd a(k=v, ...), even a+b(k=v, ...). So no two of them give
# the same words; every other label gets a hash.
_WORD = r"[a-z0-9](?:[a-z0-9._]*[a-z0-9])?"
PLAIN_LABEL = re.compile(rf"{_WORD}(?:\+{_WORD})?(?:\({_WORD}={_WORD}(?:, {_WORD}={_WORD})*\))?")


def slug(label: str) -> str:
    """A file name for a label; labels that differ give names that differ.

    Example:
        >>> slug("identity(lam=10)"), slug("conditioned+balanced")
        ('identity-lam-10', 'conditioned-balanced')
    """
    plain = re.sub(r"[^a-z0-9._]+", "-", label.lower()).strip("-._")[:80]
    if len(label) <= 80 and PLAIN_LABEL.fullmatch(label):
        return plain
    return f"{plain or 'method'}-{hashlib.sha256(label.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"


def _whole(value: Any) -> Any:
    """10.0 as 10, since they are the same setting; also inside lists and mappings."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def parse_method(text: str) -> dict[str, Any]:
    """Fields of `MethodSettings` from text.

    Raises: ValueError for text that names no method, or two of the same kind.

    Example:
        >>> parse_method("conditioned+identity(lam=2)")["condition_options"]
        {'lam': 2}
    """
    fields: dict[str, Any] = {"label": text.strip()}
    for name, options in read_calls(text):
        if name in ("set", "tokens"):
            if name in fields or not options:
                example = "optimizer.lr=3e-3" if name == "set" else "positions=25"
                raise ValueError(f"expected one {name} with values such as {example}, found {text!r}")
            fields[name] = options
            continue
        kind = "condition" if name in CONDITIONS else "init"
        if name not in CONDITIONS and name not in INITS:
            known = [*sorted(INITS), *sorted(CONDITIONS), "tokens", "set"]
            raise ValueError(f"unknown method {name!r}{suggest(name, known)}")
        if kind in fields:
            raise ValueError(f"{text!r} names two methods of the same kind: {fields[kind]} and {name}")
        if kind == "condition" and "projections" in options:
            fields["projections"] = options.pop("projections")
        if "sites" in options:
            if fields.setdefault("sites", options["sites"]) != options["sites"]:
                raise ValueError(f"{text!r} names two patterns of sites; expected one for both methods")
            del options["sites"]
        fields[kind], fields[f"{kind}_options"] = name, options
    return fields


def parse_methods(text: str) -> tuple[MethodSettings, ...]:
    """A comma-separated list of methods.

    Raises: RecipeError.
    """
    try:
        methods = [MethodSettings.model_validate(part) for part in split_methods(text)]
    except ValidationError as error:
        raise RecipeError(f"--methods: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    except ValueError as error:
        raise RecipeError(f"--methods: {error}") from error
    check_distinct(methods)
    return tuple(methods)


def check_distinct(methods: Sequence[MethodSettings]) -> None:
    """Raise RecipeError if two methods would share a label or a folder, or are the same under two labels."""
    for field in ("label", "slug"):
        names = [getattr(method, field) for method in methods]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RecipeError(f"expected every method once, found {twice[0]!r} twice; give them different labels")
    for first, second in itertools.combinations(methods, 2):
        if first.model_dump(exclude={"label"}) == second.model_dump(exclude={"label"}):
            raise RecipeError(f"expected every method once, but {first.label!r} and {second.label!r} are the same")

"""A method of a comparison: an initialisation, a conditioning, or one after the other, and scales of the tokens.

In text: ``default``, ``conditioned``, ``identity(lam=10)``, ``conditioned+balanced(target=1.5)``,
``conditioned(sites="blocks.*")``, ``tokens(positions=25)+gaussian``. ``conditioned+set(optimizer.lr=3e-3)`` changes
fields of the recipe for this method, and so do the words of `wellcond.lab.acting`: ``default+qk_clip(tau=50)``.
"""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, model_validator
from torch import nn

from wellcond.arguments import CORRECTIONS as CONDITIONS
from wellcond.arguments import INITIALISATIONS as INITS
from wellcond.arguments import check_choice, check_names, check_values
from wellcond.attention.checks import choose_projections
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.conditioning.apply import condition_
from wellcond.conditioning.methods import make_method
from wellcond.errors import EvidenceWarning, NumericalWarning, RecipeError, WellcondError
from wellcond.init.apply import check_options, init_, takes_batch
from wellcond.lab.acting import ACTING, fields_of, only_option
from wellcond.lab.models.changes import check_factors, scale_tokens_
from wellcond.lab.settings import Settings, list_problems, plain_numbers, read_yaml
from wellcond.lab.user_code import METHODS, apply_method, check_method

# Of these, the number of words tells the form: 1 a, 2 a+b, odd a(k=v, ...), even a+b(k=v, ...). So no two of them give
# the same words; every other label gets a hash.
_WORD = r"[a-z0-9](?:[a-z0-9._]*[a-z0-9])?"
PLAIN_LABEL = re.compile(rf"{_WORD}(?:\+{_WORD})?(?:\({_WORD}={_WORD}(?:, {_WORD}={_WORD})*\))?")
LARGEST = torch.finfo(torch.float32).max


def _check_size(options: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a number that the weights of a run, in float32, cannot hold."""
    waiting = list(options.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, (list, tuple)):
            waiting += [(name, part) for part in value]
        elif isinstance(value, (int, float)) and LARGEST < abs(value) < math.inf:
            raise ValueError(f"{name}: expected at most {LARGEST:.2g}, the largest number of float32, found {value!r}")
    return options


Options = Annotated[dict[str, Any], AfterValidator(plain_numbers), AfterValidator(_check_size)]


class MethodSettings(Settings):
    """How the attention starts and what acts on it in every forward pass."""

    label: str = ""
    init: str = "default"
    init_options: Options = {}
    condition: str | None = None
    condition_options: Options = {}
    projections: Annotated[str, AfterValidator(choose_projections)] = "qkv"
    sites: str = "*"
    """Pattern of the names of the attention layers that it acts on, such as ``blocks.*``."""
    set: Annotated[Options, AfterValidator(lambda fields: dict(sorted(fields.items())))] = {}
    """Fields of the recipe that this method changes, such as ``optimizer.lr``; see `override_recipe`."""
    tokens: Annotated[Options, AfterValidator(check_factors)] = {}
    """Factors on the start's ``embeddings`` (of words or patches) and ``positions``."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        return parse_method(values) if isinstance(values, str) else values

    @model_validator(mode="after")
    def _exists(self) -> MethodSettings:
        check_choice("initialisation", self.init, sorted({*INITS, *METHODS}))
        if self.init in METHODS:
            check_method(self.init, self.init_options)
        elif self.init == "default" and self.library:
            if self.init_options != {"library": True}:
                raise ValueError("default(library=true) takes no other value and no other option")
        elif self.init == "weight_selection":  # the teacher is a path here, and a model only when it is applied
            check_names(INITS[self.init], self.init, self.init_options)
            others = {name: value for name, value in self.init_options.items() if name != "teacher"}
            check_values(INITS[self.init], self.init, others)
            if not isinstance(teacher := self.init_options["teacher"], str):
                raise ValueError(f"teacher: expected the folder of a finished run, found {teacher!r}")
        else:
            check_options(self.init, self.init_options)
        if self.condition is not None:
            check_choice("conditioning", self.condition, sorted(CONDITIONS))
            make_method(self.condition, self.condition_options)
            check_values(CONDITIONS[self.condition], self.condition, self.condition_options)
        elif self.condition_options or self.projections != "qkv":
            raise ValueError("condition_options and projections belong to a condition, which is missing")
        if not self.label:
            object.__setattr__(self, "label", self.canonical())
        return self

    @property
    def library(self) -> bool:
        """Whether it asks for the library's own start, whatever the recipe is a proxy for."""
        return "library" in self.init_options

    def canonical(self) -> str:
        """The method as text that `parse_method` reads."""
        untouched = self.init == "default" and not self.init_options
        where = {} if self.sites == "*" else {"sites": self.sites}
        parts = [_write_call("tokens", self.tokens)] if self.tokens else []
        if not untouched or not (self.condition or (self.tokens and not where)):
            parts.append(_write_call(self.init, self.init_options | where))
        if self.condition:
            chosen = {} if self.projections == "qkv" else {"projections": self.projections}
            parts.append(_write_call(self.condition, self.condition_options | chosen | where))
        parts += [_write_call("set", self.set)] if self.set else []
        return "+".join(parts)

    def is_same(self, other: MethodSettings, *, but: Collection[str] = ()) -> bool:
        """Whether both do the same, whatever their labels and options written out at their default.

        Fields of `set` in `but` do not count.
        """
        return self._meaning(but) == other._meaning(but)

    def _meaning(self, but: Collection[str]) -> dict[str, Any]:
        fields = self.model_dump(exclude={"label", "init_options", "condition_options", "set"})
        return fields | {
            "init_options": _without_defaults(METHODS.get(self.init) or INITS[self.init], self.init_options),
            "condition_options": _without_defaults(CONDITIONS.get(self.condition or ""), self.condition_options),
            "set": {field: value for field, value in self.set.items() if field not in but},
        }

    @property
    def slug(self) -> str:
        """Name of its folder, such as identity-lam-10; labels that differ give names that differ."""
        plain = re.sub(r"[^a-z0-9._]+", "-", self.label.lower()).strip("-._")[:80]
        if len(self.label) <= 80 and PLAIN_LABEL.fullmatch(self.label):
            return plain
        digest = hashlib.sha256(self.label.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{plain or 'method'}-{digest[:6]}"

    def apply_(
        self,
        model: nn.Module,
        *,
        seed: int,
        teacher: Callable[[dict[str, Any]], nn.Module] | None = None,
        forward: Any = None,
    ) -> nn.Module:
        """Initialise and condition a freshly built model in place; `default` leaves it as its library made it.

        Args:
            model: the model.
            seed: of what is drawn.
            teacher: builds the trained model that the options of weight selection name.
            forward: calls the model on training samples, for initialisations that are calibrated on data.
        """
        sites = self._chosen(model)
        source = torch.Generator().manual_seed(seed)
        if self.init in METHODS:
            given = {"generator": source, "batch": forward}
            model = apply_method(METHODS[self.init], model, self.init_options, given)
        elif self.init == "weight_selection":
            assert teacher is not None, "weight selection needs a teacher"
            options = self.init_options | {"teacher": teacher(self.init_options)}
            try:
                init_(model, self.init, sites=sites, **options)
            except WellcondError as error:
                raise RecipeError(f"weight_selection from {self.init_options['teacher']}: {error}") from error
        elif self.init != "default" or (self.init_options and not self.library):
            options = self.init_options | ({"batch": forward} if takes_batch(self.init) else {})
            # A comparison shows whether it is so.
            with warnings.catch_warnings(action="ignore", category=EvidenceWarning):
                init_(model, self.init, sites=sites, generator=source, **options)
        if self.tokens:
            scale_tokens_(model, self.tokens)
        if self.condition is not None:
            # The report shows the saturation that this warns of, from the measured entropy.
            with warnings.catch_warnings(action="ignore", category=NumericalWarning):
                condition_(model, self.condition, sites=sites, projections=self.projections, **self.condition_options)
        return model

    def _chosen(self, model: nn.Module) -> list[AttentionSite] | None:
        if self.sites == "*":
            return None
        found = find_attention(model)
        chosen = [site for site in found if fnmatch.fnmatchcase(site.name, self.sites)]
        if not chosen:
            names = ", ".join(site.name for site in found[:4])
            raise RecipeError(f"sites: expected one for names such as {names}, found {self.sites!r}, which fits none")
        return chosen


def _without_defaults(method: Callable[..., Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Options of an initialisation or a conditioning without those that have their default value."""
    parameters = {} if method is None else inspect.signature(method).parameters
    defaults = {name: plain_numbers(parameter.default) for name, parameter in parameters.items()}
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}


EXAMPLES = {"tokens": "positions=25", "set": "optimizer.lr=3e-3"}
"""Options of parts of a method that are no initialisation and no conditioning."""


def parse_method(text: str) -> dict[str, Any]:
    """Fields of `MethodSettings` from text; ValueError if that names no method, or two of the same kind."""
    fields: dict[str, Any] = {"label": text.strip()}
    acting: dict[str, Any] = {}
    for name, options in map(_read_call, split_methods(text, "+")):
        if name in ACTING:
            _add_fields(acting, fields_of(name, options), text)
            continue
        if name in EXAMPLES:
            if name in fields or not options:
                raise ValueError(f"expected one {name} with values such as {EXAMPLES[name]}, found {text!r}")
            fields[name] = options
            continue
        kind = "condition" if name in CONDITIONS else "init"
        check_choice("method", name, [*sorted({*INITS, *METHODS}), *sorted(CONDITIONS), *ACTING, *EXAMPLES])
        if kind in fields:
            raise ValueError(f"{text!r} names two methods of the same kind: {fields[kind]} and {name}")
        if kind == "condition" and "projections" in options:
            fields["projections"] = options.pop("projections")
        if "sites" in options:
            if fields.setdefault("sites", options["sites"]) != options["sites"]:
                raise ValueError(f"{text!r} names two patterns of sites; expected one for both methods")
            del options["sites"]
        fields[kind], fields[f"{kind}_options"] = name, options
    if acting:
        _add_fields(acting, fields.get("set", {}), text)
        fields["set"] = acting
    return fields


def _add_fields(known: dict[str, Any], more: dict[str, Any], text: str) -> None:
    if twice := known.keys() & more.keys():
        raise ValueError(f"{text!r} sets {min(twice)} twice; expected one value")
    known.update(more)


def parse_methods(text: str) -> tuple[MethodSettings, ...]:
    """A comma-separated list of methods."""
    try:
        methods = [MethodSettings.model_validate(part) for part in split_methods(text)]
    except ValueError as error:  # a ValidationError is one
        raise RecipeError(f"--methods: {list_problems(error)[0]}") from error
    check_distinct(methods)
    return tuple(methods)


def check_distinct(methods: Sequence[MethodSettings]) -> None:
    """Raise RecipeError if two methods have one label (and folder), or are the same under two labels."""
    for first, second in itertools.combinations(methods, 2):
        if first.label == second.label or first.model_dump(exclude={"label"}) == second.model_dump(exclude={"label"}):
            both = f"{first.label!r} and {second.label!r} are the same"
            raise RecipeError(f"expected methods that differ, with labels that differ, but {both}")


# The text of methods: names with options, whose values are YAML.

MOST_METHOD_CHARACTERS = 20_000
_TOKEN = re.compile(
    r"""
    "(?:\\.|[^"\\])*" | '[^']*'               # quoted
    | [^\s"',=+()\[\]{}] [^\s,=+()\[\]{}]*    # a word, which may hold quotation marks
    | .
    """,
    re.VERBOSE | re.DOTALL,
)


def split_methods(text: str, sign: str = ",") -> list[str]:
    """The parts of a text between signs that are outside brackets and quotation marks."""
    if len(text) > MOST_METHOD_CHARACTERS:
        raise ValueError(f"expected a method of at most {MOST_METHOD_CHARACTERS} characters, found {len(text)}")
    parts, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth < 0:
            break
        if token[0] == sign and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    if depth != 0:
        raise ValueError(f"expected brackets in pairs, found {text[:200]!r}; text with signs needs quotation marks")
    return [*parts, text[start:].strip()]


def _read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a part of a method; ValueError for other text."""
    found = re.fullmatch(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?", text, re.DOTALL)
    if found is None:
        raise ValueError(f"expected a method such as conditioned or identity(lam=10), found {text!r}")
    name, inside = found[1], (found[2] or "").strip()
    options: dict[str, Any] = {}
    for pair in split_methods(inside) if inside else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals and (only := only_option(name)) is not None:
            key, value = only, key
        words = key.split(".") if name == "set" else [key]
        values = read_yaml(f"[{value}]", f"{key} in {text!r}")
        if len(values) != 1 or not all(word.isidentifier() for word in words):
            raise ValueError(f"expected options such as {EXAMPLES.get(name, 'lam=10')} in {text!r}, found {pair!r}")
        if key in options:
            raise ValueError(f"the option {key!r} appears twice in {text!r}")
        options[key] = values[0]
    return name, options


def _write_call(name: str, options: dict[str, Any]) -> str:
    """The text that `_read_call` reads."""
    written = ", ".join(f"{key}={_write_value(value)}" for key, value in options.items())
    return f"{name}({written})" if options else name


def _write_value(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_write_value(key)}: {_write_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_write_value(item) for item in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", value) and read_yaml(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)

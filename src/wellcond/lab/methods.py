"""A method of a comparison: an initialisation, a conditioning, or one after the other, and scales of the tokens.

In text: ``default``, ``conditioned``, ``identity(lam=10)``, ``conditioned+balanced(target=1.5)``,
``conditioned(sites="blocks.*")``, ``tokens(positions=25)+gaussian``. ``conditioned+set(optimizer.lr=3e-3)`` changes
fields of the recipe for this method.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
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
from wellcond.lab.models.changes import check_factors, scale_tokens_
from wellcond.lab.models.trained import Build, load_teacher
from wellcond.lab.settings import RecipeError, Settings, first_problem, plain_number, read_yaml, suggest


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

    @field_validator("set", "init_options", "condition_options", "tokens")
    @classmethod
    def _plain_numbers(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        names = sorted(options) if info.field_name == "set" else list(options)
        plain = {name: _whole(options[name]) for name in names}
        return check_factors(plain) if info.field_name == "tokens" else plain

    @model_validator(mode="after")
    def _exists(self) -> MethodSettings:
        checks = ("initialisation", self.init, INITS), ("conditioning", self.condition, CONDITIONS)
        for kind, name, known in checks:
            if name is not None and name not in known:
                raise ValueError(f"unknown {kind} {name!r}{suggest(name, sorted(known))}")
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
        options = self.init_options
        if self.init == "default" and self.library:
            if options != {"library": True}:
                raise ValueError("default(library=true) takes no other value and no other option")
        elif self.init == "weight_selection":  # the teacher is a path here, and a model only when it is applied
            check_names(self.init, options)
            check_values(INITS[self.init], self.init, {name: options[name] for name in options if name != "teacher"})
            if not isinstance(options["teacher"], str):
                raise ValueError(f"teacher: expected the folder of a finished run, found {options['teacher']!r}")
        else:
            check_options(self.init, options)

    @property
    def library(self) -> bool:
        """Whether it asks for the library's own start, whatever the recipe is a proxy for."""
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

    def apply_(
        self, model: nn.Module, *, seed: int, base: Path | None = None, build: Build | None = None, forward: Any = None
    ) -> nn.Module:
        """Initialise and condition a freshly built model in place; `default` leaves it as its library made it.

        `base` and `build` find and build teachers; `forward` calls the model on training samples, for starts that are
        calibrated on data.
        """
        sites = self._chosen(model)
        if self.init == "weight_selection":
            options = self.init_options | {"teacher": load_teacher(self.init_options, base, build)}
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
            raise RecipeError(f"sites: expected one for names such as {names}, found {self.sites!r}, which fits none")
        return chosen


# Of these, the number of words tells the form: 1 a, 2 a+b, odd a(k=v, ...), even a+b(k=v, ...). So no two of them give
# the same words; every other label gets a hash.
_WORD = r"[a-z0-9](?:[a-z0-9._]*[a-z0-9])?"
PLAIN_LABEL = re.compile(rf"{_WORD}(?:\+{_WORD})?(?:\({_WORD}={_WORD}(?:, {_WORD}={_WORD})*\))?")


def slug(label: str) -> str:
    """A file name for a label, such as identity-lam-10; labels that differ give names that differ."""
    plain = re.sub(r"[^a-z0-9._]+", "-", label.lower()).strip("-._")[:80]
    if len(label) <= 80 and PLAIN_LABEL.fullmatch(label):
        return plain
    return f"{plain or 'method'}-{hashlib.sha256(label.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}"


def _whole(value: Any) -> Any:
    """10.0 as 10, since they are the same setting; also inside lists and mappings."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_whole, value))
    return plain_number(value) if isinstance(value, float) else value


EXAMPLES = {"tokens": "positions=25", "set": "optimizer.lr=3e-3"}
"""Options of parts of a method that are no initialisation and no conditioning."""


def parse_method(text: str) -> dict[str, Any]:
    """Fields of `MethodSettings` from text; ValueError if that names no method, or two of the same kind."""
    fields: dict[str, Any] = {"label": text.strip()}
    for name, options in read_calls(text):
        if name in EXAMPLES:
            if name in fields or not options:
                raise ValueError(f"expected one {name} with values such as {EXAMPLES[name]}, found {text!r}")
            fields[name] = options
            continue
        kind = "condition" if name in CONDITIONS else "init"
        if name not in CONDITIONS and name not in INITS:
            known = [*sorted(INITS), *sorted(CONDITIONS), *EXAMPLES]
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
    """A comma-separated list of methods."""
    try:
        methods = [MethodSettings.model_validate(part) for part in split_methods(text)]
    except ValueError as error:  # a ValidationError is one
        raise RecipeError(f"--methods: {first_problem(error)}") from error
    check_distinct(methods)
    return tuple(methods)


def check_distinct(methods: Sequence[MethodSettings]) -> None:
    """Raise RecipeError if two methods have one label (and folder), or are the same under two labels."""
    for first, second in itertools.combinations(methods, 2):
        if first.label == second.label:
            raise RecipeError(f"expected every method once, found {first.label!r} twice; give them different labels")
        if first.model_dump(exclude={"label"}) == second.model_dump(exclude={"label"}):
            raise RecipeError(f"expected every method once, but {first.label!r} and {second.label!r} are the same")


# The text of methods: calls of Python with values of YAML. Python's own grammar reads the calls from a copy of the text
# in which every name, number and quotation is replaced by as many underscores: `ast.parse` gives the tree, its offsets
# give the original text, and nothing in a text can be executed. Text with spaces or signs stands in quotation marks.

Call = tuple[str, dict[str, Any]]
"""Name and options."""

MOST_METHOD_CHARACTERS = 20_000
_LEAF = re.compile(
    r"""
    "(?:\\.|[^"\\])*"                               # quoted
    | '[^']*'
    | [^\s"',:=+()\[\]{}] (?:[^\s,:=+()\[\]{}]|:(?=[^\s,()\[\]{}]))*  # a name, a number, a path; timm:vit, but not q: 1
    """,
    re.VERBOSE,
)


def _tree(text: str) -> ast.expr:
    """The text as a tree whose offsets count characters of the text."""
    if len(text) > MOST_METHOD_CHARACTERS:
        raise ValueError(f"expected a method of at most {MOST_METHOD_CHARACTERS} characters, found {len(text)}")
    masked = re.sub(r"\s", " ", _LEAF.sub(lambda leaf: "_" * len(leaf[0]), text))
    try:
        return ast.parse(masked, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        start = (getattr(error, "offset", None) or 1) - 1
        raise ValueError(
            f"expected a method such as conditioned or identity(lam=10), found {text[start:][:200]!r} in "
            f"{text[:200]!r}; close every bracket and put text with spaces or signs in quotation marks"
        ) from error


def split_methods(text: str) -> list[str]:
    """The texts of a comma-separated list of methods; ValueError for text that is no such list."""
    text = text.strip()
    tree = _tree(text)
    return [text[a.col_offset : a.end_col_offset] for a in tree.elts] if isinstance(tree, ast.Tuple) else [text]


def read_calls(text: str) -> list[Call]:
    """Names and options of the parts of a method, such as [("identity", {"lam": 10})]; ValueError for other text."""
    text = text.strip()
    tree, parts = _tree(text), []
    while isinstance(tree, ast.BinOp):  # + is the only operator that is not masked
        parts.append(tree.right)
        tree = tree.left
    return [_read_call(text, node) for node in [tree, *reversed(parts)]]


def _read_call(text: str, node: ast.expr) -> Call:
    part = text[node.col_offset : node.end_col_offset]
    function = node.func if isinstance(node, ast.Call) else node
    name = text[node.col_offset : function.end_col_offset]
    grouped = text[: node.col_offset].rstrip().endswith("(")
    if not isinstance(function, ast.Name) or not re.fullmatch(r"[A-Za-z_]\w*", name) or grouped:
        raise ValueError(f"expected a method such as conditioned or identity(lam=10), found {part!r} in {text!r}")
    options: dict[str, Any] = {}
    arguments: list[ast.expr | ast.keyword] = [*node.args, *node.keywords] if isinstance(node, ast.Call) else []
    for argument in arguments:
        pair = text[argument.col_offset : argument.end_col_offset]
        key = pair.partition("=")[0].strip()
        words = key.split(".") if name == "set" else [key]
        if not isinstance(argument, ast.keyword) or not all(word.isidentifier() for word in words):
            raise ValueError(f"expected options such as {EXAMPLES.get(name, 'lam=10')} in {part!r}, found {pair!r}")
        if key in options:
            raise ValueError(f"the option {key!r} appears twice in {part!r}")
        options[key] = read_yaml(pair.partition("=")[2], f"{key} in {part!r}")
    return name, options


def write_call(name: str, options: dict[str, Any]) -> str:
    """The text that `read_calls` reads."""
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

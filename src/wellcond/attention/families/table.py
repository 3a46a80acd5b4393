"""What the tables of all libraries are made of: columns, and the site that a row describes.

A row maps class names to a function of the module's place, written with columns. The value of a column is what it says,
or a rule, a function of the place, where it depends on the module:

- sizes (`num_heads`, `num_kv_heads`, `head_dim`, `value_head_dim`): a number, or the name of an attribute;
- `arrangement` and `shards` of a fused weight, as in `wellcond.attention.layout.build_site`;
- `letters`: what each projection holds, ``qkv``, ``q kv`` or ``q k v`` by their number where nothing is said;
- `refuse`: a rule and the reason that it is a module which q, k, v slots cannot express;
- facts of the site: `kind`, `scale` (a number, `ROOT`, None where it is learned or not one number), `causal`, `cross`,
  `relative_position_bias`, `qk_norm`, `rotary`, `talking_heads`, `roles`;
- `modifiers`: for each word of `VOCABULARY` whether it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from wellcond.arguments import check_choice
from wellcond.attention.families import Adapter
from wellcond.attention.layout import FACTS, build_site
from wellcond.attention.site import AttentionSite, ModuleContext

Rule = Callable[[ModuleContext], Any]
ROOT = "head_dim ** -0.5"
"""As a scale: the inverse root of the width of a query head."""
SIZES = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim")
STORAGE = (*SIZES, "arrangement", "shards")
COLUMNS = (*STORAGE, "letters", *FACTS, "refuse")
LETTERS = {1: "qkv", 2: "q kv", 3: "q k v"}
"""What the projections hold, by their number."""

# What changes the mathematics and no other field of a site expresses.
ATTENTION_SINKS = "attention sinks"
EXTRA_KEYS = "extra keys"
SELECTED_KEYS = "selected keys"
QUERY_POSITION_TERM = "query position term"
POSITION_DEPENDENT_SCALE = "position-dependent scale"
LOGIT_SOFTCAP = "logit softcap"
POOLED_QUERIES = "pooled queries"
CLIPPED_QKV = "clipped qkv"
SCALED_VALUES = "scaled values"
VALUE_CONVOLUTION = "value convolution"
OUTPUT_NORM = "output norm"
GATED_OUTPUT = "gated output"

VOCABULARY: Mapping[str, str] = {
    ATTENTION_SINKS: "a learned logit per head joins the softmax, so that the weights of the keys sum to less than one",
    EXTRA_KEYS: "keys and values that no token makes are seen too: learned ones, or zeros",
    SELECTED_KEYS: "something besides position decides which keys a query sees: an indexer, or chance",
    QUERY_POSITION_TERM: "the logits have a term that multiplies positions with the query",
    POSITION_DEPENDENT_SCALE: "the scale of the logits grows with the position of the query",
    LOGIT_SOFTCAP: "the logits pass c tanh(x / c)",
    POOLED_QUERIES: "queries are pooled over tokens after their projection",
    CLIPPED_QKV: "projected queries, keys and values are clamped",
    SCALED_VALUES: "values are multiplied by a fixed number",
    VALUE_CONVOLUTION: "a convolution of the values is added to the output of the heads",
    OUTPUT_NORM: "a norm stands between the heads and W_O",
    GATED_OUTPUT: "the output of the heads is multiplied by a gate that reads the tokens, before W_O",
}


def those(holds: Mapping[str, bool]) -> tuple[str, ...]:
    """The words that hold, in the order of the vocabulary.

    Raises: ValueError for a word outside the vocabulary.

    Example:
        >>> those({GATED_OUTPUT: True, OUTPUT_NORM: True, EXTRA_KEYS: False})
        ('output norm', 'gated output')
    """
    unknown = sorted(set(holds) - set(VOCABULARY))
    if unknown:
        raise ValueError(f"unknown modifiers {unknown}; expected some of {list(VOCABULARY)}")
    return tuple(word for word in VOCABULARY if holds.get(word))


def by_class(rows: Mapping[str, Adapter], dotted: Callable[[str], str]) -> dict[str, Adapter]:
    """A table by dotted class names from one whose keys are lists of words; `dotted` completes a word."""
    return {dotted(word): adapter for words, adapter in rows.items() for word in words.split()}


def attribute(name: str) -> Rule:
    """The value of an attribute of the module."""
    return lambda place: getattr(place.module, name)


def has(*names: str) -> Rule:
    """Whether one of these attributes of the module is there and true."""
    return lambda place: any(bool(getattr(place.module, name, None)) for name in names)


def holds(name: str) -> Rule:
    """Whether an attribute of the module is there and not None."""
    return lambda place: getattr(place.module, name, None) is not None


def around(name: str) -> Rule:
    """Whether a containing module holds this attribute and passes it down (a shared rotary table or position bias)."""
    return lambda place: any(getattr(module, name, None) is not None for module in place.ancestors())


def setting(name: str) -> Rule:
    """Whether a value of the nearest config is there and true."""
    return lambda place: bool(place.config(name, False))


def negated(rule: Rule) -> Rule:
    """The opposite of a rule."""
    return lambda place: not rule(place)


def checked(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row, if all of them are known.

    Raises: UnknownChoiceError.
    """
    for name in columns:
        check_choice("column", name, COLUMNS)
    return columns


def value_of(column: Any, place: ModuleContext) -> Any:
    """What a column says of this module."""
    return column(place) if callable(column) else column


def storage_of(place: ModuleContext, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and arrangement as `build_site` takes them, without what is not declared."""
    found = {name: value_of(columns[name], place) for name in STORAGE if name in columns}
    for name in SIZES:
        if isinstance(found.get(name), str):
            found[name] = getattr(place.module, found[name], place.config(found[name]))
    return {name: value for name, value in found.items() if value is not None}


def build(
    place: ModuleContext, parts: Sequence[nn.Module], columns: Mapping[str, Any], **declared: Any
) -> AttentionSite:
    """Site of projections that hold what the columns say."""
    letters = columns.get("letters", LETTERS[len(parts)]).split()
    return build_site(place, dict(zip(letters, parts, strict=True)), **declared)


def part_named(module: Any, path: str) -> Any:
    """A part of a module by its path, such as ``"query.proj"``; None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def with_facts(place: ModuleContext, site: AttentionSite, columns: Mapping[str, Any]) -> AttentionSite:
    """The site with the facts that the columns say."""
    facts = {name: value_of(columns[name], place) for name in FACTS if name in columns}
    if facts.get("scale") == ROOT:
        facts["scale"] = site.head_dim**-0.5
    facts["modifiers"] = those({word: value_of(rule, place) for word, rule in facts.get("modifiers", {}).items()})
    return replace(site, **facts)


def check_refusal(place: ModuleContext, columns: Mapping[str, Any]) -> None:
    """Raise if the columns say that this module is refused.

    Raises: UnsupportedLayoutError.
    """
    rule, reason = columns.get("refuse", (None, ""))
    if rule is not None and rule(place):
        place.refuse(reason)


def refused(reason: str) -> Adapter:
    """How a class is described that is always refused."""
    return lambda place: place.refuse(reason)


def attention(
    projections: str,
    *,
    output: str | None,
    then: Callable[[AttentionSite], AttentionSite] | None = None,
    **columns: Any,
) -> Adapter:
    """How classes are described whose modules name their projections.

    Args:
        projections: paths of one for q, k and v, of two for q and kv, or of three; of alternatives apart by ``|`` the
            first counts that a module has.
        output: path of the output projection; None where there is none.
        then: corrects the site.
        **columns: see above.
    """
    checked(columns)

    def describe(place: ModuleContext) -> AttentionSite:
        check_refusal(place, columns)
        choices = [[part_named(place.module, path) for path in names.split()] for names in projections.split("|")]
        parts = next((parts for parts in choices if None not in parts), None)
        if parts is None:
            place.refuse(f"it has no projections under the names {projections}.")
        out = None if output is None else part_named(place.module, output)
        site = with_facts(place, build(place, parts, columns, output=out, **storage_of(place, columns)), columns)
        return site if then is None else then(site)

    return describe

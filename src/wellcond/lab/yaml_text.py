"""YAML as plain data: no code, 1e-3 is a number, and a key that stands twice is an error."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import yaml

from wellcond.lab.settings import RecipeError


class _Loader(yaml.SafeLoader):
    """A SafeLoader with the constructor and the resolver below."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (dict, list, set)):
            raise yaml.constructor.ConstructorError(None, None, f"a key cannot be {key!r}", key_node.start_mark)
        if key in found:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


MOST_CHARACTERS = 2**20
MOST_VALUES = 100_000
"""With aliases written out: nine lines of them can stand for a billion values."""


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a document with its aliases written out.

    Raises: YAMLError if there are too many, or an alias stands within what it names.
    """
    if id(node) in known:
        if known[id(node)] == 0:
            raise yaml.composer.ComposerError(None, None, "an alias stands within what it names", node.start_mark)
        return known[id(node)]
    known[id(node)] = 0
    inside = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for pair in inside for part in pair] if isinstance(node, yaml.MappingNode) else inside
    count = 1 + sum(_count_values(part, known) for part in parts)
    if count > MOST_VALUES:
        raise yaml.composer.ComposerError(None, None, f"expected at most {MOST_VALUES} values", node.start_mark)
    known[id(node)] = count
    return count


@functools.lru_cache(maxsize=256)  # parsing takes milliseconds, and many recipes extend the same one
def _parse(text: str) -> Any:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _count_values(node, {})
    return loader.construct_document(node)


def read_yaml(text: str, where: str = "the value") -> Any:
    """Plain data from YAML.

    Raises: RecipeError for text that is not YAML, or asks for more than plain data.

    Example:
        >>> read_yaml("lr: 1e-3")
        {'lr': 0.001}
    """
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{where}: expected at most {MOST_CHARACTERS} characters, found {len(text)}")
    try:
        return copy.deepcopy(_parse(text))
    # ValueError: a date with a 13th month; RecursionError: thousands of brackets
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML: {error}") from error

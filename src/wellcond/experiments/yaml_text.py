"""YAML as plain data: no code, 1e-3 is a number, and a key that stands twice is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml

from wellcond.experiments.settings import RecipeError


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


def read_yaml(text: str, where: str = "the value") -> Any:
    """Plain data from YAML.

    Raises: RecipeError for text that is not YAML, or asks for more than plain data.

    Example:
        >>> read_yaml("lr: 1e-3")
        {'lr': 0.001}
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    # ValueError: a date with a 13th month; RecursionError: thousands of brackets
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML: {error}") from error

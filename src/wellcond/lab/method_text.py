"""Methods as text, ``tokens(positions=25)+identity(lam={q: 1, v: 2.5})``: calls of Python with values of YAML.

Python's own grammar reads the calls from a copy of the text in which every name, number and quotation is replaced by as
many underscores: `ast.parse` gives the tree, its offsets give the original text, and nothing in a text can be executed.
Values are YAML on one line, as in recipes; text with spaces or signs stands in quotation marks.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from wellcond.lab.yaml_text import read_yaml

Call = tuple[str, dict[str, Any]]
"""Name and options."""

MOST_CHARACTERS = 20_000
_LEAF = re.compile(
    r"""
    "(?:\\.|[^"\\])*"                               # quoted
    | '[^']*'
    | [^\s"',:=+()\[\]{}] (?:[^\s,:=+()\[\]{}]|:(?=[^\s,()\[\]{}]))*  # a name, a number, a path; timm:vit, but not q: 1
    """,
    re.VERBOSE,
)


def _tree(text: str) -> ast.expr:
    """The text as a tree whose offsets count characters of the text.

    Raises: ValueError.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"expected a method of at most {MOST_CHARACTERS} characters, found {len(text)}")
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
    """The texts of a comma-separated list of methods.

    Raises: ValueError for text that is no such list.

    Example:
        >>> split_methods("default, identity(lam=2, layout=joint),polar")
        ['default', 'identity(lam=2, layout=joint)', 'polar']
    """
    text = text.strip()
    tree = _tree(text)
    return [text[a.col_offset : a.end_col_offset] for a in tree.elts] if isinstance(tree, ast.Tuple) else [text]


def read_calls(text: str) -> list[Call]:
    """Names and options of the parts of a method.

    Raises: ValueError for text that is no sum of calls; RecipeError for a value that is not YAML.

    Example:
        >>> read_calls("conditioned+set(optimizer.lr=3e-3)")
        [('conditioned', {}), ('set', {'optimizer.lr': 0.003})]
    """
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
    dotted = name == "set"
    arguments: list[ast.expr | ast.keyword] = [*node.args, *node.keywords] if isinstance(node, ast.Call) else []
    for argument in arguments:
        pair = text[argument.col_offset : argument.end_col_offset]
        key = pair.partition("=")[0].strip()
        words = key.split(".") if dotted else [key]
        if not isinstance(argument, ast.keyword) or not all(word.isidentifier() for word in words):
            example = "optimizer.lr=3e-3" if dotted else "lam=10"
            raise ValueError(f"expected options such as {example} in {part!r}, found {pair!r}")
        if key in options:
            raise ValueError(f"the option {key!r} stands twice in {part!r}")
        options[key] = read_yaml(pair.partition("=")[2], f"{key} in {part!r}")
    return name, options


def write_call(name: str, options: dict[str, Any]) -> str:
    """The text that `read_calls` reads.

    Example:
        >>> write_call("identity", {"lam": {"q": 1}}), write_call("polar", {})
        ('identity(lam={q: 1})', 'polar')
    """
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

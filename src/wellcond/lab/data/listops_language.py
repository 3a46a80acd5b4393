"""The language of ListOps: symbols, their token ids, parsing with positions, evaluating.

An expression is a digit, or an operator with arguments: `[MAX 2 9 [MIN 4 7 ] 0 ]`. Files of the published data have
round brackets as well, `( ( ( [MAX 2 ) 9 ) ] )`; they say nothing and are dropped, but have to be balanced.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wellcond.errors import WellcondError

OPERATORS = ("MIN", "MAX", "MED", "SM")
"""Those of the Long Range Arena: smallest, largest, median (rounded down), sum modulo 10."""
SYMBOLS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""By token id."""
FIRST_OPENING = 10
CLOSING = 14
PADDING = -1

RULES: dict[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
    "FIRST": lambda values: values[0],
    "LAST": lambda values: values[-1],
}
"""All operators that are parsed; FIRST and LAST occur in the first published ListOps only and have no token."""


class ListOpsError(WellcondError, ValueError):
    """A text that is no expression; `position` counts characters from 0."""

    def __init__(self, problem: str, position: int) -> None:
        """Say what is wrong and where."""
        super().__init__(f"{problem} at character {position} (the first is 0)")
        self.position = position


@dataclass(frozen=True)
class Operation:
    """An operator and its arguments."""

    operator: str
    arguments: tuple[Expression, ...]


Expression = int | Operation


def parse_listops(text: str) -> Expression:
    """The tree of an expression.

    Raises:
        ListOpsError: an unknown operator or symbol, brackets that do not match, an operator without arguments, no
            expression or more than one.

    Example:
        >>> parse_listops("[MAX 2 [MIN 4 7 ] ]")
        Operation(operator='MAX', arguments=(2, Operation(operator='MIN', arguments=(4, 7))))
    """
    done: list[Expression] = []
    open_operators: list[tuple[str, int, list[Expression]]] = []
    round_brackets: list[int] = []
    for match in re.finditer(r"\S+", text):
        symbol, position = match.group(), match.start()
        if symbol == "(":
            round_brackets.append(position)
        elif symbol == ")":
            if not round_brackets:
                raise ListOpsError("')' closes nothing", position)
            round_brackets.pop()
        elif len(open_operators) == 0 and done:
            raise ListOpsError(f"{symbol!r} after the end: expected one expression", position)
        elif symbol.startswith("["):
            if symbol[1:] not in RULES:
                raise ListOpsError(f"unknown operator {symbol!r}: expected one of {', '.join(RULES)}", position)
            open_operators.append((symbol[1:], position, []))
        else:
            value: Expression
            if symbol == "]":
                if not open_operators:
                    raise ListOpsError("']' closes nothing", position)
                name, _, arguments = open_operators.pop()
                if not arguments:
                    raise ListOpsError(f"[{name} has no arguments, its end is", position)
                value = Operation(name, tuple(arguments))
            elif len(symbol) == 1 and symbol in "0123456789":
                value = int(symbol)
            else:
                raise ListOpsError(f"unknown symbol {symbol!r}: expected a digit, an operator or ']'", position)
            (open_operators[-1][2] if open_operators else done).append(value)
    if open_operators:
        raise ListOpsError(f"no ']' for [{open_operators[-1][0]}", open_operators[-1][1])
    if round_brackets:
        raise ListOpsError("no ')' for '('", round_brackets[-1])
    if not done:
        raise ListOpsError("no expression: the text is empty", 0)
    return done[0]


def evaluate_listops(text: str) -> int:
    """The answer of an expression.

    Raises:
        ListOpsError: the text is no expression.

    Example:
        >>> evaluate_listops("( ( ( ( [SM 4 ) ( ( ( [MED 3 ) 8 ) ] ) ) 7 ) ] )")
        6
    """
    values: dict[int, int] = {}
    tree = parse_listops(text)
    # Not recursive: an expression may be deeper than Python's stack.
    waiting = [tree]
    while waiting:
        node = waiting[-1]
        if isinstance(node, Operation) and id(node) not in values:
            inner = [a for a in node.arguments if isinstance(a, Operation) and id(a) not in values]
            if inner:
                waiting += inner
                continue
            known = [a if isinstance(a, int) else values[id(a)] for a in node.arguments]
            values[id(node)] = RULES[node.operator](known)
        waiting.pop()
    return tree if isinstance(tree, int) else values[id(tree)]


def to_tokens(text: str) -> list[int]:
    """Token ids of an expression, without round brackets.

    Raises:
        ListOpsError: the text is no expression of the four operators of the Long Range Arena.

    Example:
        >>> to_tokens("( ( ( [MAX 2 ) 9 ) ] )")
        [11, 2, 9, 14]
    """
    parse_listops(text)
    tokens = []
    for match in re.finditer(r"[^\s()]+", text):
        if match.group() not in _IDS:
            raise ListOpsError(
                f"{match.group()!r}: expected one of the operators {', '.join(OPERATORS)}", match.start()
            )
        tokens.append(_IDS[match.group()])
    return tokens


_IDS = {symbol: token for token, symbol in enumerate(SYMBOLS)}


def to_text(tokens: Iterable[int]) -> str:
    """Expression of token ids, without round brackets; padding is left out.

    Example:
        >>> to_text([11, 2, 9, 14, -1, -1])
        '[MAX 2 9 ]'
    """
    return " ".join(SYMBOLS[int(token)] for token in tokens if token != PADDING)


def is_opening(tokens: np.ndarray) -> np.ndarray:
    """Where an operator begins."""
    return (tokens >= FIRST_OPENING) & (tokens < CLOSING)

"""Private names of torch and other libraries that wellcond relies on, in one place, with what they were tried on.

Every function says what it needs, why no public name serves, and with which versions it was tried. Code elsewhere in
wellcond uses public names only.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "higher_order_name", "operator_arguments", "return_names"]

# TorchDispatchMode: the documented way to see every operator of a forward pass, but torch exports it from a module with
# an underscore only. Tried with torch 2.15.


def higher_order_name(operator: Any) -> str | None:
    """Name of a higher-order operator (flex_attention); None for an ordinary one.

    Needs the class torch._ops.HigherOrderOperator: nothing public tells what a dispatch mode was called with. Tried
    with torch 2.15.
    """
    return operator.name() if isinstance(operator, HigherOrderOperator) else None


def operator_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an operator was called with, by the names of its schema, defaults included.

    Needs `OpOverload._schema`, and `__call__` of the class of a higher-order operator: no public function gives the
    names of an operator's arguments. Tried with torch 2.15.
    """
    if isinstance(operator, HigherOrderOperator):
        return dict(inspect.signature(type(operator).__call__).bind(operator, *args, **kwargs).arguments)
    declared = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given = {argument.name: value for argument, value in zip(declared, args, strict=False)}
    return {**defaults, **given, **kwargs}


def return_names(operator: Any) -> tuple[str, ...]:
    """Names of what an operator returns, empty where its schema gives none.

    Needs `OpOverload._schema`: as `operator_arguments`. Tried with torch 2.15.
    """
    return tuple(value.name for value in operator._schema.returns)

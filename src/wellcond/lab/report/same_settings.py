"""Whether runs were made under one recipe: only then may they share a mean."""

from __future__ import annotations

from typing import Any

# What differs between the runs of a comparison, or changes no number.
FREE = frozenset({"method", "seed", "title", "description", "checkpoint", "logging", "workers"})


def setting_differences(a: Any, b: Any) -> list[str]:
    """Fields in which two stored recipes differ.

    Left out are a field that only one of them has (an older record), and what two different methods set.

    Example:
        >>> setting_differences({"seed": 0, "optimizer": {"lr": 1}}, {"seed": 1, "optimizer": {"lr": 2}})
        ['optimizer.lr: 1 and 2']
    """
    free = _set_by_methods(a, b)
    return [line for line in _differences(a, b) if not line.startswith(free)]


def _set_by_methods(a: Any, b: Any) -> tuple[str, ...]:
    """How lines on fields begin that the methods of two runs set; none for two runs of one method."""
    methods = [_mapping(_mapping(config).get("method")) for config in (a, b)]
    if methods[0].get("label") == methods[1].get("label"):
        return ()
    fields = [field for method in methods for field in _mapping(method.get("set"))]
    # Another name (of an optimiser, of a schedule) gives other values to all fields beside it.
    return tuple(start for field in fields for start in (_beside(field) or (f"{field}:", f"{field}.")))


def _mapping(value: Any) -> dict[str, Any]:
    """What should be a mapping; older records may have something else there."""
    return value if isinstance(value, dict) else {}


def _beside(field: str) -> tuple[str, ...]:
    return (field.removesuffix("name"),) if field.endswith(".name") else ()


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        shared = [key for key in a if key in b and key not in FREE]
        return [line for key in shared for line in _differences(a[key], b[key], f"{path}.{key}".lstrip("."))]
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]

"""Whether runs were made under one recipe: only then may they share a mean."""

from __future__ import annotations

from typing import Any

# What differs between the runs of a comparison, or changes no number.
FREE = frozenset({"method", "seed", "title", "description", "checkpoint", "logging", "workers"})


def setting_differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Fields in which two stored recipes differ; a field that only one of them has (an older record) is left out.

    Example:
        >>> setting_differences({"seed": 0, "optimizer": {"lr": 1}}, {"seed": 1, "optimizer": {"lr": 2}})
        ['optimizer.lr: 1 and 2']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        shared = [key for key in a if key in b and key not in FREE]
        return [line for key in shared for line in setting_differences(a[key], b[key], f"{path}.{key}".lstrip("."))]
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]

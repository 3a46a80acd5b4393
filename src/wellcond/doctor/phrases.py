"""Parts of sentences and lines of code that several findings use."""

from __future__ import annotations

from collections.abc import Sequence

from wellcond.doctor.records import LayerFacts


def title_of(layer: LayerFacts) -> str:
    """Its name; an attention layer that is the whole model has none."""
    return layer.name or "the attention layer"


def names_of(layers: Sequence[LayerFacts]) -> tuple[str, ...]:
    """Their names."""
    return tuple(layer.name for layer in layers)


def some_of(layers: Sequence[LayerFacts]) -> str:
    """The first layer by name, the others by number."""
    rest = len(layers) - 1
    return title_of(layers[0]) + (f" and {count(rest, 'more attention layer')}" if rest else "")


def count(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> count(1, "head"), count(2, "head")
        ('1 head', '2 heads')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def two_digits(factor: float) -> float:
    """A factor to type."""
    return float(f"{factor:.2g}")

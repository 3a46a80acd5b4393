"""Pages as one self-contained file each, from jinja2 templates that escape every text, and how numbers look in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any

from wellcond.errors import needs_extra

if TYPE_CHECKING:
    from jinja2 import Environment


MISSING = "\N{EN DASH}"
INFINITE = "\N{INFINITY}"
GAP = ".."
"""In place of the middle of a name."""


def number(value: Any) -> float:
    """A stored number, which JSON may hold as text; NaN where there is none."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return math.nan


def show(value: Any, digits: int = 3) -> str:
    """A number at a glance."""
    x = number(value)
    return MISSING if math.isnan(x) else f"{x:.{digits}g}".replace("inf", INFINITE)


def shorten(names: Iterable[str], room: int) -> dict[str, str]:
    """Each name in at most `room` characters: a longer one loses its middle, where possible not what tells two apart.

    Example:
        >>> shorten(["layer.0.attention.self", "layer.1.attention.self"], 18).values()
        dict_values(['layer.0..tion.self', 'layer.1..tion.self'])
    """
    known = dict.fromkeys(names)
    kept = max(2, room - len(GAP))

    def cut(name: str, first: int) -> str:
        return name if len(name) <= room else f"{name[:first]}{GAP}{name[first - kept :]}"

    def unlike(first: int) -> int:
        return len({cut(name, first) for name in known})

    by_shape = sorted(range(kept), key=lambda first: abs(first - kept // 3))
    first = max(by_shape, key=unlike)
    return {name: cut(name, first) for name in known}


def style() -> str:
    """The style sheet that pages share."""
    return (resources.files("wellcond.pages") / "style.css").read_text("utf-8")


def environment(package: str | None = None) -> Environment:
    """How templates are read: those of this folder, and those in the folder `templates` of a package.

    Raises: MissingExtraError if jinja2 is not installed.
    """
    with needs_extra("jinja2", "report"):
        from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    loader = ChoiceLoader([PackageLoader("wellcond", "pages"), *([PackageLoader(package)] if package else [])])
    made = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["asset"] = lambda name: Markup(loader.get_source(made, name)[0])  # a style sheet or a script
    return made

"""`render`: pages from the jinja2 templates of this package. Every text is escaped."""

from __future__ import annotations

import unicodedata
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from wellcond.errors import MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **context: Any) -> str:
    """Text of a page.

    Args:
        template: name of a file in `templates`.
        context: what the template shows. Texts and attributes are escaped.

    Raises: MissingExtraError if jinja2 is not installed.
    """
    return environment().get_template(template).render(**context)


@cache
def environment() -> Environment:
    """Where templates are found and how they are read.

    Raises: MissingExtraError if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtraError("jinja2", "report") from error
    made = Environment(
        loader=PackageLoader("wellcond.lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.globals["asset"] = lambda name: Markup(asset(name))
    made.globals["plotly_source"] = lambda: Markup(plotly_source())
    made.filters["visible"] = visible
    made.filters["px"] = lambda value: f"{value:.6g}"
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def asset(name: str) -> str:
    """Text of a style sheet or script of this package, which becomes part of a page."""
    return (resources.files("wellcond.lab.report") / "templates" / name).read_text("utf-8")


def plotly_source() -> str:
    """The plotting library, to be part of the page.

    Raises: MissingExtraError if it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("plotly", "report") from error
    source: str = get_plotlyjs()
    assert "</script" not in source.lower(), "plotly's own text would end the script element"
    return source


def visible(text: str) -> str:
    r"""The text with every character that has no picture, or turns others around, as its number; lines and tabs stay.

    Example:
        >>> visible("a" + chr(0) + "b" + chr(0x202E) + chr(10))
        'a<U+0000>b<U+202E>\n'
    """
    # Control, format, surrogate, private and unassigned characters; separators of lines and paragraphs.
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in hidden else f"<U+{ord(c):04X}>" for c in text)

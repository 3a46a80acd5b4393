"""HTML and SVG as strings that cannot be injected into: every text and every attribute is escaped on the way in."""

from __future__ import annotations

import html

VOID = frozenset({"meta", "line", "rect", "circle", "path", "polyline", "stop", "br"})


class Markup(str):
    """Text that is markup already. Everything else is escaped."""

    __slots__ = ()

    def __html__(self) -> str:
        """As a template shows it: as it is."""
        return self


def tag(name: str, /, *children: str | Markup, **attributes: object) -> Markup:
    """One element. Plain strings among the children are escaped; ``class_`` and ``aria_label`` lose their underscores.

    Example:
        >>> tag("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = join(*children)
    if name in VOID and not inside:
        return Markup(f"<{name}{written}>" if name in ("meta", "br") else f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inside}</{name}>")


def join(*children: str | Markup) -> Markup:
    """Children one after the other, plain strings escaped."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def figure(
    width: float, height: float, label: str, description: str, *children: Markup, natural: bool = False
) -> Markup:
    """An inline SVG with a name and a description for those who do not see it.

    Args:
        width: of the drawing, in its own units.
        height: likewise.
        label: short name.
        description: what it shows, in words.
        children: the drawing.
        natural: never scaled; wide drawings scroll instead.
    """
    shown = tag(
        "svg",
        tag("title", label),
        tag("desc", description),
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{label}. {description}",
        style=f"width:{width:g}px;" + ("" if natural else "max-width:100%;"),
    )
    return tag("div", shown, class_="scroll", tabindex=0) if natural else shown

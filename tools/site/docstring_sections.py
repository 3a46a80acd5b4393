"""Extension of griffe, which reads docstrings for the API reference: short forms that its Google style lacks."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ShortSections(griffe.Extension):
    """`Example:` is a section of doctests, `Returns: text` may stand on one line, `.. math::` is a formula."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object before it is parsed."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"^(Returns|Raises): (.+(?:\n {4}.+)*)$", _as_section, text, flags=re.MULTILINE)
        text = re.sub(r"^\.\. math:: (.+(?:\n +.+)*)$", r"```math\n\1\n```", text, flags=re.MULTILINE)
        text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
        obj.docstring.value = text


def _as_section(match: re.Match[str]) -> str:
    lines = " ".join(line.strip() for line in match[2].splitlines())
    return f"Returns:\n    {lines}" if match[1] == "Returns" else f"Raises {lines}"

"""Extension of griffe, which reads docstrings for the API reference: short forms that its Google style lacks."""

from __future__ import annotations

import re
from typing import Any

import griffe

# Enough of LaTeX to read a formula as text; the site loads no script from elsewhere that could set it.
SYMBOLS = {
    r"\kappa": "κ", r"\sigma": "σ", r"\lambda": "λ", r"\Lambda": "Λ", r"\partial": "∂", r"\Rightarrow": "⇒",
    r"\mapsto": "↦", r"\approx": "≈", r"\leq": "≤", r"\le": "≤", r"\ge": "≥", r"\min": "min", r"\max": "max",
    r"\ln": "ln", r"\sqrt": "√", r"\|": "‖", r"\qquad": "  ", r"\quad": " ", r"\,": " ", r"\;": " ", r"\ ": " ",
    r"\in": "∈", r"\sum": "Σ", r"\Bigl": "", r"\Bigr": "",
}  # fmt: skip


class ShortSections(griffe.Extension):
    """`Example:` is a section of doctests, `Returns: text` may stand on one line, and formulas are text."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object before it is parsed."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"^(Returns|Raises): (.+(?:\n {4}.+)*)$", _as_section, text, flags=re.MULTILINE)
        text = re.sub(r"^\.\. math:: (.+)$", lambda found: f"`{formula(found[1])}`", text, flags=re.MULTILINE)
        obj.docstring.value = text


def _as_section(match: re.Match[str]) -> str:
    lines = " ".join(line.strip() for line in match[2].splitlines())
    return f"Returns:\n    {lines}" if match[1] == "Returns" else f"Raises {lines}"


def formula(latex: str) -> str:
    r"""A formula of one line as text: `\kappa(J) \le \sqrt{U_1 / L}` becomes `κ(J) ≤ √(U_1 / L)`."""
    text = re.sub(r"\\frac\{([^}]*(?:\{[^}]*\})?[^}]*)\}\{((?:[^{}]|\{[^}]*\})*)\}", r"(\1) / (\2)", latex)
    for command, symbol in SYMBOLS.items():
        text = re.sub(re.escape(command) + (r"(?![a-zA-Z])" if command[-1].isalpha() else ""), symbol, text)
    text = re.sub(r"\\(?:text|mathrm)\{([^}]*)\}", r"\1", text)
    text = re.sub(r"_\{(\w+)\}", r"_\1", text)
    return text.replace("{", "(").replace("}", ")")

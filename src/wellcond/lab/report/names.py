"""Labels of methods in words that a reader knows, for pages and figures; tables for programs keep the labels."""

from __future__ import annotations

import re
from collections.abc import Sequence

CALL = re.compile(r"(\w+)(?:\((.*=.*)\))?")
CALLS = {
    "default(library=true)": "library default",
    "t_fixup": "T-Fixup",
    "set(model.qk_norm=true)": "QK-norm",
    "set(optimizer.name=muon)": "Muon",
}
OPTIONS = {
    "lam": "λ",
    "position=sincos1d": "sine-cosine positions",
    "position=sincos2d": "sine-cosine positions",
    "value_scale=default": "V at the default's norm",
    "model.layer_scale": "LayerScale",
    "optimizer.lr": "rate",
}


def readable(label: str) -> str:
    """A label in words, such as ``larger positions (x 30) + conditioned``; one of another form as it is."""
    parts = re.split(r"\+(?![^(]*\))", label)
    found = [CALL.fullmatch(part) for part in parts]
    if not all(found):
        return label
    words = [_in_words(part, one[1], one[2]) for part, one in zip(parts, found, strict=True) if one]
    return " + ".join(word for word in words if word)


def _in_words(part: str, name: str, options: str | None) -> str:
    if part in CALLS or options is None:
        return CALLS.get(part, part)
    given = dict(option.split("=", 1) for option in options.split(", ") if "=" in option)
    if name == "tokens":
        scaled = {what: factor for what, factor in given.items() if factor != "1"}
        size = "smaller" if all(factor.startswith("0.") for factor in scaled.values()) else "larger"
        return f"{size} " + ", ".join(f"{what} (x {factor})" for what, factor in scaled.items()) if scaled else ""
    shown = ", ".join(_option(field, value) for field, value in given.items())
    return shown if name == "set" else f"{name.replace('_', ' ')} ({shown})"


def _option(field: str, value: str) -> str:
    known = OPTIONS.get(f"{field}={value}")
    name = OPTIONS.get(field, field.rpartition(".")[2].replace("_", " "))
    folders = [folder for folder in value.split("/") if not re.fullmatch(r"seed\d+", folder)]
    return known or f"{name} {folders[-1]}"


def rename(text: str, labels: Sequence[str]) -> str:
    """A text with all labels in words, but for those that are words already."""
    for label in sorted(labels, key=len, reverse=True):
        if not label.isalpha():
            text = text.replace(label, readable(label))
    return text

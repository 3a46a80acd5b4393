"""The corrections a user can name, and what each needs to know."""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from wellcond.attention.site import Slot
from wellcond.conditioning.corrections import IdentityCorrection, IdentityPart, Mixture, SpectralCorrection
from wellcond.errors import check_choice
from wellcond.registry import CORRECTIONS as METHODS

Layout = Literal["joint", "per_head"]
PartBuilder = Callable[[list[tuple[str, Slot]]], IdentityCorrection | SpectralCorrection]


@dataclass(frozen=True)
class Method:
    """A validated choice of method and options. `settings` is what a checkpoint must agree on."""

    name: str
    settings: Mapping[str, Any]
    build: PartBuilder = field(compare=False)
    frozen: bool = False

    def call(self) -> str:
        """The line that applies it, for messages."""
        options = "".join(f", {key}={_literal(value)}" for key, value in self.settings.items())
        return f"condition_(model, {self.name!r}{options})"


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_literal(item)}" for key, item in value.items()) + "}"
    return dotless(value) if isinstance(value, float) else repr(value)


def dotless(number: float) -> str:
    """A number as a Python literal without a point, since the name of a buffer may not contain one.

    Example:
        >>> dotless(10.0), dotless(0.25), float(dotless(0.1)) == 0.1
        ('10', '25e-2', True)
    """
    if number.is_integer():
        return str(int(number))
    sign, digits, exponent = decimal.Decimal(repr(number)).as_tuple()
    return f"{'-' * sign}{''.join(map(str, digits))}e{exponent}"


def register_condition(name: str) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Decorate a function `(**options) -> Method`."""

    def decorate(make: Callable[..., Method]) -> Callable[..., Method]:
        METHODS.register(name, make)
        return make

    return decorate


@register_condition("identity")
def identity(*, lam: float | Mapping[str, float] = 10.0, layout: Layout = "joint") -> Method:
    """C = lam I, fixed (paper S, section 3.3).

    Args:
        lam: one number, or one per projection such as ``{"q": 1.0, "k": 1.0, "v": 10.0}`` (absent: 0).
        layout: one identity over all heads, or the same one in each head.
    """
    check_choice("layout", layout, get_args(Layout))
    lams = per_projection(lam)

    def build(parts: list[tuple[str, Slot]]) -> IdentityCorrection | SpectralCorrection:
        return IdentityCorrection([IdentityPart(slot, lams[role], layout) for role, slot in parts])

    settings = lams if isinstance(lam, Mapping) else lams["q"]
    return Method("identity", {"lam": settings, "layout": layout}, build)


def per_projection(lam: float | Mapping[str, float]) -> dict[str, float]:
    """Lam for each of q, k, v.

    Raises:
        UnknownChoiceError: another projection than q, k, v.
        ValueError: not a finite number.
    """
    given = dict(lam) if isinstance(lam, Mapping) else dict.fromkeys("qkv", lam)
    for role in given:
        check_choice("projection of lam", role, ("q", "k", "v"))
    lams = {role: _number(given.get(role, 0.0)) for role in "qkv"}
    for role, value in lams.items():
        if value is None:
            raise ValueError(f"lam: expected a finite number, got {given[role]!r} for {role}")
    return lams  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    """A finite number of Python or NumPy as a float; None for anything else, such as a boolean."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


@register_condition("polar")
def polar(*, layout: Layout = "per_head", frozen: bool = False) -> Method:
    """C = sigma_max(W) times the polar factor of W (paper S, theorem 3.5): condition number at most 2.

    Args:
        layout: for each head (the theorem's W), or for all heads as one matrix.
        frozen: keep the first C instead of following the weights.
    """
    return _spectral("polar", Mixture(keep=1.0, share=1.0), layout, frozen, {})


@register_condition("balanced")
def balanced(*, target: float = 2.0, layout: Layout = "per_head", frozen: bool = False) -> Method:
    """The polar correction rescaled so that the largest singular value stays that of W.

    Args:
        target: the condition number that W + C does not exceed, at least 1.
        layout: for each head, or for all heads as one matrix.
        frozen: keep the first C instead of following the weights.
    """
    number = _number(target)
    if number is None or number < 1.0:
        raise ValueError(f"target: expected a condition number of at least 1, got {target!r}")
    mixture = Mixture(keep=1 - 1 / number, share=1 / number)
    return _spectral("balanced", mixture, layout, frozen, {"target": number})


def _spectral(
    name: str,
    mixture: Mixture,
    layout: Layout,
    frozen: bool,
    extra: dict[str, Any],
) -> Method:
    check_choice("layout", layout, get_args(Layout))
    check_choice("frozen", frozen, (True, False))
    frozen = bool(frozen)  # NumPy has booleans of its own, which JSON does not know

    def build(parts: list[tuple[str, Slot]]) -> IdentityCorrection | SpectralCorrection:
        return SpectralCorrection([slot for _role, slot in parts], mixture, layout)

    return Method(name, {**extra, "layout": layout, "frozen": frozen}, build, frozen)

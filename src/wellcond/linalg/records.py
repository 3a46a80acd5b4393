"""The spectrum of a matrix as a frozen record, and how a record is read back from its plain data."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def restore(hint: Any, value: Any) -> Any:
    """A frozen record from its plain data, by the types of its fields; what `json_ready` made text is a number again.

    Names that are no fields are left out: they are what follows from the fields.

    Raises: ValueError for data of another type, with what was expected.

    Example:
        >>> restore(tuple[float, ...], [1, "inf"])
        (1.0, inf)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or (origin is Literal and value in inner) or (value is None and type(None) in inner):
        return value
    if origin in (Union, types.UnionType):
        return restore(next(kind for kind in inner if kind is not type(None)), value)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(restore(kind, item) for kind, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return {restore(inner[0], key): restore(inner[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        hints = get_type_hints(hint)
        known = [field.name for field in dataclasses.fields(hint) if field.name in value]
        try:
            return hint(**{name: restore(hints[name], value[name]) for name in known})
        except TypeError as error:
            raise ValueError(f"expected all fields of {hint.__name__}: {error}") from error
    if hint is float and (value in ("inf", "-inf", "nan") or (isinstance(value, int) and not isinstance(value, bool))):
        return float(value)
    if hint in (float, int, str, bool) and type(value) is hint:
        return value
    raise ValueError(f"expected {getattr(hint, '__name__', hint)}, found {value!r}"[:200])


def show_kappas(strict: float, pseudo: float) -> str:
    """A condition number; where it is infinite, the one over the non-zero spectrum beside it.

    Example:
        >>> show_kappas(12.345678, 12.345678), show_kappas(float("inf"), 3.5)
        ('kappa 12.35', 'kappa inf, pseudo 3.5')
    """
    known = math.isinf(strict) and math.isfinite(pseudo)
    return f"kappa {strict:.4g}" + (f", pseudo {pseudo:.4g}" if known else "")


@dataclass(frozen=True)
class Spectrum:
    """Extreme singular values of one matrix and what follows from them."""

    sigma_max: float
    sigma_min: float
    """The last of the min(m, n) singular values, zero or not."""
    sigma_rank: float
    """The last one that counts as non-zero."""
    rank: int
    nullity: int
    """min(m, n) - rank."""
    rtol: float

    def __repr__(self) -> str:
        """One line."""
        rank = f"rank {self.rank} of {self.rank + self.nullity}"
        ends = f"sigma {self.sigma_max:.4g} to {self.sigma_min:.4g}"
        return f"Spectrum({show_kappas(self.condition_number, self.pseudo_condition_number)}, {ends}, {rank})"

    @property
    def condition_number(self) -> float:
        """Strict condition number: infinite below full rank, NaN for a zero matrix."""
        if self.rank == 0:
            return float("nan")
        return float("inf") if self.nullity else self.sigma_max / self.sigma_min

    @property
    def pseudo_condition_number(self) -> float:
        """Condition number over the non-zero singular values; NaN for a zero matrix."""
        return float("nan") if self.rank == 0 else self.sigma_max / self.sigma_rank

    @property
    def why_not_finite(self) -> str:
        """Why the strict condition number is infinite or not defined; empty where it is finite."""
        if self.rank == 0:
            return "the matrix is zero"
        return f"rank {self.rank} of {self.rank + self.nullity}" if self.nullity else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with both condition numbers."""
        return dataclasses.asdict(self) | {
            "condition_number": self.condition_number,
            "pseudo_condition_number": self.pseudo_condition_number,
        }

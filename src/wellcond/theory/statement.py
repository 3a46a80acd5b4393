"""What every statement returns: a number, the hypotheses under which it is true as data, and where it was printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from wellcond.errors import HypothesisError
from wellcond.jacobian.head import Head

Relation = Literal["<", "<=", "=", ">=", ">"]


@dataclass(frozen=True)
class Reference:
    """Where a statement was printed, or that it is ours."""

    paper: str
    equation: str


# Paper C, paper S, and the specification of this package where it differs from both.
def paper_c(equation: str) -> Reference:
    """A place in paper C."""
    return Reference("Conditioned Initialization for Attention", equation)


def paper_s(equation: str) -> Reference:
    """A place in paper S."""
    return Reference("Spectral Conditioning of Attention", equation)


def ours(equation: str) -> Reference:
    """A place in docs/theory.md."""
    return Reference("wellcond, docs/theory.md", equation)


@dataclass(frozen=True)
class Hypothesis:
    """One assumption, whether it holds for the input given, and the numbers that decide it."""

    text: str
    holds: bool
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class AbstractStatement:
    """Base of the records: the value is None exactly when a hypothesis fails."""

    name: str
    value: float | None
    hypotheses: tuple[Hypothesis, ...]
    reference: Reference

    def __post_init__(self) -> None:
        """Refuse a record that states a number outside its hypotheses."""
        assert (self.value is not None) == self.applies, self.name

    @property
    def applies(self) -> bool:
        """Whether every hypothesis holds."""
        return all_hold(self.hypotheses)


@dataclass(frozen=True, kw_only=True)
class Bound(AbstractStatement):
    """The statement `quantity relation value`, for example sigma_min(J)^2 >= value."""

    quantity: str
    relation: Relation
    parts: Mapping[str, float]
    """The numbers from which the value is made."""
    observed: float | None = None
    """The quantity itself, where the input determines it cheaply."""

    @property
    def contradicted(self) -> bool | None:
        """Whether the observed quantity violates the statement beyond rounding; None if it was not observed.

        Printed statements that are false are kept as functions, and this property is their counterexample.
        """
        if self.observed is None or self.value is None:
            return None
        slack = 1e-12 * abs(self.value)  # of the value alone, so that an infinite observation contradicts
        excess = self.observed - self.value
        if self.relation in ("<", "<="):
            return excess > slack or (self.relation == "<" and excess >= 0)
        if self.relation in (">", ">="):
            return excess < -slack or (self.relation == ">" and excess <= 0)
        return abs(excess) > slack


S = TypeVar("S", bound=AbstractStatement)


def all_hold(hypotheses: tuple[Hypothesis, ...]) -> bool:
    """Whether every hypothesis holds; true for none."""
    return all(h.holds for h in hypotheses)


def settle(statement: S, *, strict: bool) -> S:
    """Return the record, or raise `HypothesisError` if it is strict and does not apply."""
    if strict and not statement.applies:
        raise HypothesisError(statement)
    return statement


def check_single(head: Head) -> None:
    """Raise unless a head is what the papers' statements are about."""
    if not head.is_single:
        raise ValueError(
            "expected one query head that attends to its own tokens: the statements of wellcond.theory are not about "
            f"{head.num_query_heads} grouped heads or cross attention; use wellcond.jacobian_spectrum"
        )

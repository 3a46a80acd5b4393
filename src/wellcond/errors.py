"""Every exception and warning of the package; each carries its own message."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

DEBUG_VARIABLE = "WELLCOND_DEBUG"
"""Environment variable that shows the traceback of every error, as --debug does; worker processes inherit it."""


class WellcondError(Exception):
    """Base of every error that wellcond raises on purpose."""


class AttentionNotFoundError(WellcondError, ValueError):
    """No attention was recognised anywhere in a model."""

    def __init__(self, classes_seen: Iterable[str], families: Iterable[str]) -> None:
        """List the module classes that were seen and the families that are known."""
        self.classes_seen = sorted(set(classes_seen))
        super().__init__(
            "no attention was found in this model.\n"
            f"  module classes seen: {_some(self.classes_seen)}\n"
            f"  families known: {_some(sorted(set(families)))}\n"
            "  If one of these classes is an attention, describe it with @wellcond.register_adapter(ThatClass)."
        )


class UnsupportedLayoutError(WellcondError, ValueError):
    """An attention was seen, but where its heads are stored cannot be known."""

    def __init__(self, name: str, problem: str, *, class_name: str = "ThatClass") -> None:
        """Say which module, what is wrong, and what to register."""
        self.name = name
        self.class_name = class_name
        self.problem = problem
        super().__init__(
            f"{name or '(the model itself)'} ({class_name}): {problem}\n"
            f"  A wrong layout would be silent, so wellcond does not guess. Declare it with\n"
            f"  @wellcond.register_adapter({class_name}); see docs/layouts.md."
        )


class MissingExtraError(WellcondError, ImportError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, package: str, extra: str) -> None:
        """Name the package and the install line."""
        super().__init__(f"this needs {package}, which is not installed. Run: pip install 'wellcond[{extra}]'")


class UnknownChoiceError(WellcondError, ValueError):
    """A method or an option that does not exist."""

    def __init__(self, what: str, got: object, choices: Sequence[object], advice: str = "") -> None:
        """List the choices."""
        listed = ", ".join(repr(choice) for choice in choices)
        super().__init__(f"unknown {what}: got {got!r}, expected one of {listed}.{advice}")


class WeightError(WellcondError, ValueError):
    """A projection weight on which the operation asked for is not defined."""


class ConditioningError(WellcondError, RuntimeError):
    """A conditioned model was needed and this one is not, or the reverse."""


class CheckpointMismatchError(WellcondError, RuntimeError):
    """A checkpoint was written under another correction than the model carries."""


class NumericalWarning(UserWarning):
    """The numbers are defined, but probably not what the user hopes for."""


class EvidenceWarning(UserWarning):
    """Our records say that this hurts models like the one at hand."""


class CheckpointWarning(UserWarning):
    """A checkpoint was accepted under an interpretation that the user should know of."""


def _some(names: Sequence[str], limit: int = 40) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + rest


VERBS: dict[str, str] = {}
"""What every registered method is used with: `init_` if it is a start, `condition_` if a correction in every pass."""


def check_method(what: str, got: str, choices: Sequence[str]) -> None:
    """Like `check_choice` for methods; one of the other verb is answered with that verb."""
    if got not in choices:
        for verbs in ("init", "conditioning"):  # whose methods are registered when they are first used
            importlib.import_module(f"wellcond.{verbs}.apply")
        advice = f" {got!r} belongs to the other verb: use {VERBS[got]}(model, {got!r})." if got in VERBS else ""
        raise UnknownChoiceError(what, got, choices, advice)


def check_choice(what: str, got: object, choices: Sequence[object]) -> None:
    """Raise `UnknownChoiceError` unless `got` is one of `choices`."""
    if got not in choices:
        raise UnknownChoiceError(what, got, choices)

"""Every exception and warning of the package; each carries its own message."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence

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
            "  If one of its classes is an attention, describe it with @wellcond.register_adapter(ThatClass): see "
            "docs/layouts.md.\n"
            f"  Classes in the model: {_some(self.classes_seen)}\n"
            f"  Classes known: {_some(sorted(set(families)), 12)}"
        )


class SiteNotFoundError(WellcondError, KeyError):
    """No attention of a model has the path that was asked for, or several have."""

    def __init__(self, path: str, names: Sequence[str], *, several: bool, close: Sequence[str] = ()) -> None:
        """Say which ones it may be."""
        listed = _some([repr(name) for name in names], 12)
        if several:
            text = f"{path!r} is part of {len(names)} attentions: expected the path of one, such as {listed}"
        else:
            meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
            text = f"no attention {path!r}{meant} The model has {listed}"
        self.message = text
        super().__init__(text)

    def __str__(self) -> str:
        """The message; a KeyError would put it in quotes."""
        return self.message


class UnsupportedLayoutError(WellcondError, ValueError):
    """An attention was seen, but where its heads are stored cannot be known."""

    def __init__(self, name: str, problem: str, *, class_name: str = "ThatClass", advice: str = "") -> None:
        """Say which module, what is wrong, and what to do; without `advice`, what to register."""
        self.name = name
        self.class_name = class_name
        self.problem = problem
        advice = advice or (
            f"A wrong layout would be silent, so wellcond does not guess. Declare it with\n"
            f"  @wellcond.register_adapter({class_name}); see docs/layouts.md."
        )
        super().__init__(f"{name or '(the model itself)'} ({class_name}): {problem}\n  {advice}")


class MissingExtraError(WellcondError, ImportError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, package: str, extra: str) -> None:
        """Name the package and the install line."""
        super().__init__(f"this needs {package}, which is not installed. Run: pip install 'wellcond[{extra}]'")


@contextlib.contextmanager
def needs_extra(package: str, extra: str) -> Iterator[None]:
    """Around imports of an optional dependency: without it, the error names the install line.

    Raises: MissingExtraError.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra) from error


class UnknownChoiceError(WellcondError, ValueError):
    """A method or an option that does not exist."""

    def __init__(self, what: str, got: object, choices: Sequence[object], *, advice: str = "") -> None:
        """List the choices, after `advice` on what to do instead."""
        listed = ", ".join(repr(choice) for choice in choices)
        near = difflib.get_close_matches(str(got), [choice for choice in choices if isinstance(choice, str)], 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(
            (f"{advice}\n  " if advice else "") + f"unknown {what}: got {got!r}, expected one of {listed}.{meant}"
        )


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


class FairnessWarning(UserWarning):
    """Methods of a comparison do not train at the values that were searched for them, since others have none."""


class LayoutWarning(UserWarning):
    """A user's adapter declares a layout that no trial run of the module could confirm."""


class CheckpointWarning(UserWarning):
    """A checkpoint was accepted under an interpretation that the user should know of."""


def _some(names: Sequence[str], limit: int = 40) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + rest


def check_choice(what: str, got: object, choices: Sequence[object]) -> None:
    """Raise `UnknownChoiceError` unless `got` is one of `choices`."""
    try:
        known = got in choices
    except (RuntimeError, ValueError):  # tensors and arrays compare entry by entry
        known = False
    if not known:
        raise UnknownChoiceError(what, got, choices)


# The two verbs are told apart by their methods: a start is written once, a correction is part of every forward pass.

METHODS_OF = {
    "init_": (
        "calibrated", "conditioned", "default", "gaussian", "mimetic", "nanochat", "orthogonal", "small", "t_fixup",
        "weight_selection",
    ),
    "condition_": ("balanced", "identity", "polar"),
}  # fmt: skip
KINDS = {
    "init_": ("initialisation method", "an initialisation, written once before training"),
    "condition_": ("conditioning method", "a correction in every forward pass"),
}


def check_method(
    verb: str, got: object, choices: Sequence[str], *, instead: str = 'wellcond.{verb}(model, "{got}")'
) -> None:
    """Raise `UnknownChoiceError` unless `got` is a method of a verb; a method of the other verb is told apart.

    Args:
        verb: ``init_`` or ``condition_``.
        got: what was asked for.
        choices: methods of the verb.
        instead: what to type for a method of the other verb.
    """
    if got in choices:
        return
    other = next((name for name, methods in METHODS_OF.items() if name != verb and got in methods), None)
    advice = f"{got!r} is {KINDS[other][1]}: use {instead.format(verb=other, got=got)}" if other else ""
    raise UnknownChoiceError(KINDS[verb][0], got, choices, advice=advice)

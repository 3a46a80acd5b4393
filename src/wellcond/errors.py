"""Every exception and warning that reaches a user; each says what was expected, what was found and what to do.

What an exception was made of is in its attributes, where a program may want it: `field`, `expected` and `found` of
each, `path`, ...
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

DEBUG_VARIABLE = "WELLCOND_DEBUG"
"""Environment variable that shows the traceback of every error, as --debug does; worker processes inherit it."""


class WellcondError(Exception):
    """Base of every error that wellcond raises on purpose.

    `field` is the option or field that is wrong, `expected` what was asked for and `found` what was there; None where
    the message alone tells it. Tests ask for these, so that messages may be worded anew.
    """

    def __init__(
        self, message: object = "", *, field: str | None = None, expected: Any = None, found: Any = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected
        self.found = found


class AttentionNotFoundError(WellcondError, ValueError):
    """No attention was recognised anywhere in a model."""

    def __init__(self, classes_seen: Iterable[str], families: Iterable[str]) -> None:
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
            text = f"{path!r} is part of {len(names)} attention layers: expected the path of one, such as {listed}"
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

    def __init__(self, package: str, extra: str, problem: str = "which is not installed") -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"this needs {package}, {problem}. Run: pip install 'wellcond[{extra}]'")


@contextlib.contextmanager
def needs_extra(package: str, extra: str, *modules: str) -> Iterator[None]:
    """Around imports of an optional dependency: without it, the error names the install line.

    Args:
        package: its name, as pip knows it.
        extra: of wellcond, that installs it.
        *modules: names under which it is imported, where they are others.

    Raises: MissingExtraError; where the package is there but fails to import, with the reason.
    """
    try:
        yield
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and sys.modules.get(name) is None
        if absent and name in (modules or (package,)):
            raise MissingExtraError(package, extra) from error
        raise MissingExtraError(package, extra, f"which cannot be imported: {error}") from error


class OptionError(WellcondError, ValueError):
    """An option of another type, out of range, or without meaning beside the others."""


class UnknownChoiceError(OptionError):
    """A method or an option that does not exist."""

    def __init__(self, what: str, got: object, choices: Sequence[object], *, advice: str = "") -> None:
        """List the choices, after `advice` on what to do instead."""
        listed = ", ".join(repr(choice) for choice in choices)
        near = difflib.get_close_matches(str(got), [choice for choice in choices if isinstance(choice, str)], 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        text = f"unknown {what}: got {got!r}, expected one of {listed}.{meant}"
        super().__init__(f"{advice}\n  {text}" if advice else text, field=what, expected=tuple(choices), found=got)


class MissingFileError(WellcondError, FileNotFoundError):
    """A file that was named is not there."""


class WeightError(WellcondError, ValueError):
    """A projection weight on which the operation asked for is not defined."""


class ConditioningError(WellcondError, RuntimeError):
    """A conditioned model was needed and this one is not, or the reverse."""


class CheckpointMismatchError(WellcondError, RuntimeError):
    """A checkpoint was written under another correction than the model carries."""


# Measuring.


class NotDefinedError(WellcondError, ValueError):
    """A convention or a method that is not defined for this attention."""


class NotPlainError(WellcondError, ValueError):
    """An attention whose heads are not softmax(s Q K^T + bias) V of the tokens captured."""


class ReplayError(WellcondError, RuntimeError):
    """An attention module does not give again what it gave in its model."""


class CopyError(WellcondError, RuntimeError):
    """An attention module holds something that cannot be copied."""


class MemoryLimitError(WellcondError, MemoryError):
    """A method would need more memory than there is."""


class TooLongError(WellcondError):
    """A spectrum was not begun, because it is expected to take longer than it may."""

    def __init__(self, seconds: float, shown: str) -> None:
        """Keep the seconds; `shown` is their number in words."""
        super().__init__(f"kappa(J) was not measured: it was expected to take up to {shown}")
        self.seconds = seconds


class ReportError(WellcondError, ValueError):
    """A file that is no report of a measurement, or of another one."""


class ReportDataError(WellcondError, ValueError):
    """Data that is not a measurement."""


class DiagnosisError(WellcondError, ValueError):
    """A file that is no diagnosis, or a model that cannot be diagnosed."""


class MonitorError(WellcondError, ValueError):
    """A file that no monitor wrote, or that cannot be written."""


class HypothesisError(WellcondError, ValueError):
    """A statement was asked for outside its hypotheses."""

    def __init__(self, statement: Any) -> None:
        """List the hypotheses of an `AbstractStatement` that fail, with their numbers."""
        self.statement = statement
        failed = [
            f"  failed: {h.text} ({', '.join(f'{key} = {number:g}' for key, number in h.numbers.items())})"
            for h in statement.hypotheses
            if not h.holds
        ]
        super().__init__(
            f"{statement.name} does not apply here: its hypotheses do not all hold.\n" + "\n".join(failed) + "\n"
            "  Pass strict=False to get the record with value None instead of this error."
        )


# Models, data and runs of the laboratory.


class ModelSpecError(WellcondError, ValueError):
    """A MODEL argument that does not lead to a model."""


class ModelTooLargeError(WellcondError, MemoryError):
    """A model that does not fit into memory."""


TRUST_NEEDED = "{} would run code from a file that a recipe names; pass --trust-local-code if you trust it"


class RecipeError(WellcondError, ValueError):
    """A recipe that cannot be run, with the path, the value and what was expected."""


class DataError(WellcondError, ValueError):
    """Data that cannot be used as asked: which file and row, what was expected, what was found, what to do."""

    def __init__(
        self,
        problem: str,
        *,
        expected: str,
        found: str,
        todo: str = "",
        path: Path | str | None = None,
        row: int | None = None,
    ) -> None:
        """Put the parts on lines of their own; `path` and `row` are for programs, `problem` names them too."""
        message = "\n  ".join([problem, f"expected: {expected}", f"found:    {found}", *filter(None, [todo])])
        super().__init__(message, expected=expected, found=found)
        self.problem = problem
        self.path = path
        self.row = row


class RunError(WellcondError, RuntimeError):
    """A run folder that cannot be used or written."""


class FolderInUse(RunError):
    """Another process holds the lock of this run."""


class RunRecordError(WellcondError, ValueError):
    """A stored run that is missing, broken, or of another version."""

    def __init__(self, path: Path, problem: str, advice: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}\n  {advice}")


# Warnings.


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

"""The door: `wellcond COMMAND`."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from wellcond.errors import DEBUG_VARIABLE, MissingExtraError, WellcondError

if TYPE_CHECKING:
    from typer import Typer

MISTAKE, BUG = 2, 1
"""Exit codes: of what the user can mend, as of a wrong option, and of what only wellcond can."""


def main() -> None:
    """Run the command line; every error is one message, and its traceback is shown with --debug only."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(str(MissingExtraError("typer and rich", "cli")) + f" ({error})")
    try:
        load_app()()
    except WellcondError as error:
        _end(error, str(error), MISTAKE)
    except MemoryError as error:
        _end(error, "not enough memory for this; take a smaller model, fewer samples or fewer runs at once", MISTAKE)
    except OSError as error:
        _end(error, f"{error}; give a path that can be read and written", MISTAKE)
    except Exception as error:  # the last resort: nobody should have to read a traceback
        _end(error, _report(error), BUG)


def load_app() -> Typer:
    """The command line with all its commands; what they do is imported when it is needed, since torch takes seconds."""
    # In the order of the help.
    from wellcond.cli import doctor, inspect, checkpoints, measure, compare, train, reproduce, report  # noqa: F401, I001
    from wellcond.cli.app import app

    return app


def _report(error: Exception) -> str:
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    said = (str(error).strip().splitlines() or [""])[0][:300]
    return (
        f"wellcond {command} failed unexpectedly: {type(error).__name__}: {said}\n"
        f"  This is a bug in wellcond; please report it with what `wellcond --debug {command} ...` prints."
    )


def _end(error: Exception, message: str, code: int) -> NoReturn:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

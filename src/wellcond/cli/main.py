"""The door: `wellcond COMMAND`."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from wellcond.errors import DEBUG_VARIABLE, MissingExtraError, WellcondError

MISTAKE, BUG = 2, 1
"""Exit codes: of what the user can mend, as of a wrong option, and of what only wellcond can."""


def main() -> None:
    """Run the command line; every error is one message, and its traceback is shown with --debug only."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(str(MissingExtraError("typer and rich", "cli")) + f" ({error})")
    from wellcond.cli.commands import app

    try:
        app()
    except WellcondError as error:
        _end(error, str(error), MISTAKE)
    except MemoryError as error:
        _end(error, "not enough memory for this; take a smaller model, fewer samples or fewer runs at once", MISTAKE)
    except OSError as error:
        if error.filename is None:
            _end(error, _report(error), BUG)
        _end(error, f"{error.filename}: {error.strerror}; give a path that can be read and written", MISTAKE)
    except Exception as error:  # the last resort: nobody should have to read a traceback
        _end(error, _report(error), BUG)


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

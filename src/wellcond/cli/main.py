"""Entry point of the command line: `wellcond COMMAND`."""

from __future__ import annotations

import inspect as inspect_module
import os
import sys
import traceback
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wellcond.errors import DEBUG_VARIABLE, MissingExtraError, WellcondError

if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """Run the command line; every error is one message, and its traceback is shown with --debug only."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(str(MissingExtraError("typer and rich", "cli")) + f" ({error})")
    from wellcond.cli.console import echo, warnings_made_visible

    try:
        _check_arguments(sys.argv[1:])
        with warnings_made_visible():
            load_app()()
    except Exception as error:  # nobody should have to read a traceback
        if os.environ.get(DEBUG_VARIABLE):
            echo("".join(traceback.format_exception(error)).rstrip(), err=True)
        echo(f"error: {_explain(error)}", err=True)
        # What the user can fix, as a wrong option, or what only wellcond can.
        sys.exit(2 if isinstance(error, WellcondError | MemoryError | OSError) else 1)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuse control characters, such as those of a file's name that a pattern of the shell stands for.

    What is wrong with an argument is printed by typer, which would send them to the terminal.
    """
    for argument in arguments:
        if any(unicodedata.category(character) == "Cc" and character not in "\t\n\r" for character in argument):
            raise WellcondError(
                f"expected arguments without control characters, found {argument!r}; rename such a file, or run the "
                "command in its folder"
            )


def load_app() -> Typer:
    """The command line with all its commands; what they do is imported when it is needed, since torch takes seconds."""
    # In the order of the help.
    from wellcond.cli import measure, watch, inspect, selftest, experiments, report  # noqa: F401, I001
    from wellcond.cli.app import app

    for command in app.registered_commands:
        command.help = _paragraphs(inspect_module.getdoc(command.callback) or "")
    return app


def _paragraphs(text: str) -> str:
    """A help text with each paragraph on one line: lines are broken for the terminal, not for the source."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _explain(error: Exception) -> str:
    if isinstance(error, WellcondError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory for this; take a smaller model, fewer samples or fewer runs at once"
    if isinstance(error, OSError):
        return f"{error}; give a path that can be read and written"
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    said = (str(error).strip().splitlines() or [""])[0][:300]
    return (
        f"wellcond {command} failed unexpectedly: {type(error).__name__}: {said}\n"
        f"  This is a bug in wellcond; please report it with what `wellcond --debug {command} ...` prints."
    )


if __name__ == "__main__":
    main()

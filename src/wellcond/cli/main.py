"""The door: `wellcond COMMAND`."""

from __future__ import annotations

import sys

from wellcond.errors import MissingExtraError, WellcondError


def main() -> None:
    """Run the command line; wellcond's own errors are printed without a traceback."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(str(MissingExtraError("typer and rich", "cli")) + f" ({error})")
    import wellcond.cli.experiment_commands  # noqa: F401  (adds its commands)
    import wellcond.cli.glue_command  # noqa: F401
    import wellcond.cli.reproduce_command  # noqa: F401
    from wellcond.cli.commands import app

    try:
        app()
    except WellcondError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

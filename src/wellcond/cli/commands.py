"""The command line with all its commands; what they do is imported when it is needed, since torch takes seconds."""

# ruff: noqa: I001  (in the order of the help)
from wellcond.cli import (  # noqa: F401  (each adds its command)
    doctor,
    inspect,
    init,
    fold,
    measure,
    demo,
    compare,
    train,
    report,
    recipes,
    glue,
    reproduce,
    claims,
    pack,
)  # fmt: skip
from wellcond.cli.app import app

__all__ = ["app"]

"""The command line with all its commands; what they do is imported when it is needed, since torch takes seconds."""

from wellcond.cli import (  # noqa: F401  (each adds its command)
    claims,
    compare,
    demo,
    doctor,
    fold,
    glue,
    init,
    inspect,
    measure,
    pack,
    recipes,
    report,
    reproduce,
    train,
)  # fmt: skip  # isort: skip
from wellcond.cli.app import app

__all__ = ["app"]

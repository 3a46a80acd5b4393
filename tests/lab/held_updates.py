"""Imported by a command, with --import: the run of each of its processes waits in an early update."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a command that is started knows no tests

from lab.held_model import FOLDER, wait_in
from wellcond.lab.train.engine import Engine

HELD_AT = 1
"""The step from which the update begins: one has been made."""


def _held(update):
    def held_update(engine, step, *arguments, **options):
        if step == HELD_AT and FOLDER in os.environ:
            wait_in(Path(os.environ[FOLDER]))
        return update(engine, step, *arguments, **options)

    return held_update


Engine.update = _held(Engine.update)

"""A model whose training waits at a step; its file is named by recipes, and read where the tests are not installed."""

import itertools
import os
import sys
import time
from pathlib import Path

import timm

from wellcond.lab.train.length import StopFlag

FOLDER = "WELLCOND_TEST_HOLD"
HELD_AT = 10
"""The step; the recipe of `small.py` has saved its seventh by then, and saves its fourteenth next."""


def build(num_labels, num_channels, image_size, **arguments):
    """What `timm:vit_tiny_patch16_224` is, held if the process was started so."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=num_labels, in_chans=num_channels, **arguments)
    if FOLDER in os.environ:
        updates, folder = itertools.count(1), Path(os.environ[FOLDER])
        model.register_forward_pre_hook(
            lambda model, given: wait_in(folder) if model.training and next(updates) == HELD_AT else None
        )
    return model


def wait_in(folder):
    """Until the hold ends, or the run is asked to stop, which it does at the end of a step."""
    (folder / str(os.getpid())).touch()
    stop = _stop_flag()
    while not (folder / "open").exists() and not stop.requested:
        time.sleep(0.02)


def _stop_flag():
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("stop"), StopFlag):
        frame = frame.f_back
    return frame.f_locals["stop"]

"""Private names of torch and other libraries that wellcond relies on, in one place, with what they were tried on.

Every function says what it needs, why no public name serves, and with which versions it was tried. Code elsewhere in
wellcond uses public names only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def without_callbacks(trainer: Any, *kinds: type) -> Iterator[list[Any]]:
    """Leave callbacks of some classes out of what a Trainer of transformers calls; yields those left out.

    Needs `Trainer.callback_handler.callbacks`: a log cannot be kept from one callback in public, and `pop_callback`
    changes the list while the handler, which calls us, goes through it. Tried with transformers 5.23.
    """
    handler = trainer.callback_handler
    everyone = handler.callbacks
    left_out = [one for one in everyone if isinstance(one, kinds)]
    handler.callbacks = [one for one in everyone if not isinstance(one, kinds)]
    try:
        yield left_out
    finally:
        handler.callbacks = everyone


@contextlib.contextmanager
def without_mixed_precision(model: nn.Module) -> Iterator[None]:
    """Take off the forward pass that Accelerate puts around a model for mixed precision.

    Needs `_original_forward`, under which Accelerate keeps the model's own: its public `unwrap_model` takes the wrapper
    off for good. Tried with accelerate 1.15.
    """
    wrapped, original = vars(model).get("forward"), vars(model).get("_original_forward")
    if wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped

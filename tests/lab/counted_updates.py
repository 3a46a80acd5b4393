"""A user's file that notes what an update asks of the host and of other ranks, in the folder of the environment."""

import os
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.lab.train.engine import Engine

FOLDER = "WELLCOND_TEST_COUNTS"


class _Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.noted.append("item")
        elif func.namespace == "c10d":
            self.noted.append(f"{func._opname} {sum(part.numel() for part in args[0])}")
        return func(*args, **(kwargs or {}))


def _noted(update):
    def wrapped(engine, step, batches, *, want_norms):
        with _Noting() as mode:
            found = update(engine, step, batches, want_norms=want_norms)
        if not want_norms:
            with open(Path(os.environ[FOLDER]) / os.environ["RANK"], "a") as file:
                file.write("".join(f"{line}\n" for line in ["update", *mode.noted]))
        return found

    return wrapped


if "RANK" in os.environ:  # not in the process of the test, which only asks for the file's place
    Engine.update = _noted(Engine.update)

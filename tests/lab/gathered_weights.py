"""Trains a small sharded run and writes the largest number of gathered elements that were alive at once on rank 0."""

import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.small import small_job
from wellcond.lab.train.run import run_job


class GatheredElements(TorchDispatchMode):
    """Counts elements of whole tensors that this process has gathered and still holds."""

    def __init__(self):
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            storage, size = result.untyped_storage(), result.numel()
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self.release, size)
        return result

    def release(self, size):
        self.alive -= size


if __name__ == "__main__":
    with GatheredElements() as gathered:
        run_job(small_job(sys.argv[1], "conditioned+balanced", "training.length={steps: 2}"))
    if torch.distributed.get_rank() == 0:
        print("most gathered elements:", gathered.most)

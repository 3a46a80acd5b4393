"""Run functions on two gloo processes at once and bring back what the first one returns."""

import datetime
import os
import sys
import traceback
import warnings
from unittest import mock

import torch
import torch.distributed
import torch.multiprocessing

from patience import PATIENCE


def run_on_two(folder, function, cases):
    """{case: function(*case) of rank 0} for every case, all in one pair of processes: starting them takes seconds.

    A case that raises gives the text of its error, which must be the same on both.
    """
    # A process that is killed by a signal prints where it was.
    with mock.patch.dict(os.environ, {"PYTHONFAULTHANDLER": "1"}):
        torch.multiprocessing.spawn(_work, args=(str(folder), function, cases), nprocs=2)
    return {case: torch.load(folder / f"{index}.pt", weights_only=True) for index, case in enumerate(cases)}


def _work(rank, folder, function, cases):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE),  # a process that waits in vain fails the test
    )
    for index, case in enumerate(cases):
        try:
            result = function(*case)
        except Exception as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"
        both = [None, None]
        torch.distributed.all_gather_object(both, result if isinstance(result, str) else None)
        if both[0] != both[1]:
            result = f"the processes disagree: {both}"
        if rank == 0:
            torch.save(result, os.path.join(folder, f"{index}.pt"))
    torch.distributed.destroy_process_group()
    # Meshes of the models still hold the group, hence gloo's threads. One that lets go of its last tensor while the
    # interpreter ends aborts the process, now and then, so this one ends without.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def assert_same_everywhere(model):
    """Weights that each process has for itself, and those that they hold together, are the same on both."""
    if not torch.distributed.is_initialized():
        return
    sums = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sums[name] = whole.detach().double().sum().item()
    both = [None, None]
    torch.distributed.all_gather_object(both, sums)
    different = [name for name in sums if both[0][name] != both[1][name]]
    assert not different, different


def is_first():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

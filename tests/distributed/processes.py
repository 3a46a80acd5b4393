"""Run functions on two gloo processes at once and bring back what the first one returns."""

import datetime
import os
import traceback
import warnings
from unittest import mock

import torch
import torch.distributed
import torch.multiprocessing

from patience import PATIENCE

IMPORTED = [
    "timm",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "wellcond.measurement.tracker",
]


class _Pair:
    """Two processes that form a group and work until this one ends: to start them takes longer than most cases."""

    def __init__(self, folder):
        # Both are forked from a server that has imported, which takes longer than most cases do.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.connections, self.processes = [], []
        # A process that is killed by a signal prints where it was.
        with mock.patch.dict(os.environ, {"PYTHONFAULTHANDLER": "1"}):
            for rank in range(2):
                ours, theirs = context.Pipe()
                self.processes.append(context.Process(target=_serve, args=(rank, str(folder), theirs), daemon=True))
                self.processes[-1].start()
                self.connections.append(ours)
                theirs.close()

    def work(self, *task):
        """Let both do a task; raises EOFError if one of them dies."""
        for connection in self.connections:
            connection.send(task)
        for connection in self.connections:
            connection.recv()

    def end(self):
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()


_PAIRS: list[_Pair] = []


def run_on_two(folder, function, cases):
    """{case: function(*case) of rank 0} for every case, in a pair of processes that all calls share.

    A case that raises gives the text of its error, which must be the same on both.
    """
    if not _PAIRS:
        _PAIRS.append(_Pair(folder))
    try:
        _PAIRS[0].work(str(folder), function, cases)
    except BaseException:
        _PAIRS.pop().end()
        raise
    return {case: torch.load(folder / f"{index}.pt", weights_only=True) for index, case in enumerate(cases)}


def on_two(folder, function, *case):
    """`function(*case)` of rank 0, or the text of its error."""
    return run_on_two(folder, function, [case])[case]


def _serve(rank, folder, connection):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE),  # a process that waits in vain fails the test
    )
    while True:
        try:
            _work(rank, *connection.recv())
        except EOFError:
            os._exit(0)
        connection.send("done")


def _work(rank, folder, function, cases):
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

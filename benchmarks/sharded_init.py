"""Memory and time of `init_` on a GPT-2 that is built on the meta device and sharded over two processes by FSDP2.

    python benchmarks/sharded_init.py [--width 2048] [--depth 32] [--heads 32]

Prints, for each process, the peak of its memory beyond what it had after its imports, as a ratio to the size of its
own part of the model and to the whole model: well below the whole means that no process held a full copy. The defaults
have 1.7 billion parameters (6.9 GB in float32, over both processes).
"""

import argparse
import resource
import tempfile
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(rank, store, sizes, method):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=2)
    before, start = peak(), time.perf_counter()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=sizes.width, n_layer=sizes.depth, n_head=sizes.heads))
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    built, loaded = time.perf_counter() - start, peak() - before

    start = time.perf_counter()
    wc.init_(model, method, generator=torch.Generator().manual_seed(0))
    seconds, used = time.perf_counter() - start, peak() - before
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    own = sum(parameter.to_local().numel() * parameter.element_size() for parameter in model.parameters())
    for turn in range(2):
        torch.distributed.barrier()
        if turn == rank:
            print(
                f"process {rank}: {total / 4e9:.2f} billion parameters, {total / 1e9:.2f} GB,",
                f"own part {own / 1e9:.2f} GB;",
                f"peak before init_ {loaded / 1e9:.2f} GB, after {used / 1e9:.2f} GB,",
                f"{used / own:.2f} of the own part, {used / total:.2f} of the whole;",
                f"built in {built:.0f} s, init_ took {seconds:.0f} s",
                flush=True,
            )
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--method", default="conditioned")
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(work, args=(store, sizes, sizes.method), nprocs=2)


if __name__ == "__main__":
    main()

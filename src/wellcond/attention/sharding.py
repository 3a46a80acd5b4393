"""What torch wraps around a model (compile, DistributedDataParallel) and how it shards weights (DTensor).

FSDP2 and tensor parallelism make DTensors, of which every rank holds a shard: `offsets` and `sizes` on each axis.
Gathering the full tensor is a collective operation, which every rank must reach; taking one's own shard of a tensor
that is there in full is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellcond.arguments import check_model
from wellcond.private import constant_when_compiled, local_sizes_and_offsets, refresh_ddp_buffers


def is_distributed(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor; torch.distributed is not imported for that."""
    return tensor is not None and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered if it is sharded; every rank that holds a shard must call this."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LocalShard:
    """Where the shard of this rank lies in a distributed tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a full tensor of the same shape; a view."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(axis, min(offset, tensor.shape[axis]), size)
        return tensor

    def inside(self, positions: Tensor, axis: int) -> Tensor:
        """Which of these positions on an axis the shard contains."""
        first = self.offsets[axis]
        return (positions >= first) & (positions < first + self.sizes[axis])


def local_shard(tensor: Tensor, shape: tuple[int, ...] | None = None) -> LocalShard:
    """Where the shard of this rank lies in a distributed tensor; in a compiled graph, `shape` must be given."""
    shape = tuple(tensor.shape) if shape is None else shape
    return LocalShard(*_offsets_and_sizes(shape, tensor.device_mesh, tensor.placements))  # type: ignore[attr-defined]


@constant_when_compiled
def _offsets_and_sizes(shape: tuple[int, ...], mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes, offsets = local_sizes_and_offsets(shape, mesh, placements)
    return offsets, sizes


def from_local(tensor: Tensor, part: Tensor) -> Tensor:
    """A distributed tensor placed like `tensor`, of which this rank holds `part`; gradients pass."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def to_local(tensor: Tensor) -> Tensor:
    """The shard of this rank, or the tensor itself where it is not sharded; a view of the same memory."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def broadcast_from_rank_zero(values: Tensor, tensor: Tensor) -> Tensor:
    """Values of rank 0 of the mesh of `tensor`, on the mesh's device."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    values = values.to(mesh.device_type).contiguous()
    return distribute_tensor(values, mesh, [Replicate()] * mesh.ndim).to_local()


def any_rank(holds: bool, tensor: Tensor) -> bool:
    """Whether something holds on one of the ranks that have a shard of `tensor`; all of them must call this."""
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    count = torch.tensor(int(holds), device=mesh.device_type)
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(count, group=mesh.get_group(axis))
    return bool(count)


def any_distributed(model: nn.Module) -> bool:
    """Whether some parameter of a model is sharded."""
    return any(is_distributed(parameter) for parameter in model.parameters())


def process_number() -> int:
    """Rank of this process; 0 where there is no other."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def reduce_(tensor: Tensor, operation: Literal["SUM", "MAX"], group: Any = None) -> None:
    """Sum a tensor, or its largest entries, over all processes of a group; nothing happens where there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation), group=group)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is sharded over ranks, also while FSDP2 has gathered its weights; the same on every rank."""
    return bool(fsdp_modules(model)) or any_distributed(model)


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """The full state of a model on the CPU; every rank must call this, and rank 0 gets it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def reshard_(model: nn.Module) -> None:
    """Let FSDP2 shard again what it has left gathered, as after an evaluation."""
    for module in fsdp_modules(model):
        module.reshard()  # type: ignore[operator]


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 manages."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def wrappers(model: nn.Module | None) -> Iterator[nn.Module]:
    """A model, and what torch.compile's and DistributedDataParallel's wrappers hold, one inside the other."""
    while model is not None:
        yield model
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        inner: Any = model.module if is_ddp else getattr(model, "_orig_mod", None)
        model = inner


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers: same parameters, plain names.

    Raises: TypeError for something that is no module.
    """
    check_model(model)
    *_, inner = wrappers(model)
    return inner


def find_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """DistributedDataParallel, if it is one of the wrappers."""
    return next((one for one in wrappers(model) if isinstance(one, nn.parallel.DistributedDataParallel)), None)


def update_buffers(model: nn.Module) -> None:
    """Tell DistributedDataParallel which buffers its model has now: it sends those that it knows of."""
    ddp = find_ddp(model)
    if ddp is not None:
        refresh_ddp_buffers(ddp)

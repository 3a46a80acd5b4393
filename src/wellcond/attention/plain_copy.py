"""A plain copy of a module whose weights may be held in parts: by FSDP2, by tensor parallelism, by both, or by none.

`copy.deepcopy` does not work on what FSDP2 manages, and would copy hooks that talk to other processes. Here every part
gets a new object of its plain class first, then the contents are copied; parameters are whole, and there are no hooks.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wellcond.attention.sharding import full_tensor

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
FSDP_STATE = "__composable_api_state_key"


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before FSDP2 put its own in front."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return type(module)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, fsdp.FSDPModule))


def gathered(tensor: Tensor) -> Tensor:
    """The values of a tensor on the CPU; every process that holds a part must call this."""
    return full_tensor(tensor.detach()).cpu().clone()


def plain_copy(
    module: nn.Module,
    values: Callable[[Tensor], Tensor] = gathered,
    class_of: Callable[[nn.Module], type[nn.Module]] = plain_class,
) -> nn.Module:
    """Copy a module to the CPU, with `values` of its parameters and buffers."""
    copies = {part: _empty(class_of(part)) for part in module.modules()}
    memo: dict[int, Any] = {id(part): made for part, made in copies.items()}
    for part in copies:
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(values(parameter), parameter.requires_grad)
        for buffer in part._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = values(buffer)
    for part, made in copies.items():
        for name, content in part.__dict__.items():
            if not name.startswith(FSDP_STATE):
                made.__dict__[name] = OrderedDict() if name in HOOKS else copy.deepcopy(content, memo)
    return copies[module]


def _empty(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)

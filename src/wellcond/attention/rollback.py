"""A verb that fails leaves the model as it was, whatever the failure and wherever it happened."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.sharding import local_part, reshard_


class Rollback:
    """Remembers every module of a model, to put it back if something fails.

    Remembered are classes, attributes, and the contents of the dictionaries and sets among the attributes: parameters,
    buffers, children, hooks. Numbers are remembered of those tensors only that are given to `keep`, which everybody
    does before writing. A model that FSDP2 manages must hold its shards when this is made (`reshard_`).

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> rollback = Rollback(layer)
        >>> try:
        ...     layer.register_buffer("extra", torch.zeros(1))
        ...     1 / 0
        ... except ZeroDivisionError:
        ...     rollback.restore()
        >>> list(layer.state_dict())
        ['weight', 'bias']
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember all modules."""
        self.model = model
        self.modules = [(module, type(module), dict(vars(module)), _contents(module)) for module in model.modules()]
        self.numbers: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Remember the numbers of a tensor; returns them, of a sharded tensor those of this rank."""
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = tensor, local_part(tensor).detach().clone()
        return self.numbers[id(tensor)][1]

    @torch.no_grad()
    def restore(self) -> None:
        """Make the model what it was."""
        reshard_(self.model)  # a forward that failed may have left whole weights in place
        for module, cls, attributes, contents in self.modules:
            if type(module) is not cls:
                module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)
        for tensor, numbers in self.numbers.values():
            local_part(tensor).copy_(numbers)


def _contents(module: nn.Module) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(module).items() if type(value) in (dict, OrderedDict, set)}

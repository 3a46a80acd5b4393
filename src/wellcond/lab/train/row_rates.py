"""Optimisers that move some rows of a weight further than the rest, and Muon beside AdamW as one optimiser.

A step of AdamW, and of Muon, is proportional to the learning rate (decoupled weight decay included). So the rows of Q
and K inside a fused weight get a rate of their own if their part of a finished step is multiplied:

    W[rows] <- W_before[rows] + factor (W_after[rows] - W_before[rows])

Which rows is said by the group of the weight, as plain numbers, so that checkpoints hold it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wellcond.attention.distributed import is_distributed
from wellcond.lab.settings import RecipeError

Group = dict[str, Any]


class RowRates:
    """Remembers the rows of Q and K before a step, and multiplies what the step did to them."""

    def __init__(self, groups: list[Group]) -> None:
        """Before the step."""
        self._kept: list[tuple[Tensor, int, Tensor, float, Tensor]] = []
        for group in groups:
            if "rows" not in group:
                continue
            for weight in group["params"]:
                if is_distributed(weight):
                    raise RecipeError(
                        "optimizer.qk_lr_factor: rows of a fused weight that is sharded over processes (FSDP2) cannot "
                        "have a learning rate of their own; use DDP or one process, or qk_lr_factor: 1"
                    )
                rows = torch.tensor(group["rows"], device=weight.device)
                before = weight.detach().index_select(group["axis"], rows)
                self._kept.append((weight, group["axis"], rows, group["factor"], before))

    @torch.no_grad()
    def apply_(self) -> None:
        """After the step."""
        for weight, axis, rows, factor, before in self._kept:
            after = weight.index_select(axis, rows)
            weight.index_copy_(axis, rows, before + factor * (after - before))


class RowRateAdamW(torch.optim.AdamW):
    """AdamW whose groups may name rows that move `factor` times as far."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        rates = RowRates(self.param_groups)
        loss = super().step(closure)
        rates.apply_()
        return loss


class InSingle(TorchFunctionMode):
    """Casts to bfloat16 become casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation with float32 in place of bfloat16."""
        widened = {name: torch.float32 if value is torch.bfloat16 else value for name, value in (kwargs or {}).items()}
        return func(*args, **widened)


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for some groups and AdamW for the others; groups and state are here, for checkpoints."""

    def __init__(self, matrices: list[Group], others: list[Group], *, muon: Group, adamw: Group) -> None:
        """Groups of either kind, and the options of either optimiser."""
        self._muon = torch.optim.Muon(matrices, **muon)
        self._adamw = torch.optim.AdamW(others, **adamw) if others else None
        super().__init__([*matrices, *others], {})
        self.param_groups = [*self._muon.param_groups, *(self._adamw.param_groups if self._adamw else [])]
        self._share()

    def _share(self) -> None:
        """Let both optimisers work on this one's groups and state."""
        number = len(self._muon.param_groups)
        self._muon.param_groups, self._muon.state = self.param_groups[:number], self.state
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[number:], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As loaded from a checkpoint."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None if closure is None else closure()
        rates = RowRates(self.param_groups)
        # torch's Muon iterates in bfloat16: slow on a processor, and fatal on one that offers AMX without allowing it.
        on_cpu = all(weight.device.type == "cpu" for group in self._muon.param_groups for weight in group["params"])
        with InSingle() if on_cpu else contextlib.nullcontext():
            self._muon.step()
        if self._adamw is not None:
            self._adamw.step()
        rates.apply_()
        return loss

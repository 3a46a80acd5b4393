"""One update of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.site import AttentionSite
from wellcond.lab.seeding import derive, seed_device
from wellcond.lab.tasks.base import AbstractTask, Batch
from wellcond.lab.train.averaging import WeightAverage
from wellcond.lab.train.optimizers import set_point
from wellcond.lab.train.schedule import Curve


class Updater:
    """Forward, backward and step, over accumulations and processes."""

    def __init__(
        self,
        accelerator: Any,
        task: AbstractTask,
        model: nn.Module,
        optimizer: Any,
        *,
        curve: Curve,
        peak: float,
        clip_norm: float | None,
        average: WeightAverage | None,
        sites: Sequence[AttentionSite],
        seed: int,
    ) -> None:
        """`model` and `optimizer` as Accelerate prepared them; `sites` are those whose gradients are logged."""
        self.accelerator, self.task, self.model, self.optimizer = accelerator, task, model, optimizer
        self.curve, self.peak, self.clip_norm, self.average, self.seed = curve, peak, clip_norm, average, seed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sites, self.learning_rate = sites, 0.0

    def update(self, step: int, batches: Sequence[Batch], *, want_norms: bool) -> tuple[Tensor, dict[str, float]]:
        """Loss of this process's share (the mean over processes is the loss of the update) and norms of gradients.

        Norms are taken before clipping.
        """
        accelerator = self.accelerator
        # Dropout differs between processes, but not between methods, sessions or measured and unmeasured runs.
        seed_device(derive(self.seed, "dropout", step, accelerator.process_index), accelerator.device)
        parts = range(accelerator.process_index, len(batches) * accelerator.num_processes, accelerator.num_processes)
        batches = [self.task.training_batch(batch, step, part) for part, batch in zip(parts, batches, strict=True)]
        share = accelerator.num_processes / self._num_terms(batches)
        self.learning_rate = set_point(self.optimizer, self.curve(step), self.peak)
        losses = []
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                loss = self.task.loss(self.model, batch) * share
                accelerator.backward(loss)
            losses.append(loss.detach())
        norms = {}
        if want_norms:
            accelerator.unscale_gradients()
            total = global_norm([p.grad for p in self.parameters if p.grad is not None])
            norms = {"grad_norm": float(total)} | projection_norms(self.sites)
        if self.clip_norm is not None:
            accelerator.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), norms

    def _num_terms(self, batches: Sequence[Batch]) -> Any:
        """Terms of the loss over all parts and processes."""
        mine: Any = sum(self.task.num_terms(batch) for batch in batches)
        if self.accelerator.num_processes == 1:
            return mine
        counted = torch.as_tensor(mine, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(counted, reduction="sum").item()


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def projection_norms(sites: Sequence[AttentionSite]) -> dict[str, float]:
    """Norm of the gradient of all W_Q, of all W_K and of all W_V; nothing where gradients are sharded."""
    norms = {}
    for role in "qkv":
        gradients = [(site.slots[role], site.slots[role].parameter.grad) for site in sites]
        if any(gradient is None or hasattr(gradient, "full_tensor") for _, gradient in gradients):
            return {}
        parts = [slot.view_heads(gradient).norm() for slot, gradient in gradients if gradient is not None]
        norms[f"grad_norm_{role}"] = float(torch.stack(parts).norm())
    return norms

"""Batch norm over the batches of all processes, on any device.

torch's own SyncBatchNorm works on GPUs only, and DistributedDataParallel refuses a model that has one elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _SumOverProcesses.apply(gradient.contiguous())


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch norm whose mean and variance in training are those over all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if not (self.training and together):
            return super().forward(input)
        values = input.float()
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = torch.cat([values.sum((0, 2, 3)), values.square().sum((0, 2, 3)), count])
        first, second, total = _SumOverProcesses.apply(sums).split([self.num_features, self.num_features, 1])
        mean = first / total
        variance = (second / total - mean.square()).clamp_min(0)
        self._follow(mean.detach(), (variance * total / (total - 1)).detach())
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (values * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)

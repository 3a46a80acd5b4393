"""float64 where the device has it, else on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """Whether a device can hold float64; Apple's GPUs (MPS) cannot."""
    return device.type != "mps"


def to_float64(tensor: Tensor) -> Tensor:
    """The same numbers in float64 without a gradient, on the CPU where the device has none."""
    tensor = tensor.detach()
    return (tensor if has_float64(tensor.device) else tensor.cpu()).to(torch.float64)

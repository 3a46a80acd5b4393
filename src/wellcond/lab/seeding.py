"""Every random number of a run comes from (seed, purpose, position): nothing is carried from step to step.

So a run resumes at any step with the numbers it would have had, methods with the same seed are paired, and neither
measuring nor the number of processes changes what a sample or a dropout mask is.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive(seed: int, purpose: str, *position: int) -> int:
    """A 63-bit seed; different arguments give unrelated ones."""
    text = ":".join([str(seed), purpose, *map(str, position)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *position: int) -> torch.Generator:
    """A CPU generator of its own."""
    return torch.Generator().manual_seed(derive(seed, purpose, *position))


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which one epoch visits the samples."""
    return torch.randperm(num_samples, generator=generator(seed, "order", epoch))


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch's own generators of the CPU and of one device.

    `torch.manual_seed` would write down the call stack for devices that are not in use, a millisecond at every step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device.type).manual_seed(seed)

"""What `polar` and `balanced` add to a training step, by formula; the tests count the same at small sizes.

All products of `wellcond.linalg.polar` for one matrix (d, D), d <= D / 2, each of 2 d^2 D or 2 d^3 operations.
Nothing depends on the number of tokens, so the share of a step shrinks with the batch. Nothing is sent between ranks:
under DDP every rank computes all corrections, under FSDP2 those of the layer whose weights are gathered anyway, under
tensor parallelism those of its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wellcond.linalg.polar import SQUARINGS, accuracy_of, schedule


@dataclass(frozen=True)
class CorrectionCost:
    """Of one forward pass, for a number of heads of one shape."""

    wide_flops: int
    """Multiplications and additions in float64."""
    narrow_flops: int
    """In float32."""
    weight_bytes: int
    """Read and written in passes over whole weights; the d x d matrices are small beside it."""
    kept_bytes: int
    """Effective weights, kept for the backward pass."""


def correction_cost(num_heads: int, rows: int, columns: int, itemsize: int = 4) -> CorrectionCost:
    """Cost of correcting `num_heads` matrices (rows, columns) with columns >= 2 rows, stored with `itemsize` bytes.

    Example:
        >>> correction_cost(1, 64, 768).wide_flops / (2 * 64 * 64 * 768) < 4
        True
    """
    if columns < 2 * rows:
        raise ValueError(f"expected columns >= 2 rows, got ({rows}, {columns}); square matrices take two rounds")
    accuracy = accuracy_of(rows, columns, torch.float64)
    num_wide, num_steps = accuracy.num_wide_steps, len(schedule(accuracy.smallest))
    # A step has four products; the first one has no root to multiply yet, the last one leaves out two.
    wide_products = 4 * num_wide - 1 + 1  # and the product of both roots
    narrow_products = 4 * (num_steps - num_wide) - 3 + sum(SQUARINGS) + 1
    long, short = 2 * rows * rows * columns, 2 * rows**3
    weight = rows * columns
    return CorrectionCost(
        wide_flops=num_heads * (2 * long + wide_products * short),
        narrow_flops=num_heads * narrow_products * short,
        # float64: written and read by the copy, by the sum with E and by the result; read by norm, Gram matrix, product
        weight_bytes=num_heads * weight * (2 * itemsize + 8 * 8),
        kept_bytes=num_heads * weight * itemsize,
    )

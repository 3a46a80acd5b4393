"""From singular values, or both ends of them, to a `JacobianSpectrum`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.jacobian.forms import Form
from wellcond.jacobian.records import Convention, JacobianSpectrum, Status
from wellcond.jacobian.select import Choice
from wellcond.jacobian.structure import Structure
from wellcond.linalg.spectrum import default_rtol, resolve_rank

EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class Task:
    """One spectrum to compute: of which form, how, and within which memory."""

    form: Form
    structure: Structure
    choice: Choice
    convention: Convention
    rtol: float
    limit: int


def from_singular_values(task: Task, sigma: Tensor, reason: str | None = None) -> JacobianSpectrum:
    """Record of singular values that were not squared; missing ones (compressed away) are zero."""
    full = torch.zeros(task.structure.smaller_side, dtype=torch.float64)
    full[: min(len(sigma), len(full))] = sigma[: len(full)].cpu()
    shape = (task.structure.num_outputs, task.structure.num_parameters)
    rank = int(resolve_rank(full, shape, rtol=task.rtol))
    # Autograd's softmax cancels where our centred blocks do not: what `dense` says is sure to half the digits only.
    rounding = EPSILON**0.5 if task.choice.method == "dense" else default_rtol(shape)
    sigma_rank, error = float(full[rank - 1]) if rank else 0.0, rounding * float(full[0])
    return make_record(
        task, float(full[0]), float(full[-1]), sigma_rank, rank, "exact", values=full, reason=reason,
        max_bounds=(float(full[0]) - error, float(full[0]) + error),
        rank_bounds=(max(0.0, sigma_rank - error), sigma_rank + error),
    )  # fmt: skip


def make_record(
    task: Task,
    sigma_max: float,
    sigma_min: float,
    sigma_rank: float,
    rank: int,
    status: Status,
    *,
    max_bounds: tuple[float, float],
    rank_bounds: tuple[float, float],
    values: Tensor | None = None,
    reason: str | None = None,
    num_products: int = 0,
) -> JacobianSpectrum:
    """What was found, with what the structure says about it."""
    structure = task.structure
    return JacobianSpectrum(
        convention=task.convention,
        shape=(structure.num_outputs, structure.num_parameters),
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        sigma_rank=sigma_rank,
        rank=rank,
        nullity=structure.smaller_side - rank,
        null_space=structure.null_space,
        sigma_max_bounds=max_bounds,
        sigma_rank_bounds=rank_bounds,
        rtol=task.rtol,
        method=task.choice.method,
        reason=task.choice.reason if reason is None else f"{task.choice.reason}; {reason}",
        status=status,
        num_products=num_products,
        singular_values=None if values is None else tuple(values.tolist()),
    )

"""A learning rate of their own for queries and keys: as parameter groups, or row by row in fused weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.blocks import POSITIONS
from wellcond.attention.checks import Chosen
from wellcond.attention.find import check_readable
from wellcond.attention.sharding import to_local
from wellcond.attention.site import AttentionSite
from wellcond.errors import UnsupportedLayoutError
from wellcond.training.rows import NO_HEAD, AfterStep, check_from_zero, find_inside, heads_of_weight, local_part

# Position embeddings and class tokens are matrices by shape only.
UNDECAYED = (*POSITIONS, "relative_position_bias_table", "cls_token", "dist_token", "distillation_token", "reg_token")
COMPARED = ("query", "key")


def parameter_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    lr: float | None = None,
    qk_lr: float | None = None,
    sites: Chosen | None = None,
    chosen: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimiser: decayed weights and others, queries and keys at a rate of their own.

    Biases, norms, position embeddings and class tokens are not decayed, nor is what a timm model names in
    `no_weight_decay`.

    Args:
        model: the model.
        weight_decay: of the weights that are decayed; None for the optimiser's own everywhere.
        lr: of all other groups; None for the optimiser's own.
        qk_lr: learning rate of W_Q and W_K; their biases are with the others. None for that of the others.
        sites: only the queries and keys of these layers; all by default.
        chosen: which trainable parameters to put into the groups; all by default.

    Returns: groups that are not empty.

    Raises:
        UnsupportedLayoutError: queries and keys are rows of a fused weight, which no group can separate: `QKRate` does
            it after each step.
        OptionError: a rate or a decay below zero.

    Example:
        >>> model = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)  # separate weights
        >>> [sorted(group) for group in parameter_groups(model, qk_lr=1e-4)]
        [['lr', 'params'], ['params']]
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, qk_lr=1e-4), lr=1e-3)
    """
    check_from_zero("wellcond.parameter_groups", weight_decay=weight_decay, lr=lr, qk_lr=qk_lr)
    compared = set() if qk_lr is None else _separate_weights(model, sites)
    named: set[str] = getattr(model, "no_weight_decay", set)()  # timm's models say which
    sorted_out: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and chosen(parameter):
            exempt = parameter.dim() <= 1 or name in named or any(part in name for part in UNDECAYED)
            exempt = exempt and weight_decay is not None
            sorted_out.setdefault((id(parameter) not in compared, exempt), []).append(parameter)
    groups = []
    for (is_other, exempt), parameters in sorted(sorted_out.items(), key=lambda entry: entry[0]):
        group: dict[str, Any] = {"params": parameters}
        rate = lr if is_other else qk_lr
        if rate is not None:
            group["lr"] = rate
        if weight_decay is not None:
            group["weight_decay"] = 0.0 if exempt else weight_decay
        groups.append(group)
    return groups


def _separate_weights(model: nn.Module, sites: Chosen | None) -> set[int]:
    """Ids of the weights that hold queries or keys and nothing else."""
    _, found = find_inside(model, sites)
    check_readable(found)
    for site in found:
        masks = _masks_of([site])
        if not all(bool(mask.all()) for _, mask in masks):
            raise UnsupportedLayoutError(
                site.name,
                "its queries and keys are rows of a weight that holds something else too, and a parameter group takes "
                "whole weights.",
                class_name=type(site.module).__name__,
                advice="Use wellcond.QKRate(model, optimizer, factor), which lets each step move these rows further or "
                "less far.",
            )
    return {id(site.by_role(role).parameter) for site in found for role in COMPARED}


class QKRate(AfterStep):
    """Let every step of an optimiser move W_Q and W_K `factor` times as far, also as rows of a fused weight.

    The step of the weight decay is included, biases are not. It works with every optimiser: the weights before a step
    are kept, and what the step added is multiplied. Shards of FSDP2 and tensor parallelism are treated where they are
    stored.

    Args:
        model: the model, wrapped (DDP, fully_shard) if it is going to be.
        optimizer: made after the model was wrapped.
        factor: of the steps of queries and keys.
        sites: only these layers; all by default.

    Raises: OptionError for a factor below 0, or an optimiser that does not hold the weights.

    Example:
        >>> model = nn.MultiheadAttention(8, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> rate = QKRate(model, optimizer, 0.5)
    """

    def __init__(self, model: nn.Module, optimizer: Any, factor: float, *, sites: Chosen | None = None) -> None:
        check_from_zero("wellcond.QKRate", factor=factor)
        super().__init__("wellcond.QKRate", model, optimizer, sites)
        self.factor = float(factor)
        check_readable(self._sites)
        self._masks = _masks_of(self._sites)
        self._check_held((site.name, site.by_role(role).parameter) for site in self._sites for role in COMPARED)
        self._before: list[Tensor] = []
        self._handles.append(self._optimizers[0].register_step_pre_hook(self._keep))
        self._start(self._stretch)

    def __repr__(self) -> str:
        """One line: the factor and how many weights it acts on."""
        return f"QKRate(factor={self.factor:g}: {len(self._masks)} weights)"

    @torch.no_grad()
    def _keep(self, *_: Any) -> None:
        self._masks = [(stored, mask.to(to_local(stored).device)) for stored, mask in self._masks]
        self._before = [to_local(stored).clone() for stored, _ in self._masks]

    @torch.no_grad()
    def _stretch(self) -> None:
        for (stored, mask), old in zip(self._masks, self._before, strict=True):
            part = to_local(stored)
            part.copy_(torch.where(mask, old + self.factor * (part - old), part))
        self._before = []


def _masks_of(sites: list[AttentionSite]) -> list[tuple[Tensor, Tensor]]:
    """Stored weights, and which entries of what this process has of them are of queries or keys."""
    found: dict[Tensor, Tensor] = {}
    for slot in (site.by_role(role) for site in sites for role in COMPARED):
        mask = heads_of_weight(slot) != NO_HEAD
        found[slot.parameter] = found[slot.parameter] | mask if slot.parameter in found else mask
    return [(stored, local_part(mask, stored)) for stored, mask in found.items()]

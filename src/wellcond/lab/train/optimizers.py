"""Optimisers by name, with weight decay on matrices only, and a learning rate of its own for Q and K."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from wellcond.attention.blocks import block_matrices
from wellcond.attention.find import find_attention
from wellcond.errors import WellcondError
from wellcond.init.tokens import POSITIONS
from wellcond.lab.settings import RecipeError, Settings
from wellcond.lab.train.row_rates import Group, MuonAndAdamW, RowRateAdamW
from wellcond.lab.train.schedule import Point

# Position embeddings and class tokens are matrices by shape only.
UNDECAYED = (
    *POSITIONS,
    "relative_position_bias_table",
    "cls_token",
    "dist_token",
    "distillation_token",
    "reg_token",
)
Beta = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1e6)]
WeightDecay = Annotated[float, Field(ge=0, le=1e6)]
RateFactor = Annotated[float, Field(gt=0, le=1e6)]


class AdamW(Settings):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: LearningRate
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, le=1e6)] = 1e-8
    weight_decay: WeightDecay = 0.0
    qk_lr_factor: RateFactor = 1.0
    """How many times the learning rate the weights W_Q and W_K have, also as rows of a fused weight."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model."""
        groups = parameter_groups(model, self.weight_decay, self.qk_lr_factor)
        kind = RowRateAdamW if any("rows" in group for group in groups) else torch.optim.AdamW
        return kind(groups, lr=self.lr, betas=self.betas, eps=self.eps)


class Muon(Settings):
    """torch.optim.Muon for the matrices of the blocks, AdamW for all else: embeddings, positions, head, norms, biases.

    Its step is scaled to the size of AdamW's (``match_rms_adamw``), so that learning rates of both are alike. A fused
    Q, K, V is one matrix for it.
    """

    name: Literal["muon"] = "muon"
    lr: LearningRate
    adamw_lr: LearningRate | None = None
    """Of what AdamW trains; null: the same."""
    momentum: Beta = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Of AdamW, like eps."""
    eps: Annotated[float, Field(gt=0, le=1e6)] = 1e-8
    weight_decay: WeightDecay = 0.0
    qk_lr_factor: RateFactor = 1.0
    """As for AdamW."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model.

        Raises: RecipeError if it has no transformer blocks.
        """
        try:
            found = block_matrices(model, find_attention(model, strict=False))
            matrices = {id(m.parameter) for m in found if m.parameter.dim() == 2 and m.parameter.requires_grad}
        except WellcondError as error:
            raise RecipeError(f"optimizer.name: muon, for the matrices of transformer blocks: {error}") from error
        groups = parameter_groups(model, self.weight_decay, self.qk_lr_factor, apart=matrices)
        ours = [group for group in groups if id(group["params"][0]) in matrices]
        others = [group for group in groups if id(group["params"][0]) not in matrices]
        for group in others:
            group["lr_factor"] = group.get("lr_factor", 1.0) * (self.adamw_lr or self.lr) / self.lr
        muon = {
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "ns_steps": self.ns_steps,
            "adjust_lr_fn": "match_rms_adamw",
        }
        return MuonAndAdamW(
            ours, others, muon=muon, adamw={"lr": self.adamw_lr or self.lr, "betas": self.betas, "eps": self.eps}
        )


class SGD(Settings):
    """torch.optim.SGD."""

    name: Literal["sgd"] = "sgd"
    lr: LearningRate
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.9
    nesterov: bool = False
    weight_decay: WeightDecay = 0.0

    @model_validator(mode="after")
    def _has_momentum(self) -> SGD:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model."""
        groups = parameter_groups(model, self.weight_decay)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


OptimizerSettings = Annotated[AdamW | SGD | Muon, Field(discriminator="name")]


def parameter_groups(
    model: nn.Module, weight_decay: float, qk_lr_factor: float = 1.0, apart: set[int] | None = None
) -> list[Group]:
    """Trainable parameters by what they have in common.

    Decayed, or not (biases, norms, positions, class tokens). With a `qk_lr_factor`, weights of Q and K also have a
    factor on the learning rate (`lr_factor`), and each weight that holds other projections too is a group that says
    which of its `rows`, on which `axis`, have that `factor`.

    Args:
        model: any; with a factor, one whose attention `find_attention` recognises.
        weight_decay: of the decayed ones.
        qk_lr_factor: of W_Q and W_K.
        apart: identities of parameters that share no group with the others.
    """
    named: set[str] = getattr(model, "no_weight_decay", set)()  # timm's models say which
    special = {} if qk_lr_factor == 1 else _query_key_groups(model, qk_lr_factor)
    groups: dict[tuple[object, ...], Group] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        exempt = parameter.dim() <= 1 or name in named or any(part in name for part in UNDECAYED)
        own = special.get(id(parameter), {})
        is_apart = id(parameter) in (apart or ())
        key = (exempt, is_apart, "lr_factor" in own, id(parameter) if "rows" in own else None)
        decay = 0.0 if exempt else weight_decay
        groups.setdefault(key, {"params": [], "weight_decay": decay} | own)["params"].append(parameter)
    # Decayed ones first: records of older versions have them so.
    return [groups[key] for key in sorted(groups, key=lambda key: bool(key[0]))]


def _query_key_groups(model: nn.Module, factor: float) -> dict[int, Group]:
    """For each weight with queries or keys in it: what its group says."""
    try:
        sites = find_attention(model)
    except WellcondError as error:
        raise RecipeError(f"optimizer.qk_lr_factor: {error}") from error
    rows: dict[int, set[int]] = {}
    axes: dict[int, tuple[int, int]] = {}
    for site in sites:
        for role in ("query", "key"):
            slot = site.by_role(role)
            axis = 1 if slot.transposed else 0
            axes[id(slot.parameter)] = axis, slot.parameter.shape[axis]
            rows.setdefault(id(slot.parameter), set()).update(slot.rows.flatten().tolist())
    found: dict[int, Group] = {}
    for key, (axis, size) in axes.items():
        if len(rows[key]) == size:
            found[key] = {"lr_factor": factor}
        else:
            found[key] = {"rows": sorted(rows[key]), "axis": axis, "factor": factor}
    return found


def set_point(optimizer: torch.optim.Optimizer, point: Point, peak: float) -> float:
    """Put one point of a schedule into every group; returns the learning rate."""
    rate = peak * point.factor
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
        if point.beta1 is not None:
            if "betas" in group:
                group["betas"] = (point.beta1, group["betas"][1])
            else:
                group["momentum"] = point.beta1
    return rate

"""Optimisers by name, with weight decay on matrices only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from wellcond.experiments.schedule import Point
from wellcond.experiments.settings import Settings

# Position embeddings and class tokens are matrices by shape only.
UNDECAYED = (
    "pos_embed",
    "position_embedding",
    "embed_positions",
    "wpe",
    "relative_position_bias_table",
    "cls_token",
    "dist_token",
    "distillation_token",
    "reg_token",
)
Beta = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1e6)]
WeightDecay = Annotated[float, Field(ge=0, le=1e6)]


class AdamW(Settings):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: LearningRate
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, le=1e6)] = 1e-8
    weight_decay: WeightDecay = 0.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model."""
        return torch.optim.AdamW(parameter_groups(model, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps)


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


OptimizerSettings = Annotated[AdamW | SGD, Field(discriminator="name")]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: decayed, and those that are not (biases, norms, positions, class tokens)."""
    named: set[str] = getattr(model, "no_weight_decay", set)()  # timm's models say which
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.dim() <= 1 or name in named or any(part in name for part in UNDECAYED)
            (others if exempt else decayed).append(parameter)
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def set_point(optimizer: torch.optim.Optimizer, point: Point, peak: float) -> float:
    """Put one point of a schedule into every group; returns the learning rate."""
    rate = peak * point.factor
    for group in optimizer.param_groups:
        group["lr"] = rate
        if point.beta1 is not None:
            if "betas" in group:
                group["betas"] = (point.beta1, group["betas"][1])
            else:
                group["momentum"] = point.beta1
    return rate

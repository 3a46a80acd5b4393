"""Optimisers with weight decay on matrices only and a learning rate of their own for Q and K; schedules.

A schedule is a pure function of the number of the update, t = 0, 1, ..., T-1: there is nothing to save or restore.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import nn
from torch.overrides import TorchFunctionMode

from wellcond.attention.find import find_attention
from wellcond.errors import RecipeError, WellcondError
from wellcond.lab.settings import Fraction, Interval, Settings, choose_by_name
from wellcond.training.cap import SpectralCap
from wellcond.training.clip import QKClip
from wellcond.training.groups import QKRate, parameter_groups
from wellcond.training.muon import HeadMuon, muon_groups

# Schedules


@dataclass(frozen=True)
class Point:
    """What the optimiser is set to for one update: the share of the peak learning rate, and a first beta."""

    factor: float
    beta1: float | None = None


class Constant(Settings):
    """The peak throughout, after a straight warm-up from `start`, a share of the peak."""

    name: Literal["constant"] = "constant"
    warmup: Interval | None = None
    start: Fraction = 0.0

    def point(self, t: int, num_steps: int, steps_per_epoch: int) -> Point:
        """For update number t; the peak is reached with update number `warmup`."""
        warmup = self.warmup.in_steps(steps_per_epoch) if self.warmup else 0
        if t < warmup:
            return Point(self.start + (1 - self.start) * t / warmup)
        return Point(self.level(min(1.0, self.progress(t, warmup, num_steps))))

    def progress(self, t: int, warmup: int, num_steps: int) -> float:
        """Share of the schedule that is over at update number t, after the warm-up; above 1 beyond its end."""
        return (t - warmup) / max(1, num_steps - warmup)

    def level(self, progress: float) -> float:
        """Share of the peak, from the end of the warm-up (0) to that of the schedule (1)."""
        return 1.0


class Cosine(Constant):
    """After the warm-up half a cosine down to `end`, then `cooldown` at `end`."""

    name: Literal["cosine"] = "cosine"  # type: ignore[assignment]
    end: Fraction = 0.0
    cooldown: Interval | None = None
    over_warmup: bool = False
    """Whether the cosine begins with the first update, below the warm-up, instead of behind it (timm without
    warmup_prefix)."""
    rate_of: Literal["update", "epoch", "former_epoch"] = "update"
    """Whether the rate changes with every update or with every epoch (timm), or each epoch has the rate of the epoch
    before it, the first its own (DeiT, XCiT)."""

    def point(self, t: int, num_steps: int, steps_per_epoch: int) -> Point:
        """For update number t; after the last step of the cosine it stays."""
        cooldown = self.cooldown.in_steps(steps_per_epoch) if self.cooldown else 0
        if self.rate_of != "update":
            epoch = t // steps_per_epoch - (self.rate_of == "former_epoch")
            t = max(0, epoch) * steps_per_epoch
        return super().point(t, num_steps - cooldown, steps_per_epoch)

    def progress(self, t: int, warmup: int, num_steps: int) -> float:
        """Share of the cosine that is over at update number t."""
        return t / max(1, num_steps) if self.over_warmup else super().progress(t, warmup, num_steps)

    def level(self, progress: float) -> float:
        """Share of the peak."""
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))


class Steps(Constant):
    """Multiplied by `factor` at each milestone, during the warm-up too."""

    name: Literal["steps"] = "steps"  # type: ignore[assignment]
    milestones: tuple[Interval, ...]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    def point(self, t: int, num_steps: int, steps_per_epoch: int) -> Point:
        """For update number t."""
        passed = sum(t >= milestone.in_steps(steps_per_epoch) for milestone in self.milestones)
        return Point(self.factor**passed * super().point(t, num_steps, steps_per_epoch).factor)


class OneCycle(Settings):
    """torch's OneCycleLR: up from peak/25 for `rise` of the steps, down to peak/250,000; beta 1 the other way."""

    name: Literal["one_cycle"] = "one_cycle"
    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3
    anneal: Literal["cos", "linear"] = "cos"
    cycle_momentum: bool = True

    def point(self, t: int, num_steps: int, steps_per_epoch: int) -> Point:
        """For update number t."""
        top = self.rise * num_steps - 1
        if t <= top:
            share, factors, betas = t / top if top > 0 else 1.0, (1 / 25, 1.0), (0.95, 0.85)
        else:
            share, factors, betas = (t - top) / max(1e-12, num_steps - 1 - top), (1.0, 1 / 25e4), (0.85, 0.95)
        return Point(self._between(*factors, share), self._between(*betas, share) if self.cycle_momentum else None)

    def _between(self, start: float, end: float, share: float) -> float:
        if self.anneal == "linear":
            return (end - start) * share + start
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


class Triangular(Settings):
    """Straight up from `begin` to the peak at share `peak` of the budget, straight down to zero."""

    name: Literal["triangular"] = "triangular"
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.5
    begin: Fraction = 0.0

    def point(self, t: int, num_steps: int, steps_per_epoch: int) -> Point:
        """For update number t."""
        top = self.peak * num_steps
        up, down = self.begin + (1 - self.begin) * (t + 1) / top, (num_steps - t) / (num_steps - top)
        return Point(min(1.0, up, down))  # in a run of few steps the peak lies before the first or after the last


ScheduleSettings = Annotated[
    Constant | Cosine | Steps | OneCycle | Triangular,
    BeforeValidator(choose_by_name("schedule", Constant, Cosine, Steps, OneCycle, Triangular)),
]


# Optimisers

Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e6)]


class ClipSettings(Settings):
    """`wellcond.QKClip`: a head whose largest logit passed `tau` in a step gets smaller queries and keys after it."""

    tau: Positive = 100.0
    alpha: Fraction = 0.5


class CapSettings(Settings):
    """`wellcond.SpectralCap`: the largest singular value of every head's weights is held at `w_max`."""

    w_max: Positive
    projections: Annotated[str, Field(pattern="^[qkvo]+$")] = "qkvo"


class AdamW(Settings):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: Positive
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    qk_lr_factor: Positive = 1.0
    """How many times as far a step moves the weights W_Q and W_K, also as rows of a fused weight."""
    fused: bool = False
    """One kernel for a step of AdamW, instead of some for each of its operations; the same to rounding."""
    qk_clip: ClipSettings | None = None
    spectral_cap: CapSettings | None = None

    def act_after_steps(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip and cap the weights of a model after each step of an optimiser that was made for it; both are wrapped.

        Raises: RecipeError for a model that cannot be clipped or capped.
        """
        try:
            if self.qk_clip is not None:
                QKClip(model, optimizer, self.qk_clip.tau, self.qk_clip.alpha)
            if self.spectral_cap is not None:
                SpectralCap(model, optimizer, self.spectral_cap.w_max, projections=self.spectral_cap.projections)
        except WellcondError as error:
            raise RecipeError(f"optimizer: {error}") from error

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model."""
        groups = parameter_groups(model, self.weight_decay)
        return stretching(self._adamw(groups), model, self.qk_lr_factor)

    def _adamw(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, self.lr, self.betas, self.eps, fused=self.fused or None)


class Muon(AdamW):
    """Muon for the matrices of the blocks, AdamW for all else: embeddings, positions, head, norms, biases.

    Its step is scaled to the size of AdamW's, so that learning rates are alike.
    """

    name: Literal["muon"] = "muon"  # type: ignore[assignment]
    heads: Literal["each", "pairs", "fused"] = "fused"
    """What is orthogonalised as one matrix of an attention layer: each head, pairs of heads, or a stored weight as it
    is, in which a fused Q, K, V is one (torch.optim.Muon)."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model; raises RecipeError if it has no transformer blocks."""
        try:
            found = muon_groups(model, self.heads, sites=find_attention(model, strict=False))
        except (WellcondError, ValueError) as error:
            raise RecipeError(f"optimizer.name: muon, for the matrices of transformer blocks: {error}") from error
        ours = parameter_groups(model, self.weight_decay, chosen=lambda parameter: parameter in found.matrices)
        others = parameter_groups(model, self.weight_decay, chosen=lambda parameter: parameter not in found.matrices)
        muon: torch.optim.Optimizer
        if self.heads == "fused":
            muon = torch.optim.Muon(ours, self.lr, adjust_lr_fn="match_rms_adamw")
        else:
            muon = HeadMuon(found, self.lr, adjust_lr_fn="match_rms_adamw", params=ours)
        both = MuonAndAdamW(muon, self._adamw(others))
        return stretching(both, model, self.qk_lr_factor)


OptimizerSettings = Annotated[AdamW | Muon, BeforeValidator(choose_by_name("optimiser", AdamW, Muon))]


def stretching(optimizer: torch.optim.Optimizer, model: nn.Module, factor: float) -> torch.optim.Optimizer:
    """Let every step move the weights of queries and keys `factor` times as far."""
    if factor != 1:
        try:
            QKRate(model, optimizer, factor)
        except WellcondError as error:
            raise RecipeError(f"optimizer.qk_lr_factor: {error}") from error
    return optimizer


def set_point(optimizer: torch.optim.Optimizer, point: Point, peak: float) -> float:
    """Put one point of a schedule into every group; returns the learning rate."""
    rate = peak * point.factor
    for group in optimizer.param_groups:
        group["lr"] = rate
        if point.beta1 is not None and "betas" in group:
            group["betas"] = (point.beta1, group["betas"][1])
        elif point.beta1 is not None:
            group["momentum"] = point.beta1
    return rate


class InSingle(TorchFunctionMode):
    """Casts to bfloat16 become casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        widened = {name: torch.float32 if value is torch.bfloat16 else value for name, value in (kwargs or {}).items()}
        return func(*args, **widened)


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as one, whose groups and state are here, for checkpoints."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self._muon, self._adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update by both, each with its groups and the state of all, which may have been loaded since."""
        number = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:number], self.param_groups[number:]
        self._muon.state = self._adamw.state = self.state
        # torch's Muon iterates in bfloat16: slow on a processor, and fatal on one that offers AMX without allowing it.
        on_cpu = all(weight.device.type == "cpu" for group in self._muon.param_groups for weight in group["params"])
        with InSingle() if on_cpu else contextlib.nullcontext():
            self._muon.step()
        self._adamw.step()

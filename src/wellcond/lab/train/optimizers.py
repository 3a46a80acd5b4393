"""Optimisers with weight decay on matrices only and a learning rate of their own for Q and K; learning-rate schedules.

A schedule is a pure function of the step, so that there is nothing to save or restore. It gives a `Point` for update
number t = 0, 1, ..., T-1: the learning rate as a share of the peak and, for one_cycle with momentum, the first beta.

A step of AdamW, and of Muon, is proportional to the learning rate (decoupled weight decay included). So the rows of Q
and K inside a fused weight get a rate of their own if their part of a finished step is multiplied:

    W[rows] <- W_before[rows] + factor (W_after[rows] - W_before[rows])

The group of the weight says which rows, as plain numbers, so that checkpoints hold it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.overrides import TorchFunctionMode

from wellcond.attention.blocks import block_matrices
from wellcond.attention.distributed import is_distributed
from wellcond.attention.find import find_attention
from wellcond.errors import WellcondError
from wellcond.init.tokens import POSITIONS
from wellcond.lab.settings import Fraction, Interval, RecipeError, Settings

# Schedules


@dataclass(frozen=True)
class Point:
    """What the optimiser is set to for one update."""

    factor: float
    beta1: float | None = None


Curve = Callable[[int], Point]


def _steps(interval: Interval | None, steps_per_epoch: int) -> int:
    return 0 if interval is None else interval.in_steps(steps_per_epoch)


class _WarmUp(Settings):
    warmup: Interval | None = None
    start: Fraction = 0.0
    """Share of the peak from which the warm-up rises."""

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update; the peak is reached with update number `warmup`."""
        warmup = _steps(self.warmup, steps_per_epoch)
        length = max(1, num_steps - warmup)

        def at(t: int) -> Point:
            if t < warmup:
                return Point(self.start + (1 - self.start) * t / warmup)
            return Point(self.level(min(1.0, (t - warmup) / length)))

        return at

    def level(self, progress: float) -> float:
        """Share of the peak, from the end of the warm-up (0) to that of the schedule (1)."""
        return 1.0


class Constant(_WarmUp):
    """The peak throughout, after the warm-up."""

    name: Literal["constant"] = "constant"


class Linear(_WarmUp):
    """Straight down to `end`."""

    name: Literal["linear"] = "linear"
    end: Fraction = 0.0

    def level(self, progress: float) -> float:
        """Share of the peak."""
        return self.end + (1 - self.end) * (1 - progress)


class Cosine(_WarmUp):
    """Half a cosine down to `end`, then `cooldown` at `end`."""

    name: Literal["cosine"] = "cosine"
    end: Fraction = 0.0
    cooldown: Interval | None = None

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update; after the last step of the cosine it stays."""
        return super().curve(num_steps - _steps(self.cooldown, steps_per_epoch), steps_per_epoch)

    def level(self, progress: float) -> float:
        """Share of the peak."""
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))


class Steps(_WarmUp):
    """Multiplied by `factor` at each milestone, during the warm-up too."""

    name: Literal["steps"] = "steps"
    milestones: tuple[Interval, ...]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update."""
        risen = super().curve(num_steps, steps_per_epoch)
        marks = [_steps(milestone, steps_per_epoch) for milestone in self.milestones]
        return lambda t: Point(self.factor ** sum(t >= mark for mark in marks) * risen(t).factor)


class OneCycle(Settings):
    """torch's OneCycleLR: up from peak/25 for `rise` of the steps, down to peak/250,000; beta 1 the other way."""

    name: Literal["one_cycle"] = "one_cycle"
    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3
    anneal: Literal["cos", "linear"] = "cos"
    cycle_momentum: bool = True
    start: Fraction = 1 / 25
    end: Fraction = 1 / 25e4

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate and first beta of every update."""
        top = self.rise * num_steps - 1

        def between(start: float, end: float, share: float) -> float:
            if self.anneal == "linear":
                return (end - start) * share + start
            return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

        def at(t: int) -> Point:
            if t <= top:
                share = t / top if top > 0 else 1.0
                factor, beta = between(self.start, 1.0, share), between(0.95, 0.85, share)
            else:
                share = (t - top) / max(1e-12, num_steps - 1 - top)
                factor, beta = between(1.0, self.end, share), between(0.85, 0.95, share)
            return Point(factor, beta if self.cycle_momentum else None)

        return at


class Triangular(Settings):
    """Straight up from `begin` to the peak at share `peak` of the budget, straight down to zero."""

    name: Literal["triangular"] = "triangular"
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.5
    begin: Fraction = 0.0

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update."""
        top = self.peak * num_steps
        # min with 1: in a run of few steps the peak lies before the first or after the last update
        return lambda t: Point(
            min(1.0, self.begin + (1 - self.begin) * (t + 1) / top, (num_steps - t) / (num_steps - top))
        )


ScheduleSettings = Annotated[Constant | Linear | Cosine | OneCycle | Triangular | Steps, Field(discriminator="name")]


# Optimisers

# Position embeddings and class tokens are matrices by shape only.
UNDECAYED = (*POSITIONS, "relative_position_bias_table", "cls_token", "dist_token", "distillation_token", "reg_token")
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
WeightDecay = Annotated[float, Field(ge=0, le=1e6)]
Group = dict[str, Any]


class AdamW(Settings):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: Positive
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: WeightDecay = 0.0
    qk_lr_factor: Positive = 1.0
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
    lr: Positive
    adamw_lr: Positive | None = None
    """Of what AdamW trains; null: the same."""
    momentum: Beta = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Of AdamW, like eps."""
    eps: Positive = 1e-8
    weight_decay: WeightDecay = 0.0
    qk_lr_factor: Positive = 1.0
    """As for AdamW."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model; raises RecipeError if it has no transformer blocks."""
        try:
            found = block_matrices(model, find_attention(model, strict=False))
            matrices = {id(m.parameter) for m in found if m.parameter.dim() == 2 and m.parameter.requires_grad}
        except WellcondError as error:
            raise RecipeError(f"optimizer.name: muon, for the matrices of transformer blocks: {error}") from error
        groups = parameter_groups(model, self.weight_decay, self.qk_lr_factor, apart=matrices)
        ours = [group for group in groups if id(group["params"][0]) in matrices]
        others = [group for group in groups if id(group["params"][0]) not in matrices]
        adamw_lr = self.adamw_lr or self.lr
        for group in others:
            group["lr_factor"] = group.get("lr_factor", 1.0) * adamw_lr / self.lr
        muon = self.model_dump(include={"lr", "momentum", "nesterov", "ns_steps"})
        adamw = {"lr": adamw_lr, "betas": self.betas, "eps": self.eps}
        return MuonAndAdamW(ours, others, muon=muon | {"adjust_lr_fn": "match_rms_adamw"}, adamw=adamw)


class SGD(Settings):
    """torch.optim.SGD."""

    name: Literal["sgd"] = "sgd"
    lr: Positive
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
    which of its `rows`, on which `axis`, have that `factor`. Parameters whose identities are in `apart` share no group
    with the others.
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
    return [groups[key] for key in sorted(groups, key=lambda key: bool(key[0]))]  # decayed ones first


def _query_key_groups(model: nn.Module, factor: float) -> dict[int, Group]:
    """For each weight with queries or keys in it: what its group says."""
    try:
        sites = find_attention(model)
    except WellcondError as error:
        raise RecipeError(f"optimizer.qk_lr_factor: {error}") from error
    rows: dict[int, set[int]] = {}
    axes: dict[int, tuple[int, int]] = {}
    for slot in (site.by_role(role) for site in sites for role in ("query", "key")):
        axis = 1 if slot.transposed else 0
        axes[id(slot.parameter)] = axis, slot.parameter.shape[axis]
        rows.setdefault(id(slot.parameter), set()).update(slot.rows.flatten().tolist())
    return {
        key: {"lr_factor": factor}
        if len(rows[key]) == size
        else {"rows": sorted(rows[key]), "axis": axis, "factor": factor}
        for key, (axis, size) in axes.items()
    }


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


@contextlib.contextmanager
def row_rates(groups: list[Group]) -> Iterator[None]:
    """Multiply what a step does to the rows that groups name."""
    kept = []
    for group in groups:
        for weight in group["params"] if "rows" in group else ():
            if is_distributed(weight):
                raise RecipeError(
                    "optimizer.qk_lr_factor: rows of a fused weight that is sharded over ranks (FSDP2) cannot have a "
                    "learning rate of their own; use DDP or one process, or qk_lr_factor: 1"
                )
            rows = torch.tensor(group["rows"], device=weight.device)
            kept.append((weight, group, rows, weight.detach().index_select(group["axis"], rows)))
    yield
    with torch.no_grad():
        for weight, group, rows, before in kept:
            after = weight.index_select(group["axis"], rows)
            weight.index_copy_(group["axis"], rows, before + group["factor"] * (after - before))


class RowRateAdamW(torch.optim.AdamW):
    """AdamW whose groups may name rows that move `factor` times as far."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        with row_rates(self.param_groups):
            return super().step(closure)


class InSingle(TorchFunctionMode):
    """Casts to bfloat16 become casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation with float32 in place of bfloat16."""
        widened = {name: torch.float32 if value is torch.bfloat16 else value for name, value in (kwargs or {}).items()}
        return func(*args, **widened)


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for some groups and AdamW for the others; groups and state are here, for checkpoints."""

    def __init__(self, matrices: list[Group], others: list[Group], *, muon: Group, adamw: Group) -> None:
        """Groups of either kind, and the options of either optimiser."""
        self._muon = torch.optim.Muon(matrices, **muon)
        self._adamw = torch.optim.AdamW(others, **adamw) if others else None
        super().__init__([*matrices, *others], {})
        self.param_groups = [*self._muon.param_groups, *(self._adamw.param_groups if self._adamw else [])]
        self._share()

    def _share(self) -> None:
        """Let both optimisers work on this one's groups and state."""
        number = len(self._muon.param_groups)
        self._muon.param_groups, self._muon.state = self.param_groups[:number], self.state
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[number:], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As loaded from a checkpoint."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None if closure is None else closure()
        # torch's Muon iterates in bfloat16: slow on a processor, and fatal on one that offers AMX without allowing it.
        on_cpu = all(weight.device.type == "cpu" for group in self._muon.param_groups for weight in group["params"])
        with row_rates(self.param_groups):
            with InSingle() if on_cpu else contextlib.nullcontext():
                self._muon.step()
            if self._adamw is not None:
                self._adamw.step()
        return loss

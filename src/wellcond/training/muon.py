"""Muon that orthogonalises the step of every attention head by itself.

`torch.optim.Muon` takes a stored tensor for one matrix. A fused Q, K, V is then one matrix of all heads of all three.
`HeadMuon` divides the momentum into the heads' matrices, (heads, d, D), orthogonalises them in batches of matrix
products with the coefficients of `torch.optim.Muon`, and puts them back; W_O is divided by its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_choice, describe
from wellcond.attention.blocks import block_matrices
from wellcond.attention.checks import Chosen
from wellcond.attention.find import check_readable
from wellcond.attention.sharding import (
    from_local,
    full_tensor,
    is_distributed,
    local_shard,
    to_local,
)
from wellcond.attention.slot import Slot
from wellcond.errors import OptionError
from wellcond.training.rows import HeadView, check_from_zero, find_inside

Heads = Literal["each", "pairs", "fused"]
LearningRates = Literal["original", "match_rms_adamw", "spectral_unclamped"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of `torch.optim.Muon`."""


# Which matrices


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """How a stored tensor is divided into the matrices that are orthogonalised by themselves.

    Without parts it is one matrix, as it is stored.
    """

    parts: tuple[HeadView, ...] = ()

    def split(self, stored: Tensor) -> list[Tensor]:
        """Batches of matrices (count, rows, columns) of a tensor stored like the parameter; views where possible.

        Example:
            >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
            >>> groups = muon_groups(nn.Sequential(layer))
            >>> weight = layer.self_attn.in_proj_weight
            >>> [tuple(batch.shape) for batch in groups.matrices[weight].split(weight)]
            [(2, 4, 8), (2, 4, 8), (2, 4, 8)]
        """
        if not self.parts:
            return [stored.flatten(1)[None]]
        return [part.take(stored) for part in self.parts]

    def join_(self, stored: Tensor, batches: Sequence[Tensor]) -> None:
        """Write what `split` would give into a tensor stored like the parameter."""
        if not self.parts:
            stored.copy_(batches[0][0].view(stored.shape))
        for part, batch in zip(self.parts, batches, strict=bool(self.parts)):
            part.put_(stored, batch)


@dataclass(frozen=True, eq=False)
class MuonGroups:
    """Which parameters of a model are for Muon, and which are for AdamW."""

    matrices: Mapping[nn.Parameter, HeadMatrices]
    """The matrices of the blocks, and how each is divided."""
    others: list[nn.Parameter]
    """Embeddings, positions, output layer, norms, biases: all other trainable parameters."""

    def __repr__(self) -> str:
        """One line: how many parameters of either kind."""
        divided = sum(bool(one.parts) for one in self.matrices.values())
        return f"MuonGroups({len(self.matrices)} matrices, {divided} of them by head, {len(self.others)} others)"


def muon_groups(model: nn.Module, heads: Heads = "each", *, sites: Chosen | None = None) -> MuonGroups:
    """What Muon needs to orthogonalise the step of every attention head by itself.

    Give it to `HeadMuon`, or use `HeadMatrices.split` and `join_` of each parameter in an optimiser of your own. With
    ``fused``, `matrices` are those for `torch.optim.Muon`. Call it after the model is wrapped and sharded.

    Args:
        model: a model whose attention layers stand in blocks.
        heads: ``each`` head by itself, W_O by its columns; ``pairs`` of heads as one matrix (an odd last one by
            itself); ``fused``, every stored tensor as one matrix.
        sites: divide only these layers; all by default.

    Raises: UnknownChoiceError, AttentionNotFoundError, WellcondError for attention that stands in no list of blocks.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> muon_groups(model)
        MuonGroups(8 matrices, 4 of them by head, 16 others)

    Reference: pairs of heads, modded-nanogpt pull request 253; each head, "Muon Split" of GLM-5.
    """
    check_choice("heads", heads, get_args(Heads))
    inner, chosen = find_inside(model, sites)
    check_readable(chosen)
    slots: dict[nn.Parameter, list[Slot]] = {}
    for slot in (slot for site in chosen for slot in site.slots.values()):
        held = slots.setdefault(slot.parameter, [])
        if not any(slot.index == other.index and torch.equal(slot.rows, other.rows) for other in held):
            held.append(slot)
    matrices: dict[nn.Parameter, HeadMatrices] = {}
    for parameter in (*(m.parameter for m in block_matrices(inner, chosen, stacks=True)), *slots):
        assert isinstance(parameter, nn.Parameter)
        divided = heads != "fused" and parameter in slots
        if parameter.requires_grad and parameter not in matrices and (parameter.dim() == 2 or divided):
            matrices[parameter] = divide(slots[parameter], heads) if divided else HeadMatrices()
    others = [one for one in inner.parameters() if one.requires_grad and one not in matrices]
    return MuonGroups(matrices, others)


def divide(slots: Sequence[Slot], heads: Heads) -> HeadMatrices:
    """The matrices of a stored tensor that holds these projections."""
    parts: list[HeadView] = []
    for slot in slots:
        paired = 0 if heads == "each" or slot.by_head and slot.num_heads % 2 else slot.num_heads // 2 * 2
        if paired:
            parts.append(HeadView(replace(slot, rows=slot.rows[:paired]), joined=2))
        if paired < slot.num_heads:
            parts.append(HeadView(replace(slot, rows=slot.rows[paired:])))
    return HeadMatrices((*parts, *_rest(slots)))


def _rest(slots: Sequence[Slot]) -> Iterable[HeadView]:
    """What no projection of an attention layer has: further rows of a fused weight, other matrices of a stack."""
    first = slots[0]
    if first.by_head:
        return
    count = 1 if first.index is None else (first.view or tuple(first.parameter.shape))[0]
    for number in range(count):
        held = [slot for slot in slots if first.index is None or slot.index == number]
        matrix = held[0] if held else replace(first, index=number)
        free = torch.ones(matrix.in_features if matrix.heads_on_input else matrix.out_features, dtype=torch.bool)
        for slot in held:
            free[slot.rows.flatten()] = False
        if bool(free.any()):
            yield HeadView(replace(matrix, rows=free.nonzero().T))


# The step


@torch.no_grad()
def orthogonalised(
    batch: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Matrices (count, rows, columns) with the singular values of each near 1, by Newton-Schulz as torch.optim.Muon.

    In bfloat16, and on a CPU in float32: products of bfloat16 are slow there.

    Example:
        >>> heads = torch.randn(3, 4, 16)
        >>> sigma = torch.linalg.svdvals(orthogonalised(heads))
        >>> bool((sigma > 0.5).all() and (sigma < 1.5).all())
        True
    """
    a, b, c = coefficients
    x = batch.to(torch.float32 if batch.device.type == "cpu" else torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if tall else x


def _rate(kind: LearningRates | None, rows: int, columns: int) -> float:
    """Factor of the learning rate of a matrix, as torch.optim.Muon has it."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if kind == "spectral_unclamped":
        return math.sqrt(rows / columns)
    return math.sqrt(max(1.0, rows / columns))


class HeadMuon(torch.optim.Optimizer):
    """Muon whose step is orthogonal for each attention head, or pair of heads, instead of for all heads as one matrix.

    Everything else is `torch.optim.Muon`: momentum, coefficients, weight decay, names in the state dict. The factor of
    the learning rate (`adjust_lr_fn`) is that of the matrix that is orthogonalised, so of a head. All other parameters
    (`groups.others`) need another optimiser.

    Weights that are sharded over processes are gathered for their step: every process orthogonalises all heads, and
    writes its own shard.

    Args:
        groups: of `muon_groups(model)`.
        lr: learning rate.
        weight_decay: decoupled, as AdamW's.
        momentum: of the moving average of gradients.
        nesterov: look one step ahead.
        ns_coefficients: of the Newton-Schulz polynomial.
        eps: added to norms.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: ``original``, ``match_rms_adamw`` (the size of AdamW's step) or ``spectral_unclamped``.
        params: the same parameters in groups with settings of their own; one group by default.

    Raises: OptionError for values out of range, or parameters that are not among `groups.matrices`.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> groups = muon_groups(model)
        >>> muon = HeadMuon(groups, lr=2e-2)
        >>> adamw = torch.optim.AdamW(groups.others, lr=3e-4)
    """

    def __init__(
        self,
        groups: MuonGroups,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: LearningRates | None = None,
        *,
        params: Any = None,
    ) -> None:
        if not isinstance(groups, MuonGroups):
            raise TypeError(f"groups: expected wellcond.muon_groups(model), got {describe(groups)}")
        check_from_zero("wellcond.HeadMuon", lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
        if not isinstance(ns_steps, int) or ns_steps < 1:
            raise OptionError(f"wellcond.HeadMuon: ns_steps: expected a whole number of at least 1, got {ns_steps!r}")
        if adjust_lr_fn is not None:
            check_choice("adjust_lr_fn", adjust_lr_fn, get_args(LearningRates))
        self.matrices = groups.matrices
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(list(groups.matrices) if params is None else params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.matrices:
                    raise OptionError(
                        f"wellcond.HeadMuon: expected parameters among groups.matrices, got {describe(parameter)}; "
                        "give all others (groups.others) to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        gradient, average = to_local(_placed_like(parameter)), to_local(state["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        sharded = is_distributed(parameter)
        whole = full_tensor(from_local(parameter, direction)) if sharded else direction
        matrices = self.matrices[parameter]
        batches = []
        for batch in matrices.split(whole):
            orthogonal = orthogonalised(batch, group["ns_coefficients"], group["ns_steps"], group["eps"])
            batches.append(_rate(group["adjust_lr_fn"], *batch.shape[1:]) * orthogonal.to(whole.dtype))
        step = torch.empty_like(whole)
        matrices.join_(step, batches)
        stored = to_local(parameter)
        stored.mul_(1 - group["lr"] * group["weight_decay"])
        stored.add_(local_shard(parameter).of(step) if sharded else step, alpha=-group["lr"])


def _placed_like(parameter: nn.Parameter) -> Tensor:
    """The gradient, sharded as the parameter is."""
    gradient: Any = parameter.grad
    if is_distributed(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    assert isinstance(gradient, Tensor)
    return gradient

"""Weight selection (Xu et al., ICLR 2024): a small model takes evenly spaced weights of a large, trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from wellcond.attention.effective import is_conditioned
from wellcond.attention.find import find_attention, scan_attention
from wellcond.attention.site import AttentionSite, Slot
from wellcond.errors import ConditioningError, UnsupportedLayoutError, WeightError
from wellcond.init.plan import InitContext, ParameterWrite, Write, register_init

Layout = Literal["blind", "heads"]


def select_indices(teacher_size: int, student_size: int) -> Tensor:
    """The published index rule for one axis.

    Example:
        >>> select_indices(6, 3).tolist(), select_indices(5, 3).tolist()
        ([0, 2, 4], [0, 2, 4])
    """
    if teacher_size % student_size == 0:
        return torch.arange(student_size) * (teacher_size // student_size)
    return torch.linspace(0, teacher_size - 1, student_size).round().long()


def select(teacher: Tensor, shape: torch.Size, *, axes: dict[int, Tensor] | None = None) -> Tensor:
    """Pick a student's tensor out of a teacher's, axis by axis; `axes` overrides the rule on some axes."""
    for axis, size in enumerate(shape):
        chosen = (axes or {}).get(axis)
        indices = select_indices(teacher.shape[axis], size) if chosen is None else chosen
        teacher = teacher.index_select(axis, indices.to(teacher.device))
    return teacher


@register_init("weight_selection")
def weight_selection(
    context: InitContext, *, teacher: nn.Module, layout: Layout = "blind", exclude: tuple[str, ...] = ("head",)
) -> Iterator[Write]:
    """Plan every weight of the model from a larger teacher of the same family.

    Args:
        context: the model; `sites` restricts nothing here, since every weight is selected.
        teacher: the larger model, with as many layers or more (the first ones are used).
        layout: ``blind``, the published rule on every axis, which mixes the heads of a fused weight; ``heads`` picks
            whole heads, and within a head by the rule, for Q, K, V, their biases and the columns of W_O alike.
        exclude: weights that keep what they have (the classifier); see `exclusion`.

    Raises:
        WeightError: the teacher lacks a weight, or one is smaller than the student's.
        UnsupportedLayoutError: with ``heads``, a student with more heads than its teacher.
    """
    for model, who in ((teacher, "teacher"), (context.model, "model")):
        if is_conditioned(model):
            raise ConditioningError(
                f"the {who} is conditioned, so its stored weights are not the ones it uses: fold_ it first"
            )
    teacher_state = teacher.state_dict()
    by_heads = _head_axes(context.model, teacher) if layout == "heads" else {}
    is_excluded = exclusion(context.model, exclude)
    for name, target in context.model.state_dict(keep_vars=True).items():
        if is_excluded(name) or not target.dtype.is_floating_point:
            continue
        if name not in teacher_state:
            raise WeightError(
                f"the teacher has no weight {name!r}: expected the same family and at least as many layers"
            )
        source = teacher_state[name]
        if source.dim() != target.dim() or any(t < s for t, s in zip(source.shape, target.shape, strict=True)):
            raise WeightError(
                f"{name}: cannot select {tuple(target.shape)} from the teacher's {tuple(source.shape)}; "
                "expected a teacher at least as large on every axis"
            )
        yield ParameterWrite(name, target, select(source, target.shape, axes=by_heads.get(name)))


def exclusion(model: nn.Module, exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether the weight of a name is left out of a selection.

    It is if the name has one of the `exclude` as a part between dots (``head`` for head.fc.weight, ``blocks.0`` for
    blocks.0.mlp.fc1.bias). Outside of attentions the first or last word of a part is enough: ``head`` then also stands
    for head_dist and lm_head. The multihead_attn of a decoder is neither.
    """
    attentions = [site.name for site in scan_attention(model).sites]

    def is_excluded(name: str) -> bool:
        dotted = f".{name}."
        if any(f".{one}." in dotted for one in exclude):
            return True
        if any(name.startswith(f"{attention}.") for attention in attentions):
            return False
        parts = name.split(".")
        return any(part.startswith(f"{one}_") or part.endswith(f"_{one}") for one in exclude for part in parts)

    return is_excluded


def _head_axes(student: nn.Module, teacher: nn.Module) -> dict[str, dict[int, Tensor]]:
    """For every stored weight and bias of an attention: which positions of the teacher's head axis to take."""
    teachers = {site.name: site for site in find_attention(teacher)}
    names = {id(module): name for name, module in student.named_modules()}
    axes: dict[str, dict[int, Tensor]] = {}
    for site in find_attention(student):
        other = teachers.get(site.name)
        if other is None:
            raise WeightError(f"the teacher has no attention {site.name!r}: expected the same family")
        for role, slot in site.slots.items():
            owner_name = names[id(slot.owner)]
            weight_key = f"{owner_name}.{slot.weight_name}" if owner_name else slot.weight_name
            if slot.is_stacked:
                raise UnsupportedLayoutError(
                    site.name,
                    "its weight is a stack of matrices, from which heads cannot be picked; use layout='blind'.",
                    class_name=type(site.module).__name__,
                )
            positions = _teacher_positions(site, slot, other.slots[role])
            weight_axis = int(slot.heads_on_input != slot.transposed)
            _assign(axes, weight_key, weight_axis, slot.parameter.shape, slot.rows, positions)
            if slot.bias_name is None or slot.heads_on_input:
                continue
            bias_owner = names[id(slot.bias_owner or slot.owner)]
            bias_key = f"{bias_owner}.{slot.bias_name}" if bias_owner else slot.bias_name
            rows = slot.rows if slot.bias_rows is None else slot.bias_rows
            teacher_slot = other.slots[role]
            bias_positions = positions
            if slot.bias_rows is not None and teacher_slot.bias_rows is not None:
                bias_positions = _teacher_positions(site, slot, teacher_slot, teacher_rows=teacher_slot.bias_rows)
            bias = getattr(slot.bias_owner or slot.owner, slot.bias_name)
            _assign(axes, bias_key, 0, bias.shape, rows, bias_positions)
    for key, tables in axes.items():
        for table in tables.values():
            if bool((table < 0).any()):
                raise UnsupportedLayoutError(
                    key,
                    "this weight holds more than q, k and v (a gate, an MLP), so heads cannot be picked from it; "
                    "use layout='blind'.",
                )
    return axes


def _teacher_positions(site: AttentionSite, slot: Slot, teacher: Slot, *, teacher_rows: Tensor | None = None) -> Tensor:
    rows = teacher.rows if teacher_rows is None else teacher_rows
    if teacher.num_heads < slot.num_heads or teacher.head_dim < slot.head_dim:
        raise UnsupportedLayoutError(
            site.name,
            f"cannot pick {slot.num_heads} heads of width {slot.head_dim} from the teacher's "
            f"{teacher.num_heads} of width {teacher.head_dim}.",
            class_name=type(site.module).__name__,
        )
    return select(rows, slot.rows.shape)


def _assign(
    axes: dict[str, dict[int, Tensor]], key: str, axis: int, shape: torch.Size, rows: Tensor, positions: Tensor
) -> None:
    table = axes.setdefault(key, {}).setdefault(axis, torch.full((shape[axis],), -1))
    table[rows.flatten()] = positions.flatten()

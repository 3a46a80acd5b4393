"""Weight selection (Xu et al., ICLR 2024): a small model takes evenly spaced weights of a large, trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from wellcond.attention.find import find_attention, scan_attention
from wellcond.attention.slot import is_conditioned
from wellcond.errors import ConditioningError, UnsupportedLayoutError, WeightError
from wellcond.init.apply import InitContext, Write, register_init

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


def select(teacher: Tensor, shape: torch.Size, what: str) -> Tensor:
    """Pick a student's tensor out of a teacher's by the rule on every axis; `what` names it in a message.

    Raises: WeightError for a teacher's tensor that is smaller.
    """
    if teacher.dim() != len(shape) or any(t < s for t, s in zip(teacher.shape, shape, strict=True)):
        raise WeightError(
            f"{what}: cannot select {tuple(shape)} from the teacher's {tuple(teacher.shape)}; "
            "expected a teacher at least as large on every axis"
        )
    for axis, size in enumerate(shape):
        indices = select_indices(teacher.shape[axis], size)
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
    by_heads = _pick_heads(context.model, teacher) if layout == "heads" else {}
    is_excluded = exclusion(context.model, exclude)
    for name, target in context.model.state_dict(keep_vars=True).items():
        if is_excluded(name) or not target.dtype.is_floating_point:
            continue
        if id(target) in by_heads:
            yield from by_heads[id(target)]
            continue
        if name not in teacher_state:
            raise WeightError(
                f"the teacher has no weight {name!r}: expected the same family and at least as many layers"
            )
        yield Write(name, target, select(teacher_state[name], target.shape, name))


def exclusion(model: nn.Module, exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether the weight of a name is left out of a selection.

    It is if the name has one of the `exclude` as a part between dots (``head`` for head.fc.weight, ``blocks.0`` for
    blocks.0.mlp.fc1.bias). Outside of attention layers the first or last word of a part is enough: ``head`` then also
    stands for head_dist and lm_head. The multihead_attn of a decoder is neither.
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


def _pick_heads(student: nn.Module, teacher: nn.Module) -> dict[int, list[Write]]:
    """Writes of whole heads into the weights and biases of Q, K, V and the weight of W_O, by the id of a parameter."""
    teachers = {site.name: site for site in find_attention(teacher)}
    writes: dict[int, list[Write]] = {}
    covered: dict[int, Tensor] = {}

    def add(write: Write) -> Tensor:
        """Plan a write; returns a mask of what is written of its parameter so far."""
        parameter = write.parameter
        writes.setdefault(id(parameter), []).append(write)
        return covered.setdefault(id(parameter), torch.zeros(parameter.shape, dtype=torch.bool))

    for site in find_attention(student):
        other = teachers.get(site.name)
        if other is None:
            raise WeightError(f"the teacher has no attention {site.name!r}: expected the same family")
        for role, slot in site.slots.items():
            large = other.slots.get(role)
            if large is None or large.num_heads < slot.num_heads or large.head_dim < slot.head_dim:
                found = "none" if large is None else f"{large.num_heads} of width {large.head_dim}"
                raise UnsupportedLayoutError(
                    site.name,
                    f"cannot pick {slot.num_heads} heads of width {slot.head_dim} from the teacher's {found}.",
                    class_name=type(site.module).__name__,
                )
            what = f"{site.name} ({role})"
            heads = select(large.read_raw().detach(), slot.read_raw().shape, what)
            slot.put_heads_(add(Write(what, slot, heads)), torch.ones(heads.shape, dtype=torch.bool))
            own, picked = slot.read_bias(), large.read_bias()
            if own is not None and picked is not None and role != "o":
                chosen = select(picked.detach(), own.shape, f"{what} bias")
                rows = slot.rows if slot.bias_rows is None else slot.bias_rows
                add(Write(f"{what} bias", slot, chosen, to_bias=True)).view(-1)[rows.flatten()] = True
    for key, mask in covered.items():
        if not bool(mask.all()):
            raise UnsupportedLayoutError(
                writes[key][0].what,
                "this weight holds more than q, k and v (a gate, an MLP), so heads cannot be picked from it; "
                "use layout='blind'.",
            )
    return writes

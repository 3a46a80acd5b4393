"""Where one projection of an attention layer is stored: reading and writing it head by head, shards included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import check_tensor
from wellcond.attention.sharding import full_tensor, is_distributed, local_shard, to_local, unwrap
from wellcond.errors import WeightError


def stored_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter that a module itself stores under a name, without any correction; None where there is none."""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return next((parameter for key, parameter in own if key == name), None)


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one projection of one attention layer is stored.

    The stored tensor may be ``(out, in)`` (Linear), ``(in, out)`` (`transposed`, Hugging Face Conv1D),
    ``(out, in, 1, 1)`` (1x1 convolution), a stack of matrices of which this is number `index` (modded-nanogpt), or a
    stack of one matrix per head (`by_head`, TransformerLens); `view` is the shape under which it is a stack. `rows`
    names, for each head, its positions on the head axis: the output axis for Q, K, V, the input axis for O
    (`heads_on_input`). Reading always gives ``(heads, out, in)`` of each head.
    """

    owner: nn.Module
    weight_name: str
    rows: Tensor
    transposed: bool = False
    heads_on_input: bool = False
    bias_owner: nn.Module | None = None
    bias_name: str | None = None
    bias_rows: Tensor | None = None
    index: int | None = None
    by_head: bool = False
    view: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        stored = stored_parameter(self.owner, self.weight_name)
        shape = "not a parameter" if stored is None else tuple(stored.shape)
        return f"Slot({type(self.owner).__name__}.{self.weight_name} {shape}, {self.num_heads} heads x {self.head_dim})"

    @property
    def parameter(self) -> nn.Parameter:
        """The stored parameter itself, without any correction."""
        stored = stored_parameter(self.owner, self.weight_name)
        if stored is None:
            raise WeightError(
                f"{type(self.owner).__name__}.{self.weight_name} holds no parameter "
                "(quantised, parametrised or pruned by another library?); use the plain model"
            )
        return stored

    @property
    def num_heads(self) -> int:
        """Heads stored in this slot."""
        return self.rows.shape[0]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.rows.shape[1]

    @property
    def is_stacked(self) -> bool:
        """Whether the stored parameter is a stack of matrices."""
        return self.by_head or self.index is not None

    @property
    def in_features(self) -> int:
        """Columns of the stored matrix (out, in)."""
        columns = self._matrix_shape[0 if self.transposed else 1]
        return columns * self.num_heads if self.by_head and self.heads_on_input else columns

    @property
    def out_features(self) -> int:
        """Rows of the stored matrix (out, in)."""
        rows = self._matrix_shape[1 if self.transposed else 0]
        return rows * self.num_heads if self.by_head and not self.heads_on_input else rows

    @property
    def _matrix_shape(self) -> torch.Size:
        shape = self.parameter.shape if self.view is None else torch.Size(self.view)
        return shape[1:] if self.is_stacked else shape

    @property
    def heads_shape(self) -> tuple[int, int, int]:
        """Shape of what `read` returns and `write_` takes: (heads, out, in) of each head, also of a stack."""
        if self.heads_on_input:
            return self.num_heads, self.out_features, self.head_dim
        return self.num_heads, self.head_dim, self.in_features

    def regrouped(self, order: Tensor) -> Slot:
        """The slot with its heads in this order; of a matrix of numbers, with the heads of every row taken for one."""
        bias_rows = None if self.bias_rows is None else self.bias_rows[order].flatten(1)
        return replace(self, rows=self.rows[order].flatten(1), bias_rows=bias_rows)

    # Stored tensors and matrices

    def as_matrix(self, stored: Tensor) -> Tensor:
        """The stored tensor as a matrix (out, in): a view, but for a stack of one matrix per head."""
        if self.by_head:
            heads = self.take_heads(stored)
            return heads.transpose(0, 1).flatten(1) if self.heads_on_input else heads.flatten(0, 1)
        stack = self._as_stack(stored)
        matrix = stack if self.index is None else stack[self.index]
        matrix = matrix.T if self.transposed else matrix
        return matrix if matrix.dim() == 2 else matrix.view(matrix.shape[0], -1)

    def with_matrix(self, stored: Tensor, matrix: Tensor) -> Tensor:
        """A tensor stored like this slot's weight, with another matrix (out, in) in its place; differentiable."""
        if self.by_head:
            if self.heads_on_input:
                heads = matrix.unflatten(1, (-1, self.head_dim)).transpose(0, 1)
            else:
                heads = matrix.view(-1, self.head_dim, matrix.shape[1])
            return (heads.mT if self.transposed else heads).reshape(stored.shape)
        part = matrix.T if self.transposed else matrix
        if self.index is None:
            return part.reshape(stored.shape)
        parts = list(self._as_stack(stored).unbind())
        parts[self.index] = part
        return torch.stack(parts).reshape(stored.shape)

    def _as_stack(self, stored: Tensor) -> Tensor:
        return stored if self.view is None else stored.view(self.view)

    # Stored tensors and heads

    @cached_property
    def span(self) -> slice | None:
        """The positions of all heads, if they follow each other without gaps."""
        flat = self.rows.flatten()
        start = int(flat[0])
        return slice(start, start + len(flat)) if bool((flat == start + torch.arange(len(flat))).all()) else None

    def take_heads(self, stored: Tensor) -> Tensor:
        """Per-head matrices ``(heads, out, in)`` of a tensor stored like this slot's weight."""
        if self.by_head:
            stack = self._as_stack(stored)
            return stack.mT if self.transposed else stack
        matrix = self.as_matrix(stored)
        rows = self.rows.to(matrix.device)
        return matrix[:, rows].transpose(0, 1) if self.heads_on_input else matrix[rows]

    def view_heads(self, stored: Tensor) -> Tensor:
        """As `take_heads`, but without a copy where the storage allows: do not write into it or keep it."""
        if self.by_head or self.span is None or self.heads_on_input:
            return self.take_heads(stored)
        return self.as_matrix(stored)[self.span].unflatten(0, tuple(self.rows.shape))

    def put_heads_(self, stored: Tensor, heads: Tensor) -> None:
        """Write per-head matrices into a tensor stored like this slot's weight, in place."""
        heads = heads.to(stored)
        rows = self.rows.to(stored.device)
        if self.by_head or (self.span is not None and not self.heads_on_input):
            self.view_heads(stored).copy_(heads)
        elif self.heads_on_input:
            self.as_matrix(stored)[:, rows] = heads.transpose(0, 1)
        else:
            self.as_matrix(stored)[rows] = heads

    # The weight

    @property
    def is_corrected(self) -> bool:
        """Whether the forward pass uses another weight than the stored one."""
        return self.weight_name in corrections_of(self.owner)

    def read(self) -> Tensor:
        """Heads of the weight that the forward pass uses (corrections of `condition_` included).

        Sharded weights are gathered: every rank must call this.
        """
        return self.take_heads(effective_weight(self.owner, self.weight_name))

    def read_raw(self) -> Tensor:
        """Heads of the stored parameter (what the optimiser updates), gathered like those of `read`."""
        return self.take_heads(full_tensor(self.parameter))

    @torch.no_grad()
    def write_(self, heads: Tensor) -> None:
        """Write heads ``(heads, out, in)`` into the stored parameter, cast to its dtype.

        Of a sharded weight every rank writes its own shard; no rank waits for another.
        """
        check_tensor("heads", heads)
        if tuple(heads.shape) != self.heads_shape:
            raise ValueError(f"expected heads of shape {self.heads_shape}, got {tuple(heads.shape)}")
        if not is_distributed(self.parameter):
            self.put_heads_(self.parameter, heads)
            return
        values = heads.new_zeros(self.parameter.shape)
        mask = torch.zeros_like(values, dtype=torch.bool)
        self.put_heads_(values, heads)
        self.put_heads_(mask, torch.ones_like(heads, dtype=torch.bool))
        stored, box = to_local(self.parameter), local_shard(self.parameter)
        stored.copy_(torch.where(box.of(mask).to(stored.device), box.of(values).to(stored), stored))

    # The bias

    def stored_bias(self) -> Tensor | None:
        """The bias as it is stored, with those of other projections where they share one; None where there is none."""
        if self.bias_name is None:
            return None
        return getattr(self.bias_owner or self.owner, self.bias_name)

    def read_bias(self) -> Tensor | None:
        """Bias of each head ``(heads, head_dim)``, of the whole output for O, or None where there is none."""
        stored = self.stored_bias()
        bias = None if stored is None else full_tensor(stored)
        if bias is None or self.heads_on_input:
            return bias
        rows = self.rows if self.bias_rows is None else self.bias_rows
        return bias.flatten()[rows.to(bias.device)]

    @torch.no_grad()
    def write_bias_(self, values: Tensor) -> None:
        """Write what `read_bias` returned."""
        stored = self.stored_bias()
        if stored is None:
            raise ValueError("this projection has no bias")
        check_tensor("values", values)
        bias, rows = full_tensor(stored), self.rows if self.bias_rows is None else self.bias_rows
        expected = tuple(bias.shape) if self.heads_on_input else tuple(rows.shape)
        if tuple(values.shape) != expected:
            raise ValueError(f"expected a bias of shape {expected}, got {tuple(values.shape)}")
        if self.heads_on_input:
            bias.copy_(values)
        else:
            bias.view(-1)[rows.to(bias.device)] = values.to(bias)
        if is_distributed(stored):
            to_local(stored).copy_(local_shard(stored).of(bias))


# The seam between finding attention and conditioning it: `wellcond.conditioning` attaches corrections to modules, and
# whoever reads or writes projections asks here which weight a forward pass uses.

CORRECTIONS_ATTRIBUTE = "_wellcond_corrections"
PLAIN_CLASS_ATTRIBUTE = "_wellcond_plain_class"
SCOPE_ATTRIBUTE = "_wellcond_scope"
SETTINGS_ATTRIBUTE = "_wellcond_settings"


class InstanceOverride:
    """Stands in one module in place of a method of its class, for as long as something in it is conditioned."""

    replaced: Any
    """What the module itself had there before; None for the method of its class."""


def corrections_of(module: nn.Module) -> dict[str, Any]:
    """Corrections attached to a module, by parameter name (`wellcond.conditioning.corrections`)."""
    return vars(module).get(CORRECTIONS_ATTRIBUTE, {})


def is_conditioned(model: nn.Module) -> bool:
    """Whether some weight of a model carries a correction."""
    return any(CORRECTIONS_ATTRIBUTE in vars(module) for module in model.modules())


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """Settings of a model that was conditioned as a whole."""
    return vars(model).get(SETTINGS_ATTRIBUTE)


def conditioning_of(model: nn.Module) -> dict[str, Any] | None:
    """Method and settings with which a model was conditioned; None for a plain model.

    Of a model of PEFT or a LightningModule, ask the model inside, which `condition_` was given.
    """
    return settings_of(unwrap(model))


def roots_in(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    """Every module of a model that was conditioned as a whole, with its path and its settings."""
    found = ((path, module, settings_of(module)) for path, module in model.named_modules())
    return [(path, module, settings) for path, module, settings in found if settings is not None]


def effective_weight(module: nn.Module, name: str) -> Tensor:
    """The weight that a forward pass of `module` uses as `name`, whole: W + C of a conditioned one, else W itself.

    Weights that are sharded over several ranks are gathered: every rank must call this.
    """
    correction, raw = corrections_of(module).get(name), module._parameters.get(name)
    if correction is None or raw is None:
        return full_tensor(getattr(module, name))
    return correction.effective(module, full_tensor(raw))


def remove_conditioning(module: nn.Module) -> None:
    """Make one module what it was before it, or something in it, was conditioned; no parameter is touched."""
    for name, value in list(vars(module).items()):
        value = getattr(value, "__func__", value)  # bound by Accelerate
        if isinstance(value, InstanceOverride):
            del vars(module)[name]
            if value.replaced is not None:
                vars(module)[name] = value.replaced
    if corrections_of(module):
        del vars(module)[CORRECTIONS_ATTRIBUTE], vars(module)[SCOPE_ATTRIBUTE]
        module.__class__ = class_without_conditioning(type(module))


def class_without_conditioning(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it was conditioned."""
    if PLAIN_CLASS_ATTRIBUTE in vars(cls):
        return vars(cls)[PLAIN_CLASS_ATTRIBUTE]
    if not hasattr(cls, PLAIN_CLASS_ATTRIBUTE):
        return cls
    # FSDP2 has put a class of its own in front of the conditioned one.
    return type(cls.__name__, tuple(class_without_conditioning(base) for base in cls.__bases__), dict(vars(cls)))

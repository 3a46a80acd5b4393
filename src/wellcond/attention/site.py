"""One attention of a model: where its Q, K, V, O are stored, what changes its mathematics, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_flag, check_number, check_tensor, describe
from wellcond.attention.effective import corrections_of, effective_weight
from wellcond.attention.sharding import box_of, is_distributed, local_part, whole
from wellcond.errors import WeightError, check_choice

Kind = Literal["softmax", "cross_covariance", "channel", "nystrom"]
Normaliser = Literal["layer", "rms", "l2", "other"]
Evidence = Literal["adapter", "forward", "declared", "structure"]

FLAGS = ("causal", "cross", "relative_position_bias", "rotary", "talking_heads")
"""Fields of a site that are true where its attention is not the plain one."""

# by_role("value") of an ordinary attention is its v slot; DaViT's channel attention differs.
USUAL_ROLES: Mapping[str, str] = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True, eq=False)
class Share:
    """What this process stores of some heads: slices of the matrix (out, in) and their positions on its head axis."""

    positions: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one projection of one attention is stored.

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
        """One line, without the index table."""
        stored = self.owner._parameters.get(self.weight_name)
        shape = "not a parameter" if stored is None else tuple(stored.shape)
        return f"Slot({type(self.owner).__name__}.{self.weight_name} {shape}, {self.num_heads} heads x {self.head_dim})"

    @property
    def parameter(self) -> nn.Parameter:
        """The stored parameter itself, without any correction."""
        stored = self.owner._parameters.get(self.weight_name)
        if stored is None:
            raise WeightError(
                f"{type(self.owner).__name__}.{self.weight_name} holds no parameter "
                "(quantised, parametrised or pruned by another library?); use the plain model"
            )
        return stored  # type: ignore[return-value]

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

    def as_matrix(self, stored: Tensor) -> Tensor:
        """The stored tensor as a matrix (out, in): a view, but for a stack of one matrix per head."""
        if self.by_head:
            heads = self.take_heads(stored)
            return heads.transpose(0, 1).flatten(1) if self.heads_on_input else heads.flatten(0, 1)
        viewed = stored if self.view is None else stored.view(self.view)
        matrix = viewed if self.index is None else viewed[self.index]
        matrix = matrix.T if self.transposed else matrix
        return matrix if matrix.dim() == 2 else matrix.view(matrix.shape[0], -1)

    def take_heads(self, stored: Tensor) -> Tensor:
        """Per-head matrices ``(heads, out, in)`` of a tensor stored like this slot's weight."""
        if self.by_head:
            stack = stored if self.view is None else stored.view(self.view)
            return stack.mT if self.transposed else stack
        matrix = self.as_matrix(stored)
        rows = self.rows.to(matrix.device)
        if self.heads_on_input:
            return matrix[:, rows].transpose(0, 1)
        return matrix[rows]

    def with_matrix(self, stored: Tensor, matrix: Tensor) -> Tensor:
        """A tensor stored like this slot's weight, with another matrix (out, in) in its place; differentiable."""
        if self.by_head:
            width = self.head_dim
            heads = (
                matrix.unflatten(1, (-1, width)).transpose(0, 1)
                if self.heads_on_input
                else matrix.view(-1, width, matrix.shape[1])
            )
            return (heads.mT if self.transposed else heads).reshape(stored.shape)
        part = matrix.T if self.transposed else matrix
        if self.index is None:
            return part.reshape(stored.shape)
        stack = stored if self.view is None else stored.view(self.view)
        parts = [part if number == self.index else other for number, other in enumerate(stack.unbind())]
        return torch.stack(parts).reshape(stored.shape)

    @cached_property
    def span(self) -> slice | None:
        """The positions of all heads, if they follow each other without gaps."""
        flat = self.rows.flatten()
        start = int(flat[0])
        return slice(start, start + len(flat)) if bool((flat == start + torch.arange(len(flat))).all()) else None

    def view_heads(self, stored: Tensor) -> Tensor:
        """As `take_heads`, but without a copy where the storage allows: do not write into it or keep it."""
        if self.by_head or self.span is None or self.heads_on_input:
            return self.take_heads(stored)
        return self.as_matrix(stored)[self.span].unflatten(0, tuple(self.rows.shape))

    def put_heads_(self, stored: Tensor, heads: Tensor) -> None:
        """Write per-head matrices into a tensor stored like this slot's weight, in place."""
        heads = heads.to(stored)
        if self.by_head or (self.span is not None and not self.heads_on_input):
            self.view_heads(stored).copy_(heads)
            return
        rows = self.rows.to(stored.device)
        if self.heads_on_input:
            self.as_matrix(stored)[:, rows] = heads.transpose(0, 1)
        else:
            self.as_matrix(stored)[rows] = heads

    def read(self) -> Tensor:
        """Heads of the weight that the forward pass uses (corrections of `condition_` included).

        Sharded weights are gathered: every rank must call this.
        """
        return self.take_heads(effective_weight(self.owner, self.weight_name))

    @property
    def is_corrected(self) -> bool:
        """Whether the forward pass uses another weight than the stored one."""
        return self.weight_name in corrections_of(self.owner)

    def read_raw(self) -> Tensor:
        """Heads of the stored parameter (what the optimiser updates), gathered like those of `read`."""
        return self.take_heads(whole(self.parameter))

    @torch.no_grad()
    def write_(self, heads: Tensor) -> None:
        """Write heads ``(heads, out, in)`` into the stored parameter, cast to its dtype."""
        self._check_shape(heads)
        if is_distributed(self.parameter):
            self.write_share_(self.share(heads))
        else:
            self.put_heads_(self.parameter, heads)

    def _check_shape(self, heads: Tensor) -> None:
        check_tensor("heads", heads)
        expected = (*self.rows.shape, self.in_features)
        if self.heads_on_input:
            expected = (self.num_heads, self.out_features, self.head_dim)
        if tuple(heads.shape) != expected:
            raise ValueError(f"expected heads of shape {expected}, got {tuple(heads.shape)}")

    def share(self, heads: Tensor) -> Share:
        """The part of heads ``(heads, out, in)`` of a sharded weight that this rank stores."""
        self._check_shape(heads)
        if self.is_stacked:
            raise WeightError(
                f"{type(self.owner).__name__}.{self.weight_name} is a stack of matrices that is sharded over ranks: "
                "expected a plain parameter. Do this before the model is sharded."
            )
        box = box_of(self.parameter)
        head_axis = 1 if self.heads_on_input else 0
        matrix = heads.transpose(0, 1).flatten(1) if self.heads_on_input else heads.flatten(0, 1)
        stored_axes = (1, 0) if self.transposed else (0, 1)
        positions = self.rows.flatten()
        held = box.inside(positions, stored_axes[head_axis])
        other_axis = 1 - head_axis
        first, size = (numbers[stored_axes[other_axis]] for numbers in (box.offsets, box.sizes))
        # A copy: what is kept until it is written must not keep the whole.
        values = matrix.narrow(other_axis, min(first, matrix.shape[other_axis]), size)
        values = values.index_select(head_axis, held.nonzero().flatten().to(matrix.device)).clone()
        return Share(positions[held] - box.offsets[stored_axes[head_axis]], values)

    @torch.no_grad()
    def write_share_(self, share: Share) -> None:
        """Write what `share` returned."""
        stored = self.as_matrix(local_part(self.parameter))
        axis = 1 if self.heads_on_input else 0
        stored.index_copy_(axis, share.positions.to(stored.device), share.values.to(stored))

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

    def stored_bias(self) -> Tensor | None:
        """The bias as it is stored, with those of other projections where they share one; None where there is none."""
        if self.bias_name is None:
            return None
        return getattr(self.bias_owner or self.owner, self.bias_name)

    def read_bias(self) -> Tensor | None:
        """Bias of each head ``(heads, head_dim)``, of the whole output for O, or None where there is none."""
        stored = self.stored_bias()
        bias = None if stored is None else whole(stored)
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
        bias, rows = whole(stored), self.rows if self.bias_rows is None else self.bias_rows
        expected = tuple(bias.shape) if self.heads_on_input else tuple(rows.shape)
        if tuple(values.shape) != expected:
            raise ValueError(f"expected a bias of shape {expected}, got {tuple(values.shape)}")
        if self.heads_on_input:
            bias.copy_(values)
        else:
            bias.view(-1)[rows.to(bias.device)] = values.to(bias)
        if is_distributed(stored):
            local_part(stored).copy_(box_of(stored).of(bias))


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention: per-head access to Q, K, V, O and the facts that change its mathematics.

    `q`, `k`, `v` are the slices by the name under which the model stores them; `by_role` says which of them is
    compared, which is compared with, and which lies on the linear path.
    """

    name: str
    module: nn.Module
    arrangement: str
    q: Slot
    k: Slot
    v: Slot
    o: Slot | None = None
    kind: Kind = "softmax"
    scale: float | None = None
    """Logit scale; None where it is learned or not known."""
    causal: bool | None = False
    """None where the caller's mask decides (nn.MultiheadAttention)."""
    cross: bool = False
    """Keys and values come from another sequence than the queries."""
    relative_position_bias: bool = False
    qk_norm: Normaliser | None = None
    rotary: bool = False
    talking_heads: bool = False
    modifiers: tuple[str, ...] = ()
    """What else changes the mathematics and no other field expresses: ``"attention sinks"``, ``"gated output"``,
    ``"logit softcap"``, ``"output norm"``, ... Empty for plain attention."""
    evidence: Evidence = "adapter"
    """How the facts are known: ``adapter``, a named family; ``forward``, a trial run of the module's own forward pass;
    ``declared``, by a user's adapter that no trial run could confirm; ``structure``, only where the projections are,
    while scale, rotary embedding and normalisation are not known."""
    roles: Mapping[str, str] = field(default_factory=lambda: USUAL_ROLES)
    stream: str = ""
    """Which of several streams with projections of their own (``"added"`` in Flux and SD3); the name ends in it."""

    def __post_init__(self) -> None:
        """Refuse values that the fields can not have.

        Raises: UnknownChoiceError, TypeError, ValueError.
        """
        check_choice("attention kind", self.kind, get_args(Kind))
        if self.qk_norm is not None:
            check_choice("qk_norm", self.qk_norm, get_args(Normaliser))
        for name in ("name", "arrangement"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected a text, got {describe(getattr(self, name))}")
        if self.scale is not None:
            check_number("scale", self.scale)
        for name in FLAGS:
            if name != "causal" or self.causal is not None:
                check_flag(name, getattr(self, name))
        if not isinstance(self.modifiers, tuple) or not all(isinstance(word, str) for word in self.modifiers):
            raise TypeError(f"modifiers: expected a tuple of texts, got {describe(self.modifiers)}")
        if not isinstance(self.roles, Mapping) or set(self.roles) != set(USUAL_ROLES):
            raise TypeError(f"roles: expected the slots that play query, key and value, got {describe(self.roles)}")

    def __repr__(self) -> str:
        """One line: where it is, its sizes, and what makes it other than plain softmax self-attention."""
        grouped = f" ({self.num_kv_heads} of keys and values)" if self.num_kv_heads != self.num_heads else ""
        facts = [repr(self.name), f"{self.num_heads} heads{grouped} x {self.head_dim}"]
        facts += [f"width {self.in_features}"] if self.q.owner._parameters.get(self.q.weight_name) is not None else []
        facts.append(" ".join(self.slots))
        facts += [self.kind] if self.kind != "softmax" else []
        facts += [name.replace("_", " ") for name in FLAGS if getattr(self, name)]
        facts += [f"{self.qk_norm} qk-norm"] if self.qk_norm else []
        return f"AttentionSite({', '.join([*facts, *self.modifiers])})"

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; fewer than `num_heads` under grouped-query attention."""
        return self.k.num_heads

    @property
    def head_dim(self) -> int:
        """Width of a query (and key) head."""
        return self.q.head_dim

    @property
    def in_features(self) -> int:
        """Width of the tokens that the queries read."""
        return self.q.in_features

    @property
    def slots(self) -> dict[str, Slot]:
        """Q, K, V and, where there is one, O."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        return named if self.o is None else {**named, "o": self.o}

    def by_role(self, role: str) -> Slot:
        """The slot that plays ``"query"``, ``"key"`` or ``"value"``."""
        check_choice("role", role, tuple(USUAL_ROLES))
        return self.slots[self.roles[role]]


@dataclass(frozen=True, eq=False)
class Place:
    """A module and where it stands in its model."""

    name: str
    module: nn.Module
    model: nn.Module

    @property
    def class_name(self) -> str:
        """Name of the module's class, without the package."""
        return type(self.module).__name__

    @property
    def parent(self) -> nn.Module | None:
        """The module that contains this one; None for the model itself."""
        if not self.name:
            return None
        return self.model.get_submodule(self.name.rpartition(".")[0])

    def ancestors(self) -> list[nn.Module]:
        """Containing modules, nearest first; the model itself is last."""
        parts = self.name.split(".") if self.name else []
        return [self.model.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1)]

    def config(self, attribute: str, default: Any = None) -> Any:
        """A value from the nearest `config` object (Hugging Face): the module's own, else an ancestor's."""
        for module in (self.module, *self.ancestors()):
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, attribute):
                return getattr(config, attribute)
        return default

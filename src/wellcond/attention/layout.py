"""Where the rows of each head are in a stored weight, and one builder of sites per storage style.

A wrong arrangement is silent: the shapes are equal, the rows are those of another head. `QKVLayout` is the only code
that knows arrangements; a table of row numbers (heads, head_dim) describes any of them.

Legend: H query heads, K key/value heads, g = H / K, d head width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_choice, check_int, describe
from wellcond.attention import names
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.slot import Slot
from wellcond.errors import WeightError

Arrangement = Literal["blocks", "groups"]
Role = Literal["q", "k", "v"]
NO_FACTS = {"name", "module", "q", "k", "v", "o", "stream"}
FACTS = tuple(field.name for field in fields(AttentionSite) if field.name not in NO_FACTS)
"""Fields of a site that an adapter declares."""


def head_rows(num_heads: int, head_dim: int, *, start: int = 0, stride: int | None = None) -> Tensor:
    """Row numbers of heads that follow each other, `stride` rows apart.

    Returns: int64 tensor (num_heads, head_dim).

    Example:
        >>> head_rows(2, 3, start=1).tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    stride = head_dim if stride is None else stride
    return start + stride * torch.arange(num_heads)[:, None] + torch.arange(head_dim)


@dataclass(frozen=True)
class QKVLayout:
    """Arrangement of a fused projection along its output rows.

    - ``blocks``: all query heads, then all key heads, then all value heads (in the order of `order`);
    - ``groups``: for each key/value head, its g query heads, its key, its value (in the order of `order`).

    `order` lists the roles that are stored: ``"qkv"`` (default), ``"kv"`` where the query has a weight of its own, or
    another permutation. `shards` repeats the whole arrangement for consecutive parts of the heads (CodeGen: 4).

    Example:
        >>> QKVLayout(num_heads=2, head_dim=1, arrangement="groups").rows("v").tolist()
        [[2], [5]]
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    value_head_dim: int | None = None
    arrangement: Arrangement = "blocks"
    order: str = "qkv"
    shards: int = 1

    def __post_init__(self) -> None:
        check_choice("arrangement", self.arrangement, get_args(Arrangement))
        orders = ("".join(some) for count in (1, 2, 3) for some in itertools.permutations("qkv", count))
        if self.order not in orders:
            raise ValueError(f"order: expected each of the letters q, k, v once, got {self.order!r}")
        check_int("shards", self.shards, at_least=1)
        if self.num_heads % self.kv_heads or self.kv_heads % self.shards:
            raise ValueError(
                f"expected query heads to be a multiple of key/value heads and those of shards, "
                f"got {self.num_heads}, {self.kv_heads}, {self.shards}"
            )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def width(self, role: str) -> int:
        """Rows of one head in this role."""
        return self.head_dim if role != "v" or self.value_head_dim is None else self.value_head_dim

    def count(self, role: str) -> int:
        """Number of heads in this role."""
        return self.num_heads if role == "q" else self.kv_heads

    @property
    def num_rows(self) -> int:
        """Rows of the whole fused weight."""
        return sum(self.count(role) * self.width(role) for role in self.order)

    def rows(self, role: str) -> Tensor:
        """Row numbers (heads, head width) of one role, in the order of the heads."""
        check_choice("role", role, tuple(self.order))
        # One unit is what repeats: a key/value group, or a shard of whole blocks.
        num_units = self.kv_heads if self.arrangement == "groups" else self.shards
        before = self.order[: self.order.index(role)]
        start = sum(self.count(other) * self.width(other) for other in before) // num_units
        stride = self.num_rows // num_units
        heads_per_unit = self.count(role) // num_units
        within = head_rows(heads_per_unit, self.width(role), start=start)
        units = stride * torch.arange(num_units)[:, None, None]
        return (units + within).reshape(-1, self.width(role))


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's Conv1D, which stores (in_features, out_features)."""
    return any(base.__name__ == "Conv1D" and hasattr(module, "nf") for base in type(module).__mro__)


def is_projection(module: object) -> bool:
    """Whether a module is a plain linear map with a weight: Linear, Conv1D, 1x1 convolution."""
    if not isinstance(module, nn.Module):
        return False
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return set(module.kernel_size) == {1} and module.groups == 1
    weight = getattr(module, "weight", None)
    is_linear_like = isinstance(module, nn.Linear) or is_conv1d(module) or hasattr(module, "in_features")
    return is_linear_like and isinstance(weight, Tensor) and weight.dim() == 2


def find_output(module: nn.Module) -> str | None:
    """Path of the output projection, by its usual names; inside a Sequential, its first projection."""
    for name in names.OUTPUT:
        child = getattr(module, name, None)
        if is_projection(child):
            return name
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            number = next((number for number, part in enumerate(child) if is_projection(part)), None)
            if number is not None:
                return f"{name}.{number}"
    return None


def holds_projections_only(part: nn.Module) -> bool:
    """Whether a part of a module is no attention by itself and has nothing but projections."""
    children = list(part.children())
    if not children or not all(is_projection(child) for child in children):
        return False
    return find_output(part) is None and not any(hasattr(part, name) for name in names.HEADS)


def out_features(projection: nn.Module) -> int:
    """Output rows of a projection, whatever its storage.

    Raises: WeightError if it holds no weight tensor.
    """
    if not isinstance(projection, nn.Module):
        raise TypeError(f"expected a projection such as nn.Linear, got {describe(projection)}")
    weight, name = getattr(projection, "weight", None), f"{type(projection).__module__}.{type(projection).__name__}"
    advice = "expected a projection with floating point weights: use the model before quantisation"
    if not isinstance(weight, Tensor):
        raise WeightError(f"a {name} holds no weight tensor (quantised?); {advice}")
    if weight.dim() < 2 or not weight.dtype.is_floating_point:
        raise WeightError(
            f"a {name} stores its weight as {weight.dtype} of shape {tuple(weight.shape)} (quantised?); {advice}"
        )
    return weight.shape[1] if is_conv1d(projection) else weight.shape[0]


def projection_slot(projection: nn.Module, rows: Tensor, *, heads_on_input: bool = False) -> Slot:
    """Slot of a projection that is a module of its own."""
    has_bias = getattr(projection, "bias", None) is not None
    return Slot(
        owner=projection,
        weight_name="weight",
        rows=rows,
        transposed=is_conv1d(projection),
        heads_on_input=heads_on_input,
        bias_name="bias" if has_bias else None,
    )


def output_slot(place: ModuleContext, output: nn.Module | None, num_heads: int, head_dim: int) -> Slot | None:
    """Slot of W_O, whose heads are columns; None where there is no plain output projection."""
    if output is None or isinstance(output, nn.Identity):
        return None
    out_features(output)
    slot = projection_slot(output, head_rows(num_heads, head_dim), heads_on_input=True)
    if slot.in_features != num_heads * head_dim:
        place.refuse(
            "the output projection does not match the declared heads.\n"
            f"  expected columns: {num_heads * head_dim} = {num_heads} * {head_dim}     got: {slot.in_features}"
        )
    return slot


def check_rows(place: ModuleContext, what: str, got: int, counts: list[int], head_dims: list[int]) -> None:
    """Refuse a projection whose rows are not the declared heads."""
    expected = sum(count * dim for count, dim in zip(counts, head_dims, strict=True))
    if got != expected:
        terms = " + ".join(f"{count}*{dim}" for count, dim in zip(counts, head_dims, strict=True))
        place.refuse(
            f"{what}: rows do not match the declared heads.\n  expected rows: {expected} = {terms}     got: {got}"
        )


def divide_heads(place: ModuleContext, what: str, rows: int, num_heads: int) -> int:
    """Head width when only the number of heads is declared."""
    if num_heads < 1 or rows % num_heads:
        place.refuse(f"{what}: {rows} rows cannot be divided into {num_heads} heads.")
    return rows // num_heads


def _check_counts(place: ModuleContext, **counts: Any) -> None:
    """Refuse counts that are no whole numbers above zero; None is one that was not declared.

    Raises: TypeError, ValueError.
    """
    if not isinstance(place, ModuleContext):
        raise TypeError(f"place: expected what an adapter is called with, got {describe(place)}")
    for name, count in counts.items():
        if count is not None or name == "num_heads":
            check_int(f"{place.class_name}: {name}", count, at_least=1)


def _site(
    place: ModuleContext, slots: tuple[Slot, Slot, Slot], output: nn.Module | None, facts: dict[str, Any]
) -> AttentionSite:
    """A site with facts by the names of the fields that no builder sets.

    Raises: UnknownChoiceError for another name.
    """
    for name in facts:
        check_choice("fact of an attention site", name, FACTS)
    q, k, v = slots
    o = output_slot(place, output, q.num_heads, v.head_dim)
    return AttentionSite(name=place.name, module=place.module, q=q, k=k, v=v, o=o, **facts)


def separate_site(
    place: ModuleContext,
    q: nn.Module,
    k: nn.Module,
    v: nn.Module,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    output: nn.Module | None = None,
    **facts: Any,
) -> AttentionSite:
    """Site of an attention with three projections of their own; heads follow each other in the rows."""
    _check_counts(place, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or divide_heads(place, "query", out_features(q), num_heads)
    value_dim = divide_heads(place, "value", out_features(v), kv_heads)
    check_rows(place, "query", out_features(q), [num_heads], [head_dim])
    check_rows(place, "key", out_features(k), [kv_heads], [head_dim])
    query = projection_slot(q, head_rows(num_heads, head_dim))
    key = projection_slot(k, head_rows(kv_heads, head_dim))
    value = projection_slot(v, head_rows(kv_heads, value_dim))
    return _site(place, (query, key, value), output, facts)


def fused_site(
    place: ModuleContext,
    qkv: nn.Module,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    arrangement: Arrangement = "blocks",
    order: str = "qkv",
    shards: int = 1,
    output: nn.Module | None = None,
    **facts: Any,
) -> AttentionSite:
    """Site of an attention with one projection that holds Q, K and V."""
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    _check_counts(place, **counts, value_head_dim=value_head_dim)
    kv_heads = num_kv_heads or num_heads
    rows = out_features(qkv)
    head_dim = head_dim or divide_heads(place, "fused q, k, v", rows, num_heads + 2 * kv_heads)
    value_dim = value_head_dim or head_dim
    check_rows(place, "fused q, k, v", rows, [num_heads, kv_heads, kv_heads], [head_dim, head_dim, value_dim])
    layout = QKVLayout(num_heads, head_dim, kv_heads, value_dim, arrangement, order, shards)
    if len(order) != 3:
        raise ValueError(f"order: expected q, k and v in a fused projection, got {order!r}")
    query, key, value = (projection_slot(qkv, layout.rows(role)) for role in "qkv")
    return _site(place, (query, key, value), output, facts)


def query_and_kv_site(
    place: ModuleContext,
    q: nn.Module,
    kv: nn.Module,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    arrangement: Arrangement = "blocks",
    output: nn.Module | None = None,
    **facts: Any,
) -> AttentionSite:
    """Site of an attention with a query projection and one that holds K and V."""
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    _check_counts(place, **counts, value_head_dim=value_head_dim)
    kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or divide_heads(place, "query", out_features(q), num_heads)
    check_rows(place, "query", out_features(q), [num_heads], [head_dim])
    value_dim = value_head_dim or head_dim
    check_rows(place, "fused k, v", out_features(kv), [kv_heads, kv_heads], [head_dim, value_dim])
    layout = QKVLayout(num_heads, head_dim, kv_heads, value_dim, arrangement, order="kv")
    query = projection_slot(q, head_rows(num_heads, head_dim))
    key, value = (projection_slot(kv, layout.rows(role)) for role in "kv")
    return _site(place, (query, key, value), output, facts)

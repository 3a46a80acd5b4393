"""Where the rows of each head are in a stored weight, and the builder of sites from projections.

A wrong arrangement is silent: the shapes are equal, the rows are those of another head. `QKVLayout` is the only code
that knows arrangements; a table of row numbers (heads, head_dim) describes any of them.

Legend: H query heads, K key/value heads, g = H / K, d head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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


def divide_heads(place: ModuleContext, what: str, rows: int, num_heads: int) -> int:
    """Head width when only the number of heads is declared."""
    if num_heads < 1 or rows % num_heads:
        place.refuse(f"{what}: {rows} rows cannot be divided into {num_heads} heads.")
    return rows // num_heads


def build_site(
    place: ModuleContext,
    projections: Mapping[str, nn.Module],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    arrangement: Arrangement = "blocks",
    shards: int = 1,
    output: nn.Module | None = None,
    **facts: Any,
) -> AttentionSite:
    """Site of an attention layer from its projections.

    Args:
        place: what an adapter is called with.
        projections: by what their rows hold, in that order: ``{"q": ..., "k": ..., "v": ...}``, ``{"qkv": ...}``,
            ``{"q": ..., "kv": ...}``, ``{"vkq": ...}``.
        num_heads: query heads.
        num_kv_heads: key/value heads, as many as query heads by default.
        head_dim: rows of a query or key head; by default what the rows of the queries give.
        value_head_dim: rows of a value head; by default what the rows of the values give, if these have a projection of
            their own, else as many as of a query.
        arrangement: of a projection that holds several: ``blocks`` (all query heads, all key heads, all value heads) or
            ``groups`` (for each key/value head its query heads, its key, its value).
        shards: how often the whole arrangement is repeated, for consecutive parts of the heads (CodeGen: 4).
        output: the output projection.
        **facts: further fields of the site: ``scale``, ``causal``, ``rotary``, ...

    Raises:
        UnsupportedLayoutError: rows that are not the declared heads.
        TypeError, ValueError: counts that are no whole numbers; letters other than q, k and v, each once.
    """
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    _check_declared(place, projections, facts, **counts, head_dim=head_dim, value_head_dim=value_head_dim)
    kv_heads = num_kv_heads or num_heads
    if num_heads % kv_heads:
        place.refuse(f"{num_heads} query heads are no multiple of {kv_heads} key/value heads.")
    rows = {letters: out_features(part) for letters, part in projections.items()}
    if head_dim is None:
        letters = next(letters for letters in projections if "q" in letters)
        heads = sum(num_heads if letter == "q" else kv_heads for letter in letters)
        head_dim = divide_heads(place, _title(letters), rows[letters], heads)
    if value_head_dim is None:
        value_head_dim = divide_heads(place, _title("v"), rows["v"], kv_heads) if "v" in rows else head_dim
    slots: dict[str, Slot] = {}
    for letters, part in projections.items():
        layout = QKVLayout(num_heads, head_dim, kv_heads, value_head_dim, arrangement, letters, shards)
        check_rows(place, _title(letters), rows[letters], layout)
        slots |= {letter: projection_slot(part, layout.rows(letter)) for letter in letters}
    o = output_slot(place, output, num_heads, value_head_dim)
    return AttentionSite(place.name, place.module, slots["q"], slots["k"], slots["v"], o, **facts)


def _title(letters: str) -> str:
    roles = {"q": "query", "k": "key", "v": "value"}
    return roles.get(letters, f"fused {', '.join(letters)}")


def check_rows(place: ModuleContext, what: str, got: int, layout: QKVLayout) -> None:
    """Refuse a projection whose rows are not the declared heads."""
    if got != layout.num_rows:
        terms = " + ".join(f"{layout.count(role)}*{layout.width(role)}" for role in layout.order)
        place.refuse(
            f"{what}: rows do not match the declared heads.\n"
            f"  expected rows: {layout.num_rows} = {terms}     got: {got}"
        )


def _check_declared(place: Any, projections: Any, facts: Mapping[str, Any], **counts: Any) -> None:
    if not isinstance(place, ModuleContext):
        raise TypeError(f"place: expected what an adapter is called with, got {describe(place)}")
    if not isinstance(projections, Mapping) or not all(isinstance(letters, str) for letters in projections):
        raise TypeError(
            f"projections: expected modules by letters, such as {{'qkv': m.qkv}}, got {describe(projections)}"
        )
    if sorted("".join(projections)) != ["k", "q", "v"]:
        raise ValueError(f"projections: expected each of the letters q, k, v once, got {list(projections)}")
    for name, count in counts.items():
        if count is not None or name == "num_heads":
            check_int(f"{place.class_name}: {name}", count, at_least=1)
    for name in facts:
        check_choice("fact of an attention site", name, FACTS)

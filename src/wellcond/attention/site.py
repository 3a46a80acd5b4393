"""One attention layer of a model (`AttentionSite`), the list of all (`Sites`), the blocks around them (`Block`)."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, SupportsIndex, get_args, overload

from torch import Tensor, nn

from wellcond.arguments import check_choice, check_flag, check_number, describe
from wellcond.attention.slot import Slot, stored_parameter
from wellcond.errors import SiteNotFoundError, UnsupportedLayoutError

Kind = Literal["softmax", "cross_covariance", "channel", "nystrom"]
Normaliser = Literal["layer", "rms", "l2", "other"]
Evidence = Literal["adapter", "forward", "declared", "structure"]

FLAGS = ("causal", "cross", "relative_position_bias", "rotary", "talking_heads")
"""Fields of a site that are true where its attention is not the plain one."""

# by_role("value") of an ordinary attention is its v slot; DaViT's channel attention differs.
USUAL_ROLES: Mapping[str, str] = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention layer: per-head access to Q, K, V, O and the facts that change its mathematics.

    `q`, `k`, `v` are the slices by the name under which the model stores them; `by_role` says which of them is
    compared, which is compared with, and which lies on the linear path.
    """

    name: str
    module: nn.Module
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
        if not isinstance(self.name, str):
            raise TypeError(f"name: expected a text, got {describe(self.name)}")
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
        facts += [f"width {self.in_features}"] if stored_parameter(self.q.owner, self.q.weight_name) is not None else []
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

    def on(self, copied: nn.Module) -> AttentionSite:
        """The same site of a copy of its module; without an output projection that lies outside the module.

        Raises: UnsupportedLayoutError if queries, keys or values lie outside the module.
        """
        counterparts = dict(zip(self.module.modules(), copied.modules(), strict=True))

        def moved(slot: Slot) -> Slot:
            if slot.owner not in counterparts:
                raise UnsupportedLayoutError(
                    self.name,
                    f"its {type(slot.owner).__name__} is no part of the module, which cannot be run by itself.",
                    class_name=type(self.module).__name__,
                )
            bias_owner = None if slot.bias_owner is None else counterparts.get(slot.bias_owner)
            return replace(slot, owner=counterparts[slot.owner], bias_owner=bias_owner)

        output = moved(self.o) if self.o is not None and self.o.owner in counterparts else None
        return replace(self, module=copied, q=moved(self.q), k=moved(self.k), v=moved(self.v), o=output)


class Sites(list[AttentionSite]):
    """A list of sites; ``sites["blocks.3"]`` is the one at that module path, or the only one in or under it.

    Example:
        >>> from torch import nn
        >>> from wellcond import find_attention
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> sites = find_attention(nn.TransformerEncoder(layer, 3))
        >>> sites["layers.1"].name, sites["2.self_attn"].q.read().shape
        ('layers.1.self_attn', torch.Size([2, 4, 8]))
    """

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> AttentionSite: ...
    @overload
    def __getitem__(self, key: slice) -> Sites: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> AttentionSite | Sites:
        """By number, by slice, or by a module path: whole, or a part of it that only one attention layer has.

        Raises: SiteNotFoundError if no attention layer or several have this path; it is a KeyError.
        """
        if isinstance(key, slice):
            return Sites(super().__getitem__(key))
        if isinstance(key, str):
            return self._named(key)
        if not hasattr(key, "__index__"):
            raise TypeError(f"sites: expected a number, a slice or a module path, got {key!r}")
        return super().__getitem__(key)

    def _named(self, path: str) -> AttentionSite:
        found = [site for site in self if site.name == path] or [
            site for site in self if f".{path}." in f".{site.name}."
        ]
        if len(found) == 1:
            return found[0]
        names = [site.name for site in found or self]
        raise SiteNotFoundError(path, names, several=bool(found), close=closest_paths(path, names))


def path_matches(pattern: str, path: str) -> bool:
    """Whether a path is, or lies in or under, a path or pattern of paths.

    Example:
        >>> path_matches("blocks.*", "blocks.3.attn"), path_matches("blocks.3", "vit.blocks.3.attn")
        (True, True)
        >>> path_matches("blocks.1", "blocks.11.attn"), path_matches("*.[02].attn", "blocks.1.attn")
        (False, False)
    """
    if not any(sign in pattern for sign in "*?["):
        return pattern == path or (bool(pattern) and f".{pattern}." in f".{path}.")
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")


def closest_paths(path: str, names: Iterable[str]) -> list[str]:
    """Close matches for a mistyped path or pattern, by as many parts as it has."""
    starts = {".".join(name.split(".")[: path.count(".") + 1]): name for name in reversed(list(names))}
    return sorted(starts[start] for start in difflib.get_close_matches(path, starts, n=3))


@dataclass(eq=False)
class Block:
    """The nearest module around some attention layers that also holds matrices of another kind, those of its MLP.

    What it receives is the stream; attention adds what W_O puts out, the MLP what its last matrix puts out: root mean
    squares of these as tensors, None where no forward pass was recorded (`wellcond.attention.record`).
    """

    name: str
    module: nn.Module
    sites: list[AttentionSite]
    stream: Tensor | None = None
    attention: dict[str, Tensor] = field(default_factory=dict)
    """What attention added, by the name of the site."""
    mlp: nn.Module | None = None
    """The last matrix of the MLP."""
    mlp_added: Tensor | None = None

    @property
    def scales_itself(self) -> bool:
        """Whether learned scales stand between the parts and the stream (LayerScale, XCiT's and CaiT's gamma)."""
        inside = self.module.modules()
        scales = any(type(module).__name__ == "LayerScale" or "layer_scale" in module._parameters for module in inside)
        return scales or any(name.startswith("gamma") for name in self.module._parameters)


def find_blocks(model: nn.Module, sites: Sequence[AttentionSite]) -> list[Block]:
    """The blocks around attention layers; none for an attention layer that stands alone."""
    inside = tuple(f"{site.name}." for site in sites)
    outputs = {id(site.o.owner) for site in sites if site.o is not None}
    others = [
        name
        for name, module in model.named_modules()
        if is_matrix(module) and id(module) not in outputs and not f"{name}.".startswith(inside)
    ]
    found: dict[str, Block] = {}
    for site in sites:
        parts = site.name.split(".")
        for name in (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)):
            module = model.get_submodule(name)
            called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if called and any(other.startswith(f"{name}.") for other in others):
                found.setdefault(name, Block(name, module, [])).sites.append(site)
                break
    return list(found.values())


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies tokens by a matrix: a linear layer of any library, or a 1 x 1 convolution."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or weight.dim() < 2:
        return False
    return all(size == 1 for size in weight.shape[2:])


@dataclass(frozen=True, eq=False)
class ModuleContext:
    """A module and where it stands in its model: what an adapter is called with."""

    name: str
    module: nn.Module
    model: nn.Module

    @property
    def class_name(self) -> str:
        """Name of the module's class, without the package."""
        return type(self.module).__name__

    def refuse(self, reason: str, advice: str = "") -> NoReturn:
        """Raise UnsupportedLayoutError with the reason why q, k, v slots cannot express this module."""
        raise UnsupportedLayoutError(self.name, reason, class_name=self.class_name, advice=advice)

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

    def first_int(self, wanted: Sequence[str]) -> int | None:
        """The first whole number under one of these names: of the module, else of a config around it."""
        for values in ((getattr(self.module, name, None) for name in wanted), (self.config(name) for name in wanted)):
            for value in values:
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None

"""Which function describes which attention class.

An adapter is a function from a `Place` to an `AttentionSite` (or None: "not one of mine after all"). It is found by
the dotted name of the module's class, so describing a GPT-2 imports nothing from transformers. A subclass inherits
the adapter of its base only if it keeps the base's `forward`: another forward may read the rows in another order.
Whoever writes one that does not says so by registering the adapter for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from wellcond.attention.site import AttentionSite


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


Adapter = Callable[[Place], AttentionSite | None]
ADAPTERS: dict[str, Adapter] = {}


def dotted_name(cls: type) -> str:
    """Full name of a class, e.g. ``timm.layers.attention.Attention``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_adapter(*targets: type | str) -> Callable[[Adapter], Adapter]:
    """Decorate a function that describes the attention classes `targets` (classes, or their dotted names).

    A later registration of the same class replaces the earlier one, so a user can correct us.

    Example:
        >>> from torch import nn
        >>> from wellcond.attention.builders import fused_site
        >>> class MyAttention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.mix, self.heads = nn.Linear(8, 24), 2
        >>> @register_adapter(MyAttention)
        ... def my_attention(place):
        ...     m = place.module
        ...     return fused_site(place, m.mix, num_heads=m.heads, arrangement="groups", family="mine")
        >>> from wellcond import find_attention
        >>> find_attention(MyAttention())[0].k.rows[1].tolist()
        [16, 17, 18, 19]
    """
    if not targets:
        raise ValueError("expected at least one class or dotted class name")

    def decorate(adapter: Adapter) -> Adapter:
        for target in targets:
            ADAPTERS[target if isinstance(target, str) else dotted_name(target)] = adapter
        return adapter

    return decorate


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of a module's class, or of the nearest base whose forward it keeps."""
    cls = type(module)
    for base in cls.__mro__:
        adapter = ADAPTERS.get(dotted_name(base))
        if adapter is not None and getattr(base, "forward", None) is getattr(cls, "forward", None):
            return adapter
    return None


def find_base_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of the nearest base class, whether or not its forward is kept."""
    return next((ADAPTERS[name] for base in type(module).__mro__ if (name := dotted_name(base)) in ADAPTERS), None)


def registered_families() -> list[str]:
    """Names of every registered attention class, without the package."""
    return sorted({name.rpartition(".")[2] for name in ADAPTERS})

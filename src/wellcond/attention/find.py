"""Which function describes which attention class, and the walk over a model that describes every attention in it.

An adapter is a function from a `Place` to an `AttentionSite` (or None: "not one of mine after all"). It is found by
the dotted name of the module's class, so describing a GPT-2 imports nothing from transformers. A subclass inherits
the adapter of its base only if it keeps the base's `forward`: another forward may read the rows in another order.
Whoever writes one that does not says so by registering the adapter for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from wellcond.attention.head_norm import HEAD_NORM, ROWS_ATTRIBUTE
from wellcond.attention.site import AttentionSite, Place
from wellcond.attention.sites import Sites
from wellcond.attention.structure import describe_by_structure
from wellcond.errors import AttentionNotFoundError, UnsupportedLayoutError, WeightError

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


@dataclass(frozen=True)
class Scan:
    """Every attention in a model, and errors about those whose layout is not known."""

    sites: list[AttentionSite]
    refusals: list[UnsupportedLayoutError]


def scan_attention(model: nn.Module) -> Scan:
    """Describe every attention of a model; collect errors about layouts instead of raising them."""
    sites: list[AttentionSite] = []
    refusals: list[UnsupportedLayoutError] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{site.name}.") or site.name == "" for site in sites):
            continue  # a part of an attention that is already described
        place = Place(name, module, model)
        adapter = find_adapter(module)
        try:
            found = [adapter(place)] if adapter is not None else describe_by_structure(place)
        except UnsupportedLayoutError as refusal:
            refusals.append(refusal)
            continue
        for site in found:
            if site is not None:
                sites.append(_with_head_norm(_with_kind_of_base(place, site)))
    return Scan(sites, refusals)


def _with_kind_of_base(place: Place, site: AttentionSite) -> AttentionSite:
    """A subclass with a forward of its own that could not be tried is, if anything, of the kind of its base."""
    if site.evidence != "structure":
        return site
    adapter = find_base_adapter(place.module)
    base = None if adapter is None else adapter(place)
    return site if base is None else replace(site, kind=base.kind, modifiers=base.modifiers, o=site.o or base.o)


def _with_head_norm(site: AttentionSite) -> AttentionSite:
    """The site with what `add_head_norm_` has changed among its facts."""
    if ROWS_ATTRIBUTE not in vars(site.by_role("query").owner):
        return site
    if site.qk_norm is None:
        return replace(site, qk_norm="rms")
    return replace(site, modifiers=(*site.modifiers, HEAD_NORM))


def find_attention(model: nn.Module, *, strict: bool = True) -> Sites:
    """Every attention of a model, in the order of its modules, with per-head access to Q, K, V and O.

    Named families are described by adapters, others by structure where that leaves one reading. Modules that are
    shared (ALBERT's layers) are listed once.

    Args:
        model: any module; it is not changed.
        strict: raise if some attention was seen whose layout cannot be known; False leaves those out.

    Returns: list of `AttentionSite`, never empty; ``sites["blocks.3"]`` finds one by its module path, or by a part of
        it that only one attention has.

    Raises:
        AttentionNotFoundError: nothing was recognised.
        UnsupportedLayoutError: something was recognised whose layout cannot be known (the first such module).
        WeightError: adapters of PEFT hide where the weights are.

    Example:
        >>> from torch import nn
        >>> [site] = find_attention(nn.MultiheadAttention(8, 2))
        >>> site.q.read().shape
        torch.Size([2, 4, 8])
    """
    try:
        scan = scan_attention(model)
    except WeightError:
        refuse_adapters(model, "this model")
        raise
    if scan.refusals and (strict or not scan.sites):
        refuse_adapters(model, scan.refusals[0].name)
        raise scan.refusals[0]
    if not scan.sites:
        raise AttentionNotFoundError((type(m).__name__ for m in model.modules()), registered_families())
    return Sites(scan.sites)


def refuse_adapters(module: nn.Module, where: str) -> None:
    """Raise WeightError if a module is, or contains, an adapter of PEFT around another layer."""
    if any(type(part).__module__.startswith("peft.") and hasattr(part, "base_layer") for part in module.modules()):
        raise WeightError(
            f"{where} carries an adapter of PEFT, which hides its weights. Initialise, condition and measure the base "
            "model before the adapter is added, or merge the adapter first; see docs/training/peft.md."
        )

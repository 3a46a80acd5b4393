"""Walk a model and describe every attention in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from wellcond.attention.head_norm import with_head_norm
from wellcond.attention.peft_adapters import refuse_adapters
from wellcond.attention.registry import Place, find_adapter, find_base_adapter, registered_families
from wellcond.attention.site import AttentionSite
from wellcond.attention.structure import describe_by_structure
from wellcond.errors import AttentionNotFoundError, UnsupportedLayoutError, WeightError


@dataclass(frozen=True)
class Scan:
    """Everything a walk over a model found, and what it refused to guess."""

    sites: list[AttentionSite]
    refusals: list[UnsupportedLayoutError]


def scan_attention(model: nn.Module) -> Scan:
    """Describe every attention of a model; collect refusals instead of raising them."""
    sites: list[AttentionSite] = []
    refusals: list[UnsupportedLayoutError] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{site.name}.") or site.name == "" for site in sites):
            continue  # a part of an attention that is already described
        place = Place(name, module, model)
        adapter = find_adapter(module)
        try:
            site = adapter(place) if adapter is not None else _with_kind_of_base(place, describe_by_structure(place))
        except UnsupportedLayoutError as refusal:
            refusals.append(refusal)
            continue
        if site is not None:
            sites.append(with_head_norm(site))
    return Scan(sites, refusals)


def _with_kind_of_base(place: Place, site: AttentionSite | None) -> AttentionSite | None:
    """A subclass with a forward of its own that could not be tried is, if anything, of the kind of its base."""
    if site is None or site.evidence != "structure":
        return site
    adapter = find_base_adapter(place.module)
    base = None if adapter is None else adapter(place)
    return site if base is None else replace(site, kind=base.kind, modifiers=base.modifiers, o=site.o or base.o)


def find_attention(model: nn.Module, *, strict: bool = True) -> list[AttentionSite]:
    """Every attention of a model, in the order of its modules, with per-head access to Q, K, V and O.

    Named families are described by adapters, others by structure where that leaves one reading. Modules that are
    shared (ALBERT's layers) are listed once.

    Args:
        model: any module; it is not changed.
        strict: raise if some attention was seen whose layout cannot be known; False leaves those out.

    Returns: list of `AttentionSite`, never empty.

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
    return scan.sites

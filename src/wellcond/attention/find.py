"""Which function describes which attention class, and the walk over a model that describes every attention layer.

An adapter is a function from a `ModuleContext` to an `AttentionSite` (or None: "not one of mine after all"), found by
the dotted name of the module's class. A subclass inherits it only if it keeps the base's `forward`, which says in which
order rows are read. Those of wellcond itself are proven by contract tests, others by `wellcond.attention.structure`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from wellcond.arguments import check_flag, check_model
from wellcond.attention import names
from wellcond.attention.families import Adapter, known_classes, table_of
from wellcond.attention.layout import holds_projections_only
from wellcond.attention.readings import list_readings
from wellcond.attention.sharding import is_distributed
from wellcond.attention.site import AttentionSite, ModuleContext, Sites
from wellcond.attention.slot import stored_parameter
from wellcond.attention.structure import choose_reading, judge_declared
from wellcond.attention.trial import Example
from wellcond.errors import AttentionNotFoundError, LayoutWarning, UnsupportedLayoutError, WeightError
from wellcond.private import is_wrapper_subclass

ADAPTERS: dict[str, Adapter] = {}
"""Registered adapters; they come before those of `wellcond.attention.families`, which contract tests prove."""
EXAMPLES: dict[str, Example] = {}
FACTS_ATTRIBUTE = "_wellcond_site_facts"
"""A module that projects queries may carry a function under this name, from a site to the site with further facts."""


def dotted_name(cls: type) -> str:
    """Full name of a class, e.g. ``timm.layers.attention.Attention``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_adapter(*targets: type | str, example: Example | None = None) -> Callable[[Adapter], Adapter]:
    """Decorate a function that describes the attention classes `targets` (classes, or their dotted names).

    A later registration of the same class replaces the earlier one, so a user can correct us. What the function
    declares is compared with a trial run of the module when a model is searched: another layout than that of the
    forward pass is an error, and one that the trial run can not show a `LayoutWarning`.

    Args:
        *targets: classes, or their dotted names.
        example: from the module to what it is called with (a tensor, a tuple of arguments, a mapping of keyword
            arguments), for the trial run of a forward pass that needs more than random tokens.

    Raises: TypeError if a target is neither a class nor a name.

    Example:
        >>> from torch import nn
        >>> from wellcond.attention.layout import build_site
        >>> class MyAttention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.mix, self.heads = nn.Linear(8, 24), 2
        >>> @register_adapter(MyAttention)
        ... def my_attention(place):
        ...     m = place.module
        ...     return build_site(place, {"qkv": m.mix}, num_heads=m.heads, arrangement="groups")
        >>> from wellcond import find_attention
        >>> find_attention(MyAttention())[0].k.rows[1].tolist()
        [16, 17, 18, 19]
    """
    if not targets:
        raise ValueError("expected at least one class or dotted class name")
    for target in targets:
        if not isinstance(target, (str, type)):
            raise TypeError(f"expected a class or its dotted name, such as 'package.module.Class', got {target!r}")
    if example is not None and not callable(example):
        raise TypeError(f"example: expected a function from the module to what it is called with, got {example!r}")

    def decorate(adapter: Adapter) -> Adapter:
        if not callable(adapter):
            raise TypeError(f"expected a function from a place to an attention site, got {adapter!r}")
        for target in targets:
            name = target if isinstance(target, str) else dotted_name(target)
            ADAPTERS[name] = adapter
            EXAMPLES.pop(name, None)
            if example is not None:
                EXAMPLES[name] = example
        return adapter

    return decorate


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of a module's class, or of the nearest base whose forward it keeps."""
    name = _registered_name(module)
    return None if name is None else _adapter_named(name)


def _adapter_named(name: str) -> Adapter | None:
    return ADAPTERS.get(name) or table_of(name.partition(".")[0]).get(name)


def _registered_name(module: nn.Module) -> str | None:
    cls = type(module)
    for base in cls.__mro__:
        name = dotted_name(base)
        if _adapter_named(name) is not None and getattr(base, "forward", None) is getattr(cls, "forward", None):
            return name
    return None


def find_base_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of the nearest base class, whether or not its forward is kept."""
    adapters = (_adapter_named(dotted_name(base)) for base in type(module).__mro__)
    return next((adapter for adapter in adapters if adapter is not None), None)


def registered_families() -> list[str]:
    """Names of every registered attention class, without the package."""
    return sorted({name.rpartition(".")[2] for name in (*ADAPTERS, *known_classes())})


@dataclass(frozen=True)
class Scan:
    """Every attention layer of a model, and errors about those whose layout is not known."""

    model: nn.Module
    sites: Sites
    refusals: list[UnsupportedLayoutError]

    def found(self, *, strict: bool = True) -> Sites:
        """The sites, never none; `strict` raises for an attention layer whose layout is not known.

        Raises: AttentionNotFoundError, UnsupportedLayoutError, WeightError as `find_attention`.
        """
        if self.refusals and (strict or not self.sites):
            refuse_adapters(self.model, self.refusals[0].name)
            raise self.refusals[0]
        if not self.sites:
            raise AttentionNotFoundError((type(m).__name__ for m in self.model.modules()), registered_families())
        return self.sites


def scan_attention(model: nn.Module) -> Scan:
    """Describe every attention layer of a model; collect errors about layouts instead of raising them."""
    check_model(model)
    sites = Sites()
    refusals: list[UnsupportedLayoutError] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{site.name}.") or site.name == "" for site in sites):
            continue  # a part of an attention that is already described
        place = ModuleContext(name, module, model)
        registered = _registered_name(module)
        found: Sequence[AttentionSite | None]
        try:
            if registered is not None:
                found = [_described(place, registered)]
            else:
                readings = list_readings(place) if _may_be_attention(module) else []
                found = choose_reading(place, readings) if readings else []
        except UnsupportedLayoutError as refusal:
            refusals.append(refusal)
            continue
        except WeightError as error:
            where = f"{name or 'the model itself'} ({place.class_name})"
            refuse_adapters(model, where)  # perhaps of a layer beside it, such as an output projection
            raise WeightError(f"{where}: {error}") from error
        for site in found:
            if site is not None:
                sites.append(_with_added_facts(_with_kind_of_base(place, site)))
    return Scan(model, sites, refusals)


def _may_be_attention(module: nn.Module) -> bool:
    """Whether a module, or a part of it, has a projection by one of the usual names; cheap, for every module."""
    for part in (module, *filter(holds_projections_only, module.children())):
        own = itertools.chain(part.named_children(), part.named_parameters(recurse=False))
        if any(name in names.FIRST for name, _ in own):
            return True
    return False


def _described(place: ModuleContext, registered: str) -> AttentionSite | None:
    """What an adapter says; if it is not one of wellcond's own, as far as a trial run of the module agrees.

    Raises: UnsupportedLayoutError if the forward pass reads other heads than the adapter declares.
    """
    adapter = _adapter_named(registered)
    assert adapter is not None
    site = adapter(place)
    if site is None or registered not in ADAPTERS or registered.startswith("wellcond."):
        return site
    if not isinstance(site, AttentionSite):
        name = getattr(adapter, "__name__", repr(adapter))
        raise TypeError(f"adapter {name} of {registered}: expected an AttentionSite or None, got {site!r}")
    proof = judge_declared(place, site, EXAMPLES.get(registered))
    if proof.holds is False:
        place.refuse(
            proof.reason, f"Correct what the adapter of {place.class_name} declares; see docs/extend/adapter.md."
        )
    if proof.holds:
        return replace(site, evidence="forward", **proof.facts)
    warnings.warn(
        f"{place.name or 'the model itself'} ({place.class_name}): the layout that its adapter declares is not proven: "
        f"{proof.reason}. A wrong one would be silent. If its forward pass needs other arguments than tokens, give "
        f"them: @wellcond.register_adapter({place.class_name}, example=lambda module: (tokens, ...)).",
        LayoutWarning,
        stacklevel=4,
    )
    return replace(site, evidence="declared")


def _with_kind_of_base(place: ModuleContext, site: AttentionSite) -> AttentionSite:
    """A subclass with a forward of its own has what modifies its base, and its kind if it could not be tried."""
    adapter = None if site.evidence == "adapter" else find_base_adapter(place.module)
    base = None if adapter is None or site.stream else adapter(place)
    if base is None:
        return site
    modifiers = tuple(dict.fromkeys((*base.modifiers, *site.modifiers)))
    if site.evidence != "structure":
        return replace(site, modifiers=modifiers)
    return replace(site, kind=base.kind, modifiers=modifiers, o=site.o or base.o)


def _with_added_facts(site: AttentionSite) -> AttentionSite:
    """The site with what was changed afterwards in the module that projects its queries (`FACTS_ATTRIBUTE`)."""
    added: Callable[[AttentionSite], AttentionSite] | None = vars(site.by_role("query").owner).get(FACTS_ATTRIBUTE)
    return site if added is None else added(site)


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
        WeightError: adapters of PEFT hide where the weights are, or they are quantised.
        TypeError: something that is no module.

    Example:
        >>> from torch import nn
        >>> [site] = find_attention(nn.MultiheadAttention(8, 2))
        >>> site.q.read().shape
        torch.Size([2, 4, 8])
    """
    check_flag("strict", strict)
    return scan_attention(model).found(strict=strict)


def refuse_adapters(module: nn.Module, where: str) -> None:
    """Raise WeightError if a module is, or contains, an adapter of PEFT around another layer."""
    if any(type(part).__module__.startswith("peft.") and hasattr(part, "base_layer") for part in module.modules()):
        raise WeightError(
            f"{where} carries an adapter of PEFT, which hides its weights. Initialise, condition and measure the base "
            "model before the adapter is added, or merge the adapter first; see docs/training/peft.md."
        )


def check_readable(sites: Iterable[AttentionSite]) -> None:
    """Refuse weights that are no plain numbers: of a quantised layer, or behind an adapter of PEFT.

    Raises: WeightError with the layer, its class, and what to do.
    """
    for site in sites:
        for role, slot in site.slots.items():
            where = f"{site.name or 'the model itself'} ({role}, {type(slot.owner).__name__})"
            refuse_adapters(slot.owner, where)
            packed = packed_as(stored_parameter(slot.owner, slot.weight_name))
            if packed is not None:
                raise WeightError(
                    f"{where} stores its weight as {packed} (quantised, parametrised or pruned?): expected floating "
                    "point numbers. Use the model before that, or undo it (dequantize, remove_parametrizations, "
                    "prune.remove)."
                )


def packed_as(stored: Tensor | None) -> str | None:
    """How a weight is stored that is no plain floating point parameter; None for one that is."""
    if stored is None:
        return "no parameter"
    if not stored.dtype.is_floating_point:
        return str(stored.dtype)
    if is_wrapper_subclass(stored) and not is_distributed(stored):
        return type(stored).__name__
    return None

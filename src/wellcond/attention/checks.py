"""What must hold before the projections of a model are rewritten, and how a failure is undone: for every verb."""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import check_choice, check_model, describe
from wellcond.attention.find import Scan, packed_as, refuse_adapters, scan_attention
from wellcond.attention.sharding import reshard_, to_local
from wellcond.attention.site import AttentionSite, closest_paths, path_matches
from wellcond.attention.slot import Slot
from wellcond.errors import ConditioningError, SiteNotFoundError, WeightError

LOGGER = logging.getLogger("wellcond")

Chosen = Sequence[AttentionSite | str] | AttentionSite | str
"""What `sites=` takes: sites, or patterns of their paths such as ``"blocks.*"``."""


def choose_sites(model: nn.Module, sites: Chosen | None, *, scan: Scan | None = None) -> list[AttentionSite]:
    """The sites asked for, or all of the model's; with a `scan` of the model it is not searched again.

    A text is a path (all attention layers in or under it) or a pattern of paths, in which ``*`` stands for anything.

    Raises: ValueError, TypeError, SiteNotFoundError, UnsupportedLayoutError.
    """
    check_model(model)
    if sites is None:
        return (scan or scan_attention(model)).found()
    entries = _as_list(sites)
    if scan is None and any(isinstance(entry, str) for entry in entries):
        scan = scan_attention(model)
    wanted: list[AttentionSite] = []
    for entry in entries:
        if isinstance(entry, AttentionSite):
            wanted.append(entry)
        elif isinstance(entry, str) and scan is not None:
            wanted += _matching(entry, scan)
        else:
            raise TypeError(f"sites: expected sites or patterns of paths in the list, found {describe(entry)}")
    return _named_in(model, wanted)


def _as_list(sites: object) -> list[object]:
    if isinstance(sites, (str, AttentionSite)):
        return [sites]
    if not isinstance(sites, Iterable) or isinstance(sites, (Tensor, nn.Module)):
        raise TypeError(f"sites: expected sites of find_attention(model) or a pattern of paths, got {describe(sites)}")
    return list(sites)


def _named_in(model: nn.Module, sites: list[AttentionSite]) -> list[AttentionSite]:
    """Each site once, in the order and under the name of this model, whatever part of it they were found in."""
    if not sites:
        raise ValueError("expected at least one attention site, got an empty list")
    paths = {id(module): (number, name) for number, (name, module) in enumerate(model.named_modules())}
    chosen = {}
    for site in sites:
        if id(site.module) not in paths:
            raise ValueError(f"site {site.name!r} is not a part of this model; call find_attention on this model")
        number, name = paths[id(site.module)]
        chosen[number, site.stream] = replace(site, name=".".join(part for part in (name, site.stream) if part))
    return [chosen[key] for key in sorted(chosen)]


def _matching(pattern: str, scan: Scan) -> list[AttentionSite]:
    refused = next((refusal for refusal in scan.refusals if path_matches(pattern, refusal.name)), None)
    if refused is not None:
        raise refused
    found = [site for site in scan.sites if path_matches(pattern, site.name)]
    if not found:
        names = [site.name for site in scan.sites]
        raise SiteNotFoundError(pattern, names, several=False, close=closest_paths(pattern, names))
    return found


def choose_projections(projections: str) -> str:
    """Validate a subset of q, k, v given as letters; returned in that order.

    Raises: UnknownChoiceError for another letter, ValueError for none or twice the same.
    """
    if not isinstance(projections, str) or not projections or len(set(projections)) != len(projections):
        raise ValueError(f"projections: expected a subset of 'qkv' such as 'qk', got {projections!r}")
    for letter in projections:
        check_choice("projection", letter, ("q", "k", "v"))
    return "".join(letter for letter in "qkv" if letter in projections)


def check_writable(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    projections: Iterable[str],
    verb: str,
    *,
    conditioned_too: bool = False,
) -> None:
    """Refuse parameters that must not, or cannot, be rewritten; conditioned ones unless `conditioned_too`.

    Raises: WeightError (on the meta device, quantised, frozen, tied to something that is not rewritten),
        ConditioningError.
    """
    chosen = [(site, role, site.slots[role]) for site in sites for role in projections if role in site.slots]
    for site, role, slot in chosen:
        where = f"{site.name or 'the model itself'} ({role})"
        refuse_adapters(slot.owner, where)
        parameter = slot.parameter
        if slot.is_corrected and not conditioned_too:
            raise ConditioningError(f"{where} is already conditioned; call wellcond.fold_(model) before {verb}")
        if parameter.device.type == "meta":
            raise WeightError(
                f"{where} is on the meta device and has no values yet. Call {verb} after the model is materialised: "
                "model.to_empty(device=...), then the model's own initialisation or load_state_dict, then this."
            )
        packed = packed_as(parameter)
        if packed is not None:
            raise WeightError(
                f"{where} of a {type(slot.owner).__name__} is stored as {packed} (quantised?): expected floating point "
                f"weights. Call {verb} before quantisation."
            )
        if not parameter.requires_grad:
            raise WeightError(
                f"{where} is frozen (requires_grad=False), so {verb} does not change it. "
                "Unfreeze it first, or leave the site out with sites=..."
            )
    _check_tied(model, chosen, verb)
    _check_memory(model, chosen, verb)


def _check_tied(model: nn.Module, chosen: list[tuple[AttentionSite, str, Slot]], verb: str) -> None:
    """A weight shared by two modules may only be rewritten if every holder is, and in the same way."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    names_per_module = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    uses: dict[int, dict[tuple[int, str], dict[str, Slot]]] = {}
    for _site, role, slot in chosen:
        place = (id(slot.owner), slot.weight_name)
        uses.setdefault(id(slot.parameter), {}).setdefault(place, {})[role] = slot
    for site, role, slot in chosen:
        key = id(slot.parameter)
        # A module that appears twice in the model (shared layers) is one holder.
        num_holders = len(holders.get(key, [])) - names_per_module.get(id(slot.owner), 1) + 1
        places = list(uses[key].values())
        alike = all(
            place.keys() == places[0].keys() and all(torch.equal(place[r].rows, places[0][r].rows) for r in place)
            for place in places
        )
        if num_holders > len(places) or not alike:
            raise WeightError(
                f"{site.name} ({role}) is tied: the same parameter is used as {', '.join(holders.get(key, []))}. "
                f"{verb} would change all of them; untie it first, or leave the site out with sites=..."
            )


def _check_memory(model: nn.Module, chosen: list[tuple[AttentionSite, str, Slot]], verb: str) -> None:
    """Two parameters that are views of the same numbers are tied without anybody knowing."""
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        stored = to_local(parameter)
        if stored.device.type != "meta" and stored.numel():
            first = int(stored.storage_offset())
            last = first + sum(int((size - 1) * step) for size, step in zip(stored.shape, stored.stride(), strict=True))
            storage = stored.untyped_storage().data_ptr()
            spans.setdefault(storage, []).append((first, last, name, parameter))
    rewritten = {id(slot.parameter): (site, role) for site, role, slot in chosen}
    for parts in spans.values():
        reach = None  # the part that reaches furthest so far
        for part in sorted(parts, key=lambda part: part[:2]):
            if reach is not None and part[0] <= reach[1]:
                for own, other in ((reach, part), (part, reach)):
                    if id(own[3]) in rewritten:
                        site, role = rewritten[id(own[3])]
                        raise WeightError(
                            f"{site.name} ({role}) shares memory with {other[2]}: {verb} would change both; give each "
                            "its own copy first, or leave the site out with sites=..."
                        )
            reach = part if reach is None or part[1] > reach[1] else reach


def check_finite(sites: Iterable[AttentionSite], projections: Iterable[str]) -> None:
    """Refuse weights with NaN or infinity.

    Raises: WeightError naming the first.
    """
    for site in sites:
        for role in projections:
            bad = ~torch.isfinite(site.slots[role].read_raw()).flatten(1).all(1)
            if bool(bad.any()):
                heads = bad.nonzero().flatten().tolist()
                raise WeightError(
                    f"{site.name or 'the model itself'} ({role}): NaN or infinite weights in heads {heads}; "
                    "expected finite weights. Nothing was changed."
                )


class Rollback:
    """Remembers every module of a model, to put it back if something fails.

    Remembered are classes, attributes, and the contents of the dictionaries and sets among the attributes: parameters,
    buffers, children, hooks. Numbers are remembered of those tensors only that are given to `keep`, which everybody
    does before writing. A model that FSDP2 manages must hold its shards when this is made (`reshard_`).

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> rollback = Rollback(layer)
        >>> try:
        ...     layer.register_buffer("extra", torch.zeros(1))
        ...     1 / 0
        ... except ZeroDivisionError:
        ...     rollback.restore()
        >>> list(layer.state_dict())
        ['weight', 'bias']
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [(module, type(module), dict(vars(module)), _contents(module)) for module in model.modules()]
        self.numbers: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Remember the numbers of a tensor; returns them, of a sharded tensor those of this rank."""
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = tensor, to_local(tensor).detach().clone()
        return self.numbers[id(tensor)][1]

    def restore(self) -> None:
        """Make the model what it was."""
        reshard_(self.model)  # a forward that failed may have left whole weights in place
        for module, cls, attributes, contents in self.modules:
            if type(module) is not cls:
                module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)
        self.restore_numbers()

    @torch.no_grad()
    def restore_numbers(self) -> None:
        """Give every tensor of `keep` the numbers that it had."""
        for tensor, numbers in self.numbers.values():
            to_local(tensor).copy_(numbers)


def _contents(module: nn.Module) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(module).items() if type(value) in (dict, OrderedDict, set)}


def log_change(what: str, num_layers: int, weights: Sequence[Tensor], *, num_heads: int | None = None) -> None:
    """Log one line (logger ``wellcond``, level INFO) that says what a verb did to a model."""
    numbers = sum(weight.numel() for weight in weights)
    heads = "" if num_heads is None else f"{num_heads} heads of "
    layers = f"{num_layers} attention layer{'' if num_layers == 1 else 's'}"
    LOGGER.info("%s: %s%s, %d weights with %s numbers", what, heads, layers, len(weights), f"{numbers:,}")

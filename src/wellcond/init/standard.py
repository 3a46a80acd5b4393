"""The family's own initialisation, run again, for the attention only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import nn

from wellcond.attention.site import AttentionSite, Slot
from wellcond.errors import check_choice
from wellcond.init.plan import HeadWrite, InitContext, ParameterWrite, Write, register_init

Rule = Literal["family", "torch"]


@register_init("default")
def default(context: InitContext, *, rule: Rule = "family", output: bool = True) -> Iterator[Write]:
    """Plan Q, K, V (and W_O) as the model's own initialisation would draw them, biases included.

    Args:
        context: the model and its sites.
        rule: ``family``, what the model's constructor does (timm, Hugging Face, torch.nn); ``torch``, what a bare
            nn.Linear does, uniform within 1/sqrt(in_features), which timm's ``weight_init="skip"`` amounts to.
        output: include W_O.
    """
    check_choice("rule", rule, get_args(Rule))
    # The model's own code draws from the global generator: give it a fork, seeded from ours.
    seed = int(torch.randint(2**62, (), generator=context.generator, device=_device(context.generator)))
    replica = copy.deepcopy(context.model)
    with torch.random.fork_rng(devices=_cuda_devices(replica)), torch.no_grad():
        torch.manual_seed(seed)
        if rule == "family":
            run_family_initialisation(replica)
        else:
            for owner in _owners(context, replica, output):
                _reset(owner)
    counterparts = dict(zip(context.model.modules(), replica.modules(), strict=True))
    for site in context.sites:
        for role, slot in site.slots.items():
            if role != "o" or output:
                yield from _copy_slot(site, role, slot, counterparts)


def run_family_initialisation(model: nn.Module) -> None:
    """Re-run a model's own weight initialisation in place.

    timm and Hugging Face models keep theirs in `init_weights` or `_init_weights`; others are reset module by module.
    """
    per_module = getattr(model, "_init_weights", None)
    whole = getattr(model, "init_weights", None)
    if hasattr(model, "config") and callable(per_module):  # Hugging Face
        _clear_initialised_flags(model)
        model.apply(per_module)
        return
    for module in model.modules():
        _reset(module)
    if callable(whole):
        whole()
    elif callable(per_module):
        model.apply(per_module)


def _clear_initialised_flags(model: nn.Module) -> None:
    """Hugging Face marks modules and parameters it has initialised, and skips them."""
    for marked in (*model.modules(), *model.parameters()):
        if getattr(marked, "_is_hf_initialized", False):
            marked._is_hf_initialized = False  # type: ignore[attr-defined, union-attr]


def _reset(module: nn.Module) -> None:
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None) or getattr(
        module, "_reset_parameters", None
    )
    if callable(reset):
        reset()


def _owners(context: InitContext, replica: nn.Module, output: bool) -> list[nn.Module]:
    counterparts = dict(zip(context.model.modules(), replica.modules(), strict=True))
    owners = {
        counterparts[slot.owner]: None
        for site in context.sites
        for role, slot in site.slots.items()
        if role != "o" or output
    }
    return list(owners)


def _copy_slot(site: AttentionSite, role: str, slot: Slot, counterparts: dict[nn.Module, nn.Module]) -> Iterator[Write]:
    fresh = counterparts[slot.owner]._parameters[slot.weight_name]
    assert fresh is not None
    yield HeadWrite(f"{site.name} ({role})", slot, slot.take_heads(fresh.detach()))
    if slot.bias_name is not None:
        owner = slot.bias_owner or slot.owner
        bias = owner._parameters.get(slot.bias_name)
        fresh_bias = counterparts[owner]._parameters.get(slot.bias_name)
        if bias is not None and fresh_bias is not None:
            yield ParameterWrite(f"{site.name} ({role} bias)", bias, fresh_bias.detach())


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})

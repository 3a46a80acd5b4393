"""The family's own initialisation, run again, for the attention only."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from wellcond.attention.layout import is_conv1d
from wellcond.attention.plain_copy import plain_copy
from wellcond.attention.site import AttentionSite, Slot
from wellcond.init.plan import HeadWrite, InitContext, ParameterWrite, Write, register_init

Rule = Literal["family", "torch"]
FUNCTION_NAMES = ("_init_weights", "init_weight_vit")


@register_init("default")
def default(context: InitContext, *, rule: Rule = "family", output: bool = True) -> Iterator[Write]:
    """Plan Q, K, V (and W_O) as the model's own initialisation would draw them, biases included.

    Args:
        context: the model and its sites.
        rule: ``family``, what the model's constructor does (timm, Hugging Face, torch.nn); ``torch``, what a bare
            nn.Linear does, uniform within 1/sqrt(in_features), which timm's ``weight_init="skip"`` amounts to.
        output: include W_O.
    """
    if rule == "torch":
        yield from _as_bare_linears(context, output)
        return
    # The model's own code draws from the global generator: give it a fork, seeded from ours.
    seed = int(torch.randint(2**62, (), generator=context.generator, device=_device(context.generator)))
    replica = plain_copy(context.model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Not torch.manual_seed, which seeds the generators of all devices; the copy is on the CPU.
        torch.default_generator.manual_seed(seed)
        run_family_initialisation(replica)
    counterparts = dict(zip(context.model.modules(), replica.modules(), strict=True))
    for site in context.sites:
        for role, slot in site.slots.items():
            if role != "o" or output:
                yield from _copy_slot(site, role, slot, counterparts)


def _as_bare_linears(context: InitContext, output: bool) -> Iterator[Write]:
    """Weights and biases uniform within 1/sqrt(in_features), whatever module stores them."""

    def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
        drawn = torch.rand(shape, generator=context.generator, device=_device(context.generator))
        return (2 * drawn - 1) * bound

    for site in context.sites:
        for role, slot in site.slots.items():
            if role == "o" and not output:
                continue
            bound = slot.in_features**-0.5
            yield HeadWrite(f"{site.name} ({role})", slot, uniform(tuple(slot.read_raw().shape), bound))
            bias = slot.read_bias()
            if bias is not None:
                yield HeadWrite(f"{site.name} ({role} bias)", slot, uniform(tuple(bias.shape), bound), to_bias=True)


def run_family_initialisation(model: nn.Module) -> None:
    """Re-run a model's own weight initialisation in place.

    First what the constructors of its parts do (`reset_parameters`), then what the model as a whole does: the method
    `init_weights` or `_init_weights`, or the function of that name in its source file (timm, Hugging Face). A model
    without any is searched for parts that have one, so that a wrapper does not hide its backbone's. They run with
    their default arguments: what was passed to the constructor (`weight_init="jax"`) is not known any more.
    """
    for module in reversed(list(model.modules())):  # parts before wholes, as constructors run
        _reset(module)
    _run_own(model)


def _run_own(model: nn.Module) -> None:
    whole, per_module = getattr(model, "init_weights", None), getattr(model, "_init_weights", None)
    if hasattr(model, "config") and callable(per_module):  # Hugging Face
        _clear_initialised_flags(model)
        model.apply(per_module)
    elif callable(whole):
        whole()
    elif callable(per_module) or (per_module := _function_beside(type(model))) is not None:
        for name, module in reversed(list(model.named_modules())):
            _call(per_module, module, name)
        if callable(fix_depth := getattr(model, "fix_init_weight", None)):
            fix_depth()
    else:
        for child in model.children():
            _run_own(child)


def _function_beside(cls: type) -> Callable[..., None] | None:
    """Timm keeps some initialisations as functions in the file of the model."""
    if not cls.__module__.startswith("timm.models."):
        return None
    file = vars(sys.modules[cls.__module__])
    return next((file[name] for name in FUNCTION_NAMES if callable(file.get(name))), None)


def _call(initialise: Callable[..., None], module: nn.Module, name: str) -> None:
    """Some take the module, some its name as well."""
    if "name" in inspect.signature(initialise).parameters:
        initialise(module, name=name)
    else:
        initialise(module)


def _clear_initialised_flags(model: nn.Module) -> None:
    """Hugging Face marks modules and parameters it has initialised, and skips them."""
    for marked in (*model.modules(), *model.parameters()):
        if getattr(marked, "_is_hf_initialized", False):
            marked._is_hf_initialized = False  # type: ignore[attr-defined, union-attr]


def _reset(module: nn.Module) -> None:
    if is_conv1d(module):  # it has no method of its own for what its constructor does
        nn.init.normal_(module.weight, std=0.02)  # type: ignore[arg-type]
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()


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

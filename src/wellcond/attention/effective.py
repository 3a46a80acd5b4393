"""The seam between finding attention and conditioning it: which weight a forward pass uses.

`wellcond.conditioning` attaches corrections to modules; everybody who reads or writes projections asks here, and needs
to know nothing about how that is done.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wellcond.attention.sharding import full_tensor, unwrap

CORRECTIONS_ATTRIBUTE = "_wellcond_corrections"
PLAIN_CLASS_ATTRIBUTE = "_wellcond_plain_class"
SCOPE_ATTRIBUTE = "_wellcond_scope"
SETTINGS_ATTRIBUTE = "_wellcond_settings"


class InstanceOverride:
    """Stands in one module in place of a method of its class, for as long as something in it is conditioned."""

    replaced: Any
    """What the module itself had there before; None for the method of its class."""


def corrections_of(module: nn.Module) -> dict[str, Any]:
    """Corrections attached to a module, by parameter name (`wellcond.conditioning.corrections`)."""
    return vars(module).get(CORRECTIONS_ATTRIBUTE, {})


def is_conditioned(model: nn.Module) -> bool:
    """Whether some weight of a model carries a correction."""
    return any(CORRECTIONS_ATTRIBUTE in vars(module) for module in model.modules())


def conditioning_of(model: nn.Module) -> dict[str, Any] | None:
    """Method and settings with which a model was conditioned; None for a plain model.

    Of a model of PEFT or a LightningModule, ask the model inside, which `condition_` was given.
    """
    return vars(unwrap(model)).get(SETTINGS_ATTRIBUTE)


def effective_weight(module: nn.Module, name: str) -> Tensor:
    """The weight that a forward pass of `module` uses as `name`, whole: W + C of a conditioned one, else W itself.

    Weights that are sharded over several ranks are gathered: every rank must call this.
    """
    correction, raw = corrections_of(module).get(name), module._parameters.get(name)
    if correction is None or raw is None:
        return full_tensor(getattr(module, name))
    return correction.effective(module, full_tensor(raw))


def remove_conditioning(module: nn.Module) -> None:
    """Make one module what it was before it, or something in it, was conditioned; no parameter is touched."""
    for name, value in list(vars(module).items()):
        value = getattr(value, "__func__", value)  # bound by Accelerate
        if isinstance(value, InstanceOverride):
            del vars(module)[name]
            if value.replaced is not None:
                vars(module)[name] = value.replaced
    if corrections_of(module):
        del vars(module)[CORRECTIONS_ATTRIBUTE], vars(module)[SCOPE_ATTRIBUTE]
        module.__class__ = class_without_conditioning(type(module))


def class_without_conditioning(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it was conditioned."""
    if PLAIN_CLASS_ATTRIBUTE in vars(cls):
        return vars(cls)[PLAIN_CLASS_ATTRIBUTE]
    if not hasattr(cls, PLAIN_CLASS_ATTRIBUTE):
        return cls
    # FSDP2 has put a class of its own in front of the conditioned one.
    return type(cls.__name__, tuple(class_without_conditioning(base) for base in cls.__bases__), dict(vars(cls)))

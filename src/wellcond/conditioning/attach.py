"""How a correction is put between a stored parameter and the forward pass that reads it.

The parameter stays where it is, under its own name, in `module._parameters`: optimisers, state dicts, DDP, `.to()` and
`functional_call` see the plain, raw weight. The module's class is replaced by a subclass whose attribute of that name
is a property that returns the effective weight, so every forward, whoever wrote it, reads W + C. (This is torch's
parametrisation with the parameter left in place, so that neither keys nor parameter names change.)

    attach(m, "weight", c);  detach(m, "weight")   =>   type(m), m._parameters and m.__dict__ are as before
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.shards import is_distributed, like, local_part
from wellcond.attention.site import CORRECTIONS_ATTRIBUTE
from wellcond.conditioning.corrections import Correction
from wellcond.conditioning.peft_guard import refuse_lost_writes
from wellcond.errors import ConditioningError


def corrections_of(module: nn.Module) -> dict[str, Correction]:
    """Corrections attached to a module, by parameter name."""
    return module.__dict__.get(CORRECTIONS_ATTRIBUTE, {})


def attach(module: nn.Module, name: str, correction: Correction) -> None:
    """Make `module.name` read as the effective weight."""
    corrections = corrections_of(module)
    base = _plain_class(module)
    if not corrections:
        _give_number(module)
    module.__dict__[CORRECTIONS_ATTRIBUTE] = {**corrections, name: correction}
    module.__class__ = conditioned_class(base, tuple(sorted(module.__dict__[CORRECTIONS_ATTRIBUTE])))


def detach(module: nn.Module, name: str) -> Correction:
    """Undo `attach`; the stored parameter is not touched."""
    remaining = dict(corrections_of(module))
    correction = remaining.pop(name)
    base = _plain_class(module)
    if remaining:
        module.__dict__[CORRECTIONS_ATTRIBUTE] = remaining
        module.__class__ = conditioned_class(base, tuple(sorted(remaining)))
    else:
        del module.__dict__[CORRECTIONS_ATTRIBUTE], module.__dict__[NUMBER_ATTRIBUTE]
        module.__class__ = base
    return correction


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "_wellcond_plain_class", type(module))


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def conditioned_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` whose attributes `names` are effective weights; made once."""
    if (base, names) not in _CLASSES:
        _CLASSES[base, names] = _make_class(base, names)
    return _CLASSES[base, names]


def _make_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:

    def effective_weight(name: str) -> property:
        def read(module: nn.Module) -> Tensor | None:
            raw = module._parameters[name]
            if raw is None:
                return None
            if is_distributed(raw):
                if torch.compiler.is_compiling():
                    number = module.__dict__[NUMBER_ATTRIBUTE]
                    return like(raw, torch.ops.wellcond.effective_part(local_part(raw), number, name))
                if is_sharded_by_fsdp(module, name):
                    return raw
            return module.__dict__[CORRECTIONS_ATTRIBUTE][name].effective(module, raw)

        def refuse_write(module: nn.Module, value: Any) -> None:
            # Parameters never come here: `nn.Module.__setattr__` registers them.
            raise ConditioningError(
                f"a tensor was to be put in the place of a conditioned {name}, as nn.DataParallel and FSDP1 do; use "
                "DistributedDataParallel (torchrun) or FSDP2 (fully_shard), or call wellcond.fold_(model) first"
            )

        return property(read, refuse_write)

    def reduce(module: nn.Module, protocol: Any) -> Any:
        # A class made at run time cannot be found by name: copies and pickles rebuild it.
        return rebuild, (base, names), module.__dict__

    def set_state(module: nn.Module, state: dict[str, Any]) -> None:
        base.__setstate__(module, state)  # type: ignore[operator]
        _give_number(module)  # a copy is a module of its own

    def refuse_reset(module: nn.Module) -> None:
        # It would write into an effective weight, which is computed anew at every reading: a silent no-op.
        raise ConditioningError("this weight is conditioned; call wellcond.fold_(model) before initialising it again")

    members: dict[str, Any] = {name: effective_weight(name) for name in names}
    members |= {name: refuse_reset for name in ("reset_parameters", "_reset_parameters") if hasattr(base, name)}
    members["base_layer"] = property(refuse_lost_writes)
    extra = {
        "_wellcond_plain_class": base,
        "__reduce_ex__": reduce,
        "__setstate__": set_state,
        "__module__": base.__module__,
    }
    return type(f"Conditioned{base.__name__}", (base,), {**members, **extra})


def is_sharded_by_fsdp(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 holds this parameter in shards just now.

    Then no forward pass can be reading it, since FSDP puts the whole weight in its place for that: it is FSDP's own
    book-keeping, which wants the parameter itself.
    """
    # FSDP2 offers no public way from a parameter to its state.
    from torch.distributed._composable_state import _module_state_mapping

    for held in list(_module_state_mapping.values()):
        state = held() if isinstance(held, weakref.ref) else held
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (p for group in groups if group is not None for p in group.fsdp_params):
            places = [(param._module_info.module, param._module_info.param_name)]
            places += zip(param._module_info.shared_modules, param._module_info.shared_param_names, strict=True)
            if any(owner is module and own == name for owner, own in places):
                return param.sharded_state.name == "SHARDED"
    return False


# A compiled graph cannot hold a module, but it can call an opaque operator, which finds it by number.
NUMBER_ATTRIBUTE = "_wellcond_number"
_MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def _give_number(module: nn.Module) -> None:
    module.__dict__[NUMBER_ATTRIBUTE] = next(_NUMBERS)
    _MODULES[module.__dict__[NUMBER_ATTRIBUTE]] = module


@torch.library.custom_op("wellcond::effective_part", mutates_args=())
def effective_part(part: Tensor, number: int, name: str) -> Tensor:
    """This process's part of the effective weight `name` of module `number`, inside a compiled graph."""
    module = _MODULES[number]
    raw = like(module._parameters[name], part)  # type: ignore[arg-type]
    return local_part(corrections_of(module)[name].effective(module, raw))


@effective_part.register_fake
def _(part: Tensor, number: int, name: str) -> Tensor:
    return torch.empty_like(part)


def _pass_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None  # C has no gradient


effective_part.register_autograd(_pass_gradient)


def rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty instance of `conditioned_class(base, names)`, for copy and pickle."""
    cls = conditioned_class(base, names)
    return cls.__new__(cls)

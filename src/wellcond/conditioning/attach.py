"""How corrections are put between stored parameters and the forward passes that read them.

The parameter stays where it is, under its own name, in `module._parameters`: optimisers, state dicts, DDP, `.to()` and
`functional_call` see the plain, raw weight, and so does everybody who asks for `module.weight`, except a forward pass.
The class of a module that owns a conditioned weight is replaced by a subclass whose attribute of that name is a
property: the parameter itself, or, while a forward is running, W + C. Every module around it, up to the model, gets a
`forward` of its own that tells when it is running.

    attach(model, [(m, "weight", c)], []);  detach(model)   =>   classes, m._parameters and m.__dict__ are as before
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from wellcond.attention.effective import (
    CORRECTIONS_ATTRIBUTE,
    PLACE_ATTRIBUTE,
    PLAIN_CLASS_ATTRIBUTE,
    Announced,
    corrections_of,
    remove_conditioning,
)
from wellcond.attention.sharding import is_distributed
from wellcond.conditioning.corrections import FOLD_FIRST, AbstractCorrection
from wellcond.conditioning.effective_state import resume_in_trainer, save_pretrained
from wellcond.conditioning.forward_pass import ForwardPass, Place
from wellcond.conditioning.guards import refuse_merging, refuse_reparametrisation, reparametrised
from wellcond.conditioning.tracing import recorded_weight
from wellcond.errors import ConditioningError

Attachment = tuple[nn.Module, str, AbstractCorrection]


class AnnouncedForward(Announced):
    """The forward of a module around conditioned weights: the module's own, as a part of a pass."""

    def __init__(self, module: nn.Module, place: Place) -> None:
        """In place of `module.forward`, which may be one that another library has put there."""
        self.module, self.place, self.replaced = module, place, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        if args and args[0] is self.module:  # Accelerate takes every forward for a function, and binds it
            args = args[1:]
        with self.place.forward_pass.running(self.place, self.module):
            if self.replaced is not None:
                return self.replaced(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward; Trainer chooses the columns of its data by it."""
        return inspect.signature(self.replaced or MethodType(type(self.module).forward, self.module))

    @property
    def __code__(self) -> CodeType:
        """That of the module's own forward; torch.export names it in its messages."""
        return type(self.module).forward.__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """None: torch.jit.script asks for them to compile the module's own source, which knows no correction."""
        raise AttributeError(f"a conditioned model cannot be scripted: {FOLD_FIRST}")


class AnnouncedSaving(Announced):
    """`save_pretrained` of a conditioned model of transformers: effective weights, so that any plain model can load."""

    def __init__(self, model: nn.Module) -> None:
        """In place of `model.save_pretrained`."""
        resume_in_trainer()
        self.model, self.replaced = model, vars(model).get("save_pretrained")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        return save_pretrained(self.model, *args, **kwargs)


def attach(model: nn.Module, attachments: Iterable[Attachment], readers: Iterable[nn.Module]) -> None:
    """Let forward passes of `model` read effective weights.

    Args:
        model: what was conditioned as a whole.
        attachments: modules that own weights, the names of these, and their corrections.
        readers: other modules whose forward uses these weights.
    """
    attachments = list(attachments)
    reading = {id(module) for module in readers}
    owners = {id(module) for module, _, _ in attachments}
    below = _owners_below(model, owners)
    for module, name, correction in attachments:
        vars(module)[CORRECTIONS_ATTRIBUTE] = {**corrections_of(module), name: correction}
    forward_pass = ForwardPass()
    for module in [module for module in model.modules() if below[id(module)]]:
        reads = id(module) in owners or id(module) in reading
        place = Place(forward_pass, has_all=below[id(module)] == owners, reads=reads)
        vars(module)["forward"] = AnnouncedForward(module, place)
        if hasattr(module, "save_pretrained"):
            vars(module)["save_pretrained"] = AnnouncedSaving(module)
        if id(module) in owners:
            vars(module)[PLACE_ATTRIBUTE] = place
            module.__class__ = conditioned_class(type(module), tuple(sorted(corrections_of(module))))


def _owners_below(model: nn.Module, owners: set[int]) -> dict[int, set[int]]:
    """For every module, which of the owners it is or contains."""
    below: dict[int, set[int]] = {}

    def visit(module: nn.Module) -> set[int]:
        if id(module) not in below:
            below[id(module)] = owners & {id(module)}
            below[id(module)] = below[id(module)].union(*(visit(child) for child in module.children()))
        return below[id(module)]

    visit(model)
    return below


def readers_in(model: nn.Module) -> list[nn.Module]:
    """The readers that `attach` was given."""
    forwards = [(module, vars(module).get("forward")) for module in model.modules()]
    return [module for module, forward in forwards if isinstance(forward, AnnouncedForward) and forward.place.reads]


def detach(model: nn.Module) -> None:
    """Undo every `attach` in a model; the stored parameters are not touched."""
    for module in model.modules():
        remove_conditioning(module)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def conditioned_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` whose attributes `names` are effective weights in a forward pass; made once."""
    if (base, names) not in _CLASSES:
        _CLASSES[base, names] = _make_class(base, names)
    return _CLASSES[base, names]


def _make_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:

    def weight(name: str) -> property:
        def read(module: nn.Module) -> Tensor | Proxy | None:
            if (recorded := recorded_weight(module, name)) is not None:
                return recorded
            raw = module._parameters[name]
            forward_pass: ForwardPass = vars(module)[PLACE_ATTRIBUTE].forward_pass
            if not forward_pass.is_running():
                refuse_reparametrisation(name)
                return raw
            if raw is None or (is_distributed(raw) and is_sharded_by_fsdp(module, name)):
                return raw
            return forward_pass.effective(module, name)

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

    def refuse_removal(module: nn.Module, name: str) -> None:
        if name in names:
            raise reparametrised(name)
        base.__delattr__(module, name)

    members: dict[str, Any] = {name: weight(name) for name in names}
    extra = {
        PLAIN_CLASS_ATTRIBUTE: base,
        "base_layer": property(refuse_merging),
        "__delattr__": refuse_removal,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
    }
    return type(f"Conditioned{base.__name__}", (base,), {**members, **extra})


def is_sharded_by_fsdp(module: nn.Module, name: str) -> bool:
    """Whether FSDP2 holds this parameter in shards just now.

    Then no forward pass can be reading it, since FSDP puts the whole weight in its place for that: it is FSDP's own
    book-keeping, which wants the parameter itself.
    """
    if torch.compiler.is_compiling():
        return False
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


def rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty instance of `conditioned_class(base, names)`, for copy and pickle."""
    cls = conditioned_class(base, names)
    return cls.__new__(cls)

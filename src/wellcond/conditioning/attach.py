"""How corrections are put between stored parameters and the forward passes that read them.

The parameter stays where it is, under its own name, in `module._parameters`: optimisers, state dicts, DDP, `.to()` and
`functional_call` see the plain, raw weight, and so does everybody who asks for `module.weight`, except a forward pass.
So whatever writes to a weight (an optimiser, `nn.init`, `load_state_dict`, somebody's `.data.copy_`) writes to the
parameter, and there is no copy that could get lost or go out of date.

The class of a module that owns a conditioned weight is replaced by a subclass whose attribute of that name is a
property: the parameter itself, or, while a forward is running, W + C. Who reads as a part of a forward pass are the
modules that use the weights: their owners, the attention layers, and the blocks around these, since
nn.TransformerEncoderLayer reads the weights of its attention. Every module around a conditioned weight, up to the
model, gets a `forward` of its own that opens a scope; the scope forgets everything when that forward returns.

Within a pass, all weights of one kind are corrected as one batch, when the first of them is read: a model of twelve
layers costs as many operations as one of one layer. The batch belongs to the smallest module that contains all
conditioned weights and is running (a ViT, not the training step around it), so that weights which change between two
calls of the model are never older than the call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_module_registration_hook

from wellcond.attention.sharding import is_distributed
from wellcond.attention.slot import (
    CORRECTIONS_ATTRIBUTE,
    PLAIN_CLASS_ATTRIBUTE,
    SCOPE_ATTRIBUTE,
    SETTINGS_ATTRIBUTE,
    InstanceOverride,
    corrections_of,
    is_conditioned,
    remove_conditioning,
    settings_of,
)
from wellcond.conditioning.checkpoint import MARKER, check_incoming, resume_in_trainer, save_pretrained
from wellcond.conditioning.corrections import FOLD_FIRST, StoredCorrection, straight_through
from wellcond.errors import ConditioningError
from wellcond.private import in_backward, is_sharded_by_fsdp, is_symbolic_tracing

Attachment = tuple[nn.Module, str, StoredCorrection]
HOOK_ATTRIBUTE = "_wellcond_load_hook"


@dataclass
class Frame:
    """A forward that is running, and the effective weights that were computed in it.

    Beside each of these are the weight and its version, which tell that it is of this weight.
    """

    forward: ScopedForward
    computed: dict[tuple[nn.Module, str], tuple[Tensor, int | None, Tensor]] = field(default_factory=dict)
    entered: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Weights whose correction has prepared for this pass."""
    has_batch: bool = False


class ForwardPass:
    """The forward passes of one conditioned model that are running, in each thread."""

    def __init__(self) -> None:
        self.traced: list[Frame] = []
        self.local = threading.local()

    def __reduce__(self) -> tuple[type[ForwardPass], tuple[()]]:
        return ForwardPass, ()

    def frames(self) -> list[Frame]:
        """The running forwards, outermost first: of this thread, or of the graph that is being traced."""
        if torch.compiler.is_compiling():
            return self.traced
        if not hasattr(self.local, "frames"):
            self.local.frames = []
        return self.local.frames

    def is_running(self) -> bool:
        """Whether a weight that is read now is read by a forward pass, or by the repetition of one in a backward.

        Activation checkpointing of a function that is no module repeats it in the backward pass with gradients enabled.
        Gradient hooks run there with gradients disabled, and read the parameter; with `create_graph=True` the two
        cannot be told apart, and a hook reads W + C as well.
        """
        if torch.compiler.is_compiling():
            return True
        # Between two graphs of one forward, what was traced tells what is running.
        running = any(frame.forward.reads for frames in (self.frames(), self.traced) for frame in frames)
        return running or (torch.is_grad_enabled() and in_backward())

    @contextlib.contextmanager
    def running(self, forward: ScopedForward) -> Iterator[None]:
        """The forward of a module is running."""
        if torch.compiler.is_exporting():  # what may be exported has nothing to compute in batches
            yield
            return
        frames = self.frames()
        frames.append(Frame(forward))
        try:
            yield
        finally:
            frames.pop()

    def effective(self, module: nn.Module, name: str) -> Tensor:
        """W + C of the weight `name` of `module`."""
        raw = module._parameters[name]
        assert raw is not None
        correction: Any = corrections_of(module)[name]
        if is_distributed(raw) or not correction.is_batched:
            self._enter(module, name, raw)
            return correction.effective(module, raw)
        frames = self.frames()
        value = _find(frames, module, name, raw)
        if value is None:
            value = _compute(frames, module, name, raw)
        return straight_through(raw, value)

    def _enter(self, module: nn.Module, name: str, raw: Tensor) -> None:
        """Let the correction prepare for this pass, once, however often the forward of the module reads the weight."""
        entered = self.frames()[-1].entered if self.frames() else []
        if not any(one is module and other == name for one, other in entered):
            entered.append((module, name))
            corrections_of(module)[name].before_pass(module, raw)  # type: ignore[attr-defined]


def _find(frames: list[Frame], module: nn.Module, name: str, raw: Tensor) -> Tensor | None:
    for frame in reversed(frames):
        known, version, value = frame.computed.get((module, name), (None, None, None))
        if known is raw and version == _version(raw):
            return value
    return None


def _compute(frames: list[Frame], module: nn.Module, name: str, raw: Tensor) -> Tensor:
    smallest = next((frame for frame in reversed(frames) if frame.forward.has_all), None)
    if smallest is not None and not smallest.has_batch:
        smallest.has_batch = True
        _compute_all(smallest)
        value = _find([smallest], module, name, raw)
        if value is not None:
            return value
    correction: Any = corrections_of(module)[name]
    value = correction.values([raw])[0]
    if frames:
        frames[-1].computed[module, name] = raw, _version(raw), value
    return value


def _compute_all(frame: Frame) -> None:
    kinds: dict[tuple[object, ...], list[tuple[nn.Module, str, Tensor, Any]]] = {}
    correction: Any
    for module in frame.forward.module.modules():
        for name, correction in corrections_of(module).items():
            raw = module._parameters[name]
            if correction.is_batched and raw is not None and not is_distributed(raw):
                kinds.setdefault(correction.kind(raw), []).append((module, name, raw, correction))
    for members in kinds.values():
        values = members[0][3].values([weight for _, _, weight, _ in members])
        for (module, name, weight, _), value in zip(members, values, strict=True):
            frame.computed[module, name] = weight, _version(weight), value


def _version(raw: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or raw.is_inference() else raw._version


class ScopedForward(InstanceOverride):
    """The forward of a module around conditioned weights: the module's own, as a part of a forward pass."""

    def __init__(self, module: nn.Module, forward_pass: ForwardPass, *, has_all: bool, reads: bool) -> None:
        """In place of `module.forward`, which may be one that another library has put there."""
        self.module = module
        self.forward_pass = forward_pass
        self.has_all = has_all
        """Whether all conditioned weights of the model are below this module."""
        self.reads = reads
        """Whether its forward uses conditioned weights itself."""
        self.replaced = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        if args and args[0] is self.module:  # Accelerate takes every forward for a function, and binds it
            args = args[1:]
        with self.forward_pass.running(self):
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


class EffectiveSave(InstanceOverride):
    """`save_pretrained` of a conditioned model of transformers: effective weights, so that any plain model can load."""

    def __init__(self, model: nn.Module) -> None:
        resume_in_trainer()
        self.model, self.replaced = model, vars(model).get("save_pretrained")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        return save_pretrained(self.model, *args, **kwargs)


def make_marker(settings: Mapping[str, Any]) -> Tensor:
    """The value of the marker: characters as floating point numbers, which survive averages over state dicts (EMA)."""
    return torch.tensor(list(json.dumps(settings, sort_keys=True).encode()), dtype=torch.float32)


def attach(
    model: nn.Module,
    attachments: Iterable[Attachment],
    readers: Iterable[nn.Module],
    settings: dict[str, Any],
    marker: Tensor | None = None,
) -> None:
    """Let forward passes of `model` read effective weights, and checkpoints say that its weights are raw.

    `readers` are other modules whose forward uses these weights; `settings` say how it was conditioned, and so does the
    buffer `marker` in a checkpoint, which is made if there was none.
    """
    attachments = list(attachments)
    reading = {id(module) for module in readers}
    owners = {id(module) for module, _, _ in attachments}
    below = {id(module): owners & {id(part) for part in module.modules()} for module in model.modules()}
    for module, name, correction in attachments:
        vars(module)[CORRECTIONS_ATTRIBUTE] = {**corrections_of(module), name: correction}
    forward_pass = ForwardPass()
    for module in [module for module in model.modules() if below[id(module)]]:
        reads = id(module) in owners or id(module) in reading
        has_all = below[id(module)] == owners
        vars(module)["forward"] = ScopedForward(module, forward_pass, has_all=has_all, reads=reads)
        if hasattr(module, "save_pretrained"):
            vars(module)["save_pretrained"] = EffectiveSave(module)
        if id(module) in owners:
            vars(module)[SCOPE_ATTRIBUTE] = forward_pass
            module.__class__ = conditioned_class(type(module), tuple(sorted(corrections_of(module))))
    model.register_buffer(MARKER, make_marker(settings) if marker is None else marker)
    # The buffer is for checkpoints; somebody may spoil its value, so the settings here are what counts.
    vars(model)[SETTINGS_ATTRIBUTE] = settings
    vars(model)[HOOK_ATTRIBUTE] = model.register_load_state_dict_pre_hook(check_incoming)


def readers_in(model: nn.Module) -> list[nn.Module]:
    """The readers that `attach` was given."""
    forwards = [(module, vars(module).get("forward")) for module in model.modules()]
    return [module for module, forward in forwards if isinstance(forward, ScopedForward) and forward.reads]


def detach(model: nn.Module) -> None:
    """Undo every `attach` in a model; the stored parameters are not touched."""
    for module in model.modules():
        if settings_of(module) is not None:
            del module._buffers[MARKER], vars(module)[SETTINGS_ATTRIBUTE]
            vars(module).pop(HOOK_ATTRIBUTE).remove()
        remove_conditioning(module)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def conditioned_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` whose attributes `names` are effective weights in a forward pass; always the same one."""
    if (base, names) not in _CLASSES:
        _CLASSES[base, names] = _make_class(base, names)
    return _CLASSES[base, names]


def _make_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    _refuse_adapters()

    def reduce(module: nn.Module, protocol: Any) -> Any:
        # A class made at run time cannot be found by name: copies and pickles rebuild it.
        return rebuild, (base, names), module.__dict__

    def refuse_removal(module: nn.Module, name: str) -> None:
        if name in names:
            raise _reparametrised(name)
        base.__delattr__(module, name)

    members: dict[str, Any] = {name: _weight_property(name) for name in names}
    extra = {
        PLAIN_CLASS_ATTRIBUTE: base,
        "parametrizations": property(lambda module: _Parametrizations(names)),
        "__delattr__": refuse_removal,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
    }
    return type(f"Conditioned{base.__name__}", (base,), {**members, **extra})


def rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty instance of `conditioned_class(base, names)`, for copy and pickle."""
    cls = conditioned_class(base, names)
    return cls.__new__(cls)


def _weight_property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | Proxy | None:
        recorded = recorded_weight(module, name)
        if recorded is not None:
            return recorded
        if name not in module._parameters:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        raw = module._parameters[name]
        forward_pass: ForwardPass = vars(module)[SCOPE_ATTRIBUTE]
        if raw is None or not forward_pass.is_running():
            return raw
        if is_distributed(raw) and not torch.compiler.is_compiling() and is_sharded_by_fsdp(module, name):
            return raw
        return forward_pass.effective(module, name)

    def refuse_write(module: nn.Module, value: Any) -> None:
        # Parameters never come here: `nn.Module.__setattr__` registers them.
        raise ConditioningError(
            f"{name} is conditioned and must stay a parameter of its module, and a tensor was to be put in its place. "
            "Instead of nn.DataParallel and FSDP1, use DistributedDataParallel (torchrun) or FSDP2 (fully_shard). "
            "Before pruning and torch.nn.utils.weight_norm call wellcond.fold_(model); weight_norm has taken the "
            "parameter away by now, so build the model again."
        )

    return property(read, refuse_write)


# What other libraries must not do to a conditioned weight is refused where they ask for it.


class _Parametrizations(nn.ModuleDict):
    """What torch's `register_parametrization` finds on a conditioned layer: the weight is computed already."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__({name: nn.Identity() for name in names})

    def __getitem__(self, key: str) -> nn.Module:
        raise _reparametrised(key)


def _reparametrised(name: str) -> ConditioningError:
    return ConditioningError(
        f"{name} is conditioned and must stay a parameter of its module, so weight_norm, spectral_norm and other "
        "parametrisations cannot be put on it; nothing was changed. Call wellcond.fold_(model) first, or leave the "
        "attention out with sites=..."
    )


@functools.cache
def _refuse_adapters() -> None:
    """From now on, PEFT cannot put an adapter around a conditioned layer."""

    def refuse(module: nn.Module, name: str, child: nn.Module | None) -> None:
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is None or child is None or not isinstance(module, tuners.BaseTunerLayer):
            return
        if is_conditioned(child):
            raise ConditioningError(
                f"PEFT's {type(module).__name__} was to be put around a conditioned {type(child).__name__}: what the "
                "adapter merges would change the correction too. Call wellcond.fold_(model) first: the adapter freezes "
                "the weight, so that its correction is constant and training is the same."
            )

    register_module_module_registration_hook(refuse)


# What torch.fx records where a module that it traces reads a conditioned weight. Symbolic tracing runs a forward once,
# with stand-ins (proxies) for its tensors. A tensor that is computed meanwhile is stored in the graph as a constant: an
# effective weight would be frozen there, and the weight that it was computed from would get no gradient. So the read
# itself is recorded, and the graph computes W + C of the present weight whenever it runs:
#
#     blocks_0_attn_qkv = self.blocks.0.attn.qkv
#     corrected_weight  = corrected_weight(blocks_0_attn_qkv, 'weight')


def corrected_weight(module: nn.Module, name: str) -> Tensor | Proxy:
    """W + C for the parameter W = `name` of `module`; W itself once the model was folded."""
    recorded = recorded_weight(module, name)  # a graph is traced again when it is unpickled
    if recorded is not None:
        return recorded
    raw, correction = module._parameters[name], corrections_of(module).get(name)
    assert raw is not None
    if correction is None:
        return raw
    correction.before_pass(module, raw)
    return correction.effective(module, raw)


def recorded_weight(module: nn.Module, name: str) -> Proxy | None:
    """The node of the effective weight in the graph that torch.fx is recording; None if it is not recording.

    Raises: ConditioningError if the graph cannot refer to the module, and would keep the weight as a constant.
    """
    # make_fx and torch.export record operators on tensors: nothing is lost to them here.
    if torch.compiler.is_compiling() or not is_symbolic_tracing() or get_proxy_mode() is not None:
        return None
    raw = nn.Module.__getattr__(module, name)  # which a tracer of torch.fx answers with a proxy
    if not isinstance(raw, Proxy) or module is raw.tracer.root:  # type: ignore[attr-defined]
        raise ConditioningError(
            f"torch.fx is tracing a forward that reads the conditioned {name} of a {type(module).__name__}. Its graph "
            "can refer to modules inside of the traced one only, and would keep the weight as a constant without "
            "gradient. Trace a module that contains this one, or call wellcond.fold_(model) first, or trace inside "
            "`with wellcond.folded(model):`"
        )
    return raw.tracer.create_proxy("call_function", corrected_weight, (module, name), {})

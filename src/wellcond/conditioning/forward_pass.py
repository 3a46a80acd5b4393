"""Only a forward pass reads effective weights; everybody else reads the parameters as they are stored.

So whatever writes to a weight (an optimiser, `nn.init`, `load_state_dict`, somebody's `.data.copy_`) writes to the
parameter, and there is no copy that could get lost or go out of date. Who reads as a part of a forward pass are the
modules that use the weights: their owners, the attentions, and the blocks around these (nn.TransformerEncoderLayer
reads the weights of its attention). A pass begins when the forward of a module with conditioned weights below it is
called, and forgets everything when that forward returns.

Within a pass, all weights of one kind are corrected as one batch, when the first of them is read: a model of twelve
layers costs as many operations as one of one layer. The batch belongs to the smallest module that contains all
conditioned weights and is running (a ViT, not the training step around it), so that weights which change between two
calls of the model are never older than the call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wellcond.attention.effective import corrections_of
from wellcond.attention.sharding import is_distributed
from wellcond.conditioning.corrections import SpectralCorrection, is_exporting, straight_through


@dataclass(frozen=True)
class Place:
    """A module around conditioned weights."""

    forward_pass: ForwardPass
    has_all: bool
    """Whether all conditioned weights of the model are below this module."""
    reads: bool
    """Whether its forward uses conditioned weights itself."""


@dataclass
class Computed:
    """W + C of one weight, with what tells that it is of this weight."""

    raw: Tensor
    version: int | None
    value: Tensor


@dataclass
class Frame:
    """A forward that is running: its module, and the effective weights that were computed in it."""

    place: Place
    module: nn.Module
    computed: dict[tuple[nn.Module, str], Computed] = field(default_factory=dict)
    has_batch: bool = False


class ForwardPass:
    """The forward passes of one conditioned model that are running, in each thread."""

    def __init__(self) -> None:
        """Nothing is running."""
        self.traced: list[Frame] = []
        self.local = threading.local()

    def __reduce__(self) -> tuple[type[ForwardPass], tuple[()]]:
        """Copies and pickles have nothing running."""
        return ForwardPass, ()

    def frames(self) -> list[Frame]:
        """The running forwards, outermost first: of this thread, or of the graph that is being traced."""
        if torch.compiler.is_compiling():
            return self.traced
        if not hasattr(self.local, "frames"):
            self.local.frames = []
        return self.local.frames

    def is_running(self) -> bool:
        """Whether a weight that is read now is read by a forward pass, or by the repetition of one in a backward."""
        if torch.compiler.is_compiling():
            return True
        # Between two graphs of one forward, what was traced tells what is running.
        running = any(frame.place.reads for frames in (self.frames(), self.traced) for frame in frames)
        return running or torch._C._current_graph_task_id() != -1

    @contextlib.contextmanager
    def running(self, place: Place, module: nn.Module) -> Iterator[None]:
        """The forward of `module` is running."""
        if is_exporting():  # what may be exported has nothing to compute in batches
            yield
            return
        frames = self.frames()
        frames.append(Frame(place, module))
        try:
            yield
        finally:
            frames.pop()

    def effective(self, module: nn.Module, name: str) -> Tensor:
        """W + C of the weight `name` of `module`."""
        raw = module._parameters[name]
        assert raw is not None
        correction = corrections_of(module)[name]
        if is_distributed(raw) or not isinstance(correction, SpectralCorrection):
            return correction.effective(module, raw)
        frames = self.frames()
        value = _find(frames, module, name, raw)
        if value is None:
            value = _compute(frames, module, name, raw)
        return straight_through(raw, value)


def _find(frames: list[Frame], module: nn.Module, name: str, raw: Tensor) -> Tensor | None:
    for frame in reversed(frames):
        entry = frame.computed.get((module, name))
        if entry is not None and entry.raw is raw and entry.version == _version(raw):
            return entry.value
    return None


def _compute(frames: list[Frame], module: nn.Module, name: str, raw: Tensor) -> Tensor:
    smallest = next((frame for frame in reversed(frames) if frame.place.has_all), None)
    if smallest is not None and not smallest.has_batch:
        smallest.has_batch = True
        _compute_all(smallest)
        value = _find([smallest], module, name, raw)
        if value is not None:
            return value
    value = corrections_of(module)[name].value(module, raw)
    if frames:
        frames[-1].computed[module, name] = Computed(raw, _version(raw), value)
    return value


def _compute_all(frame: Frame) -> None:
    """All weights whose correction can be computed in batches and that are whole now."""
    kinds: dict[tuple[object, ...], list[tuple[nn.Module, str, Tensor, SpectralCorrection]]] = {}
    for module in frame.module.modules():
        for name, correction in corrections_of(module).items():
            raw = module._parameters[name]
            if isinstance(correction, SpectralCorrection) and raw is not None and not is_distributed(raw):
                kinds.setdefault(correction.kind(raw), []).append((module, name, raw, correction))
    for members in kinds.values():
        values = members[0][3].values([weight for _, _, weight, _ in members])
        for (module, name, weight, _), value in zip(members, values, strict=True):
            frame.computed[module, name] = Computed(weight, _version(weight), value)


def _version(raw: Tensor) -> int | None:
    """How often a tensor was written to, as far as torch knows."""
    return None if torch.compiler.is_compiling() or raw.is_inference() else raw._version

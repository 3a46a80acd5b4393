"""torchtitan: what `--override.imports` can name, so that its trainer initialises, conditions, watches and clips.

    --override.imports 'wellcond.integrations.torchtitan.clip={"tau": 100}' wellcond.integrations.torchtitan.monitor

torchtitan lets one override replace one node of its configuration. `init`, `condition` and `clip` all replace the
optimisers' node, where the sharded and initialised model is given; several of them together are `prepare`. `monitor`
replaces the metrics' node. Tried with torchtitan 0.3.0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.sharding import is_distributed
from wellcond.attention.site import AttentionSite
from wellcond.conditioning.apply import condition_
from wellcond.errors import OptionError
from wellcond.init.apply import init_, takes_batch
from wellcond.training.clip import QKClip
from wellcond.training.monitor import AttentionMonitor

try:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.attention import FlexAttention
except ImportError as missing:
    raise ImportError(
        f"this needs torchtitan 0.3, which cannot be imported: {missing}. Run: pip install torchtitan, in an "
        "environment of its own (it pins datasets below the version that wellcond's laboratory uses)"
    ) from missing

Settings = Mapping[str, Any]


class PreparedOptimizers(OptimizersContainer):
    """torchtitan's optimisers, of whose model attention is initialised, conditioned and clipped."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's own fields, and what `prepare` was given."""

        init: dict[str, Any] | None = None
        condition: dict[str, Any] | None = None
        clip: dict[str, Any] | None = None

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Initialise and condition the parts of the model, then build the optimisers and clip beside them."""
        for part in model_parts:
            if config.init is not None:
                init_(part, **config.init)
            if config.condition is not None:
                condition_(part, **config.condition)
        super().__init__(config, model_parts=model_parts)
        self.clips = [clip_beside(part, self, config.clip) for part in model_parts if config.clip is not None]


def clip_beside(part: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> QKClip:
    """QK-Clip of a part of a model, fed by its kernels, flex attention included."""
    group = data_group(part)
    logits = Logits(part, group)
    clip = QKClip(part, optimizer, monitor=logits, process_group=group, **settings)
    optimizer.register_step_post_hook(lambda *_: logits.clear())  # after the clip's own hook
    return clip


def data_group(part: nn.Module) -> Any:
    """The processes that hold shards of this part; None for all, or where there is one process.

    Raises: OptionError for a mesh of several dimensions that is not everybody, as of pipeline stages with HSDP.
    """
    sharded: Any = next(filter(is_distributed, part.parameters()), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == torch.distributed.get_world_size():
        return None
    raise OptionError(
        f"expected a part of the model on all processes or on a mesh of one dimension, found {mesh}: which processes "
        "see other batches of it cannot be told. Leave the clip and the monitor out, or use one pipeline stage"
    )


class Logits:
    """The largest logits of torchtitan's layers since the last step: of compiled flex attention by its log-sum-exp.

    A compiled kernel shows no operators. torchtitan's flex attention hands its log-sum-exp to a function, if it is
    given one; that function only looks at it. Every other kernel is read by an `AttentionMonitor`.
    """

    def __init__(self, part: nn.Module, group: Any = None) -> None:
        self.monitor = AttentionMonitor(part, every=1, columns=["max_logit"], weights=False, group=group)
        self.largest: dict[str, Tensor] = {}
        for site in self.monitor.sites:
            for module in site.module.modules():
                if isinstance(module, FlexAttention):
                    module.register_forward_pre_hook(partial(self._ask, site), with_kwargs=True)

    def max_logits(self, *, reduce: bool = True) -> dict[str, Tensor]:
        """By name of the layer: exact, or an upper bound; NaN where nothing was seen."""
        return self.monitor.max_logits(reduce=reduce) | self.largest

    def clear(self) -> None:
        """Begin a new step."""
        self.largest.clear()
        self.monitor.discard()

    def _ask(self, site: AttentionSite, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        then = kwargs.get("out_transform")

        def look(out: Tensor, lse: Tensor) -> Tensor:
            seen = lse.detach().float()
            if seen.shape[-1] == site.num_heads:  # (samples, tokens, heads)
                seen = seen.amax((0, 1))
                known = self.largest.get(site.name, seen)
                self.largest[site.name] = torch.maximum(known, seen)
            return out if then is None else then(out, lse)

        return args, kwargs | {"out_transform": look}


class WatchedMetrics(MetricsProcessor):
    """torchtitan's metrics, with those of every attention layer beside them."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's own fields, and what `monitor` was given."""

        monitor: dict[str, Any] = dataclasses.field(default_factory=dict)

    watch: Watch | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """The trainer hands over the model after the optimisers: then the watching begins."""
        super().__setattr__(name, value)
        if name == "model_parts" and value is not None:
            self.watch = Watch(value, self.optimizers, **self.config.monitor)

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Log what torchtitan logs, and the last reading of every layer."""
        seen = {} if self.watch is None else self.watch.metrics()
        super().log(*args, extra_metrics={**(extra_metrics or {}), **seen}, **kwargs)

    def close(self) -> None:
        """Close torchtitan's logger, and remove the hooks."""
        if self.watch is not None:
            self.watch.close()
        super().close()


class Watch:
    """A monitor of each part of a model, which steps with the optimisers."""

    def __init__(self, model_parts: list[nn.Module], optimizers: torch.optim.Optimizer, **settings: Any) -> None:
        self.monitors = [AttentionMonitor(part, group=data_group(part), **settings) for part in model_parts]
        for monitor in self.monitors:
            optimizers.register_step_post_hook(lambda *_, one=monitor: one.step())

    def metrics(self) -> dict[str, float]:
        """The last reading: of each layer the largest logit of its heads, and the mean of every other column."""
        found: dict[str, float] = {}
        for monitor in self.monitors:
            series = monitor.series
            for at, column in enumerate(series.columns if series.steps else ()):
                numbers = torch.from_numpy(series.readings(len(series.steps) - 1)[0, :, at].copy())
                for name, part in series.parts:
                    value = float(numbers[part].max() if column == "max_logit" else numbers[part].nanmean())
                    if not math.isnan(value):
                        found[f"attention/{name}/{column}"] = value
        return found

    def close(self) -> None:
        """Read what is on its way, and remove the hooks."""
        for monitor in self.monitors:
            monitor.close()


def prepare(
    config: OptimizersContainer.Config,
    init: Settings | str | None = None,
    condition: Settings | str | None = None,
    clip: Settings | float | None = None,
) -> PreparedOptimizers.Config:
    """Initialise, condition and clip: any of them, each by its name or number, or by its settings.

    Args:
        config: of torchtitan's optimisers.
        init: method of `init_`, or ``{"method": ..., **options}``; a checkpoint that is loaded later replaces it.
        condition: method of `condition_`, or ``{"method": ..., **options}``.
        clip: tau of `QKClip`, or ``{"tau": ..., **options}``.

    Raises: OptionError for optimisers of another class, or an initialisation that needs a batch.
    """
    if type(config) is not OptimizersContainer.Config:
        raise OptionError(
            f"expected torchtitan's OptimizersContainer.Config, found {type(config).__qualname__}: another override "
            "has replaced it. Call wellcond.init_, condition_ and QKClip where that builds its optimisers"
        )
    given: dict[str, Any] = {
        "init": {"method": init} if isinstance(init, str) else init,
        "condition": {"method": condition} if isinstance(condition, str) else condition,
        "clip": {"tau": clip} if isinstance(clip, (int, float)) else clip,
    }
    method = (given["init"] or {}).get("method", "gaussian")
    if takes_batch(method):
        raise OptionError(
            f"init={method!r} needs a batch, which torchtitan has not loaded when its model is initialised: use "
            "'gaussian', or call wellcond.init_ yourself"
        )
    return derive(config, PreparedOptimizers.Config, **{key: dict(v) for key, v in given.items() if v is not None})


prepare = override(target=OptimizersContainer.Config, description="wellcond: initialise, condition, clip")(prepare)


@override(target=OptimizersContainer.Config, description="wellcond: initialise attention")
def init(config: OptimizersContainer.Config, method: str = "gaussian", **options: Any) -> PreparedOptimizers.Config:
    """Initialise attention projections with `init_`, after torchtitan's own initialisation and sharding."""
    return prepare(config, init={"method": method, **options})


@override(target=OptimizersContainer.Config, description="wellcond: condition attention")
def condition(
    config: OptimizersContainer.Config, method: str = "balanced", **options: Any
) -> PreparedOptimizers.Config:
    """Correct attention projections in every forward pass with `condition_`."""
    return prepare(config, condition={"method": method, **options})


@override(target=OptimizersContainer.Config, description="wellcond: QK-Clip")
def clip(config: OptimizersContainer.Config, tau: float = 100.0, **options: Any) -> PreparedOptimizers.Config:
    """Clip queries and keys of heads whose largest logit passes tau, with `QKClip`."""
    return prepare(config, clip={"tau": tau, **options})


@override(target=MetricsProcessor.Config, description="wellcond: watch every head")
def monitor(config: MetricsProcessor.Config, every: int = 50, **options: Any) -> WatchedMetrics.Config:
    """Read every head with `AttentionMonitor` and log it beside torchtitan's metrics, as ``attention/LAYER/COLUMN``."""
    if type(config) is not MetricsProcessor.Config:
        raise OptionError(
            f"expected torchtitan's MetricsProcessor.Config, found {type(config).__qualname__}: another override has "
            "replaced it"
        )
    return derive(config, WatchedMetrics.Config, monitor={"every": every, **options})

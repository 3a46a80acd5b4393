"""Lightning: a callback that prepares the module, measures it, and keeps its checkpoints plain.

Trainer(callbacks=[WellcondCallback(init="calibrated", batch=images, network="model")])
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.attention.sharding import is_sharded, reshard_, unwrap
from wellcond.attention.slot import is_conditioned
from wellcond.conditioning.apply import folded
from wellcond.conditioning.checkpoint import save_weights, split_state
from wellcond.errors import needs_extra
from wellcond.integrations.beside import Beside
from wellcond.integrations.common import (
    Choice,
    Measuring,
    apply_choices,
    check_choices,
    check_conditioning,
    conditionings,
    first_samples,
    on_device,
    without_batch,
    without_labels,
)

try:
    import lightning.pytorch as pl
except ImportError:
    with needs_extra("lightning", "lightning", "pytorch_lightning"):
        import pytorch_lightning as pl  # type: ignore[no-redef]

KEY = "wellcond"  # our entry in a checkpoint
PREPARED = "_wellcond_prepared"


class WellcondCallback(Measuring, pl.Callback):
    """Initialises and conditions the attention of a LightningModule, measures it while it trains, and logs.

    `fit` prepares the network once, before the optimiser is made and before ``ckpt_path`` is loaded. Checkpoints hold
    effective weights: `load_from_checkpoint` gives a plain module that computes the same. The raw weights are stored
    beside them, and ``fit(ckpt_path=...)`` with this callback resumes from these. (Where a strategy shards the module,
    checkpoints hold the raw weights only; use `export`.) Summaries go to every logger of the trainer, and each head at
    each step is a line of ``wellcond.jsonl`` in the log folder. Measuring does not change the training.

    Args:
        init: a method of `init_`, or ``{"method": ..., **options}``; ``calibrated`` needs `batch`. Leave it out for
            weights that were loaded.
        condition: a method of `condition_`, or ``{"method": ..., **options}``.
        network: name of the attribute with the network, such as ``"model"``; the LightningModule itself by default,
            which then needs a `forward` to be measured.
        batch: what the network is called with to calibrate and to measure it, kept for the whole run. For measuring
            alone it is by default the first samples of the training data, of which the first part if they are a
            sequence, all but labels if they are a dictionary.
        measure: False not to measure.
        monitor: True, or options of `AttentionMonitor`: every head is read from the passes that the training makes,
            into ``monitor.jsonl`` of the log folder and all loggers.
        clip: `tau` of `QKClip`, or its options: the largest logit that is left alone. Automatic optimisation only.
        alarms: True for alarms in the log, or what `Alarms` sends them to; needs `monitor`.
        per_layer: summaries of each layer as well as of the network.
        export: file named ``.safetensors`` to which the effective weights of the network are written at the end.
        **options: of `ConditionTracker`: `every`, `weights_every`, `budget`, `samples`, `heads`, ...

    Raises:
        UnknownChoiceError, ValueError: a method or an option that does not exist, or a value that makes no sense.
        CheckpointMismatchError: when training resumes from a checkpoint of another conditioning.
    """

    def __init__(
        self,
        *,
        init: Choice | None = None,
        condition: Choice | None = None,
        network: str = "",
        batch: Any = None,
        measure: bool = True,
        monitor: bool | Mapping[str, Any] = False,
        clip: float | Mapping[str, Any] | None = None,
        alarms: Any = False,
        per_layer: bool = False,
        export: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch, per_layer, options, measure=measure)
        check_choices(init, condition, batch)
        if not isinstance(network, str):
            raise ValueError(f"network: expected the name of a part of the module, got {network!r:.80}")
        if export is not None and (not isinstance(export, (str, os.PathLike)) or Path(export).suffix != ".safetensors"):
            raise ValueError(f"export: expected a file named *.safetensors, got {str(export)!r}")
        self.init, self.condition, self.network = init, condition, network
        self.measure, self.export = measure, export
        self.beside = Beside(monitor, clip, alarms)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare the network, once, and let its checkpoints hold effective weights."""
        if stage != "fit" or (self.init is None and self.condition is None):
            return
        network, choices = self._network(pl_module), (without_batch(self.init), self.condition)
        prepared = unwrap(network).__dict__  # of the network, which may be another one than in an earlier fit
        former = prepared.get(PREPARED)
        if former is not None and former != choices:
            raise ValueError(
                f"this module was prepared with init={former[0]!r}, condition={former[1]!r} by an earlier fit, and is "
                f"now asked for init={choices[0]!r}, condition={choices[1]!r}; leave them out to train it as it is, "
                "or build the module again"
            )
        if former is not None and self.condition is not None and not is_conditioned(network):
            raise ValueError(
                "this module was conditioned by an earlier fit and folded since; leave init and condition out to train "
                "it as it is, or call wellcond.condition_ on it to train with a correction of the folded weights"
            )
        if former is None:
            apply_choices(network, self.init, self.condition, self.batch)
            prepared[PREPARED] = choices
            # Instance attributes, because Lightning asks the module, not callbacks, before weights are loaded, and
            # only the module where weights alone are saved.
            for hook, ours in (("on_save_checkpoint", _save_effective), ("on_load_checkpoint", _load_raw)):
                pl_module.__dict__[hook] = functools.partial(ours, pl_module)

    def _network(self, pl_module: nn.Module) -> nn.Module:
        try:
            return pl_module.get_submodule(self.network)
        except AttributeError as error:
            parts = ", ".join(repr(name) for name, _ in pl_module.named_children()) or "none"
            raise ValueError(f"network: expected a part of the module ({parts}), got {self.network!r}") from error

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure step 0, or resume at the step of a checkpoint."""
        network, folder = self._network(pl_module), Path(trainer.log_dir or trainer.default_root_dir)
        folder_of_rank = folder if trainer.is_global_zero else None
        self._watched_step = trainer.global_step
        self.beside.begin(network, list(trainer.optimizers), folder_of_rank, trainer.global_step)
        if not self.measure:
            return
        self.begin(network, lambda: self._probe(trainer, pl_module), folder_of_rank, trainer.global_step)
        self._log(trainer)

    def _probe(self, trainer: Any, pl_module: Any) -> Any:
        if self.batch is not None:
            return on_device(self.batch, pl_module.device)
        loader = trainer.train_dataloader
        if loader is None or not hasattr(loader, "collate_fn"):
            raise ValueError(
                f"batch: expected one to measure with, since the training data are {type(loader).__name__}; give "
                "batch=..., what the network is called with"
            )
        found = first_samples(loader, self.options.get("samples", 1))
        if isinstance(found, Mapping):
            found = without_labels(found)
        elif isinstance(found, Sequence):
            found = found[0]
        return on_device(found, pl_module.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure what is due after a step of the optimiser."""
        if trainer.global_step != self._watched_step:
            self._watched_step = trainer.global_step
            self.beside.step()
            self._log_heads(trainer)
        if self.tracker is None or trainer.global_step == self.tracker.num_steps:
            return  # gradients are still being accumulated
        # Lightning counts the steps of all optimisers; numbers, log and resuming go by its count.
        self.tracker.num_steps = trainer.global_step - 1
        self.measure_step()
        if trainer.global_step % trainer.log_every_n_steps == 0 or self.logs_when_measured:
            self._log(trainer)

    def _log_heads(self, trainer: Any) -> None:
        for step, numbers in self.beside.new_numbers():
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)

    def _log(self, trainer: Any) -> None:
        numbers = self.new_summary()
        if numbers:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the last step, and log what is left."""
        self.beside.end()
        self._log_heads(trainer)
        if self.tracker is not None:
            self.measure_last()
            self._log(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Export: now, because callbacks that average weights put the average in place when training ends."""
        if self.export is not None and (trainer.is_global_zero or is_sharded(pl_module)):
            export(pl_module, self.export, network=self.network)

    def state_dict(self) -> dict[str, Any]:
        """The latest numbers of every head, so that summaries after resuming are of all heads."""
        latest = self.restored if self.tracker is None else self.latest
        return {"latest": [[layer, head, numbers] for (layer, head), numbers in latest.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.restored = {(layer, head): numbers for layer, head, numbers in state_dict["latest"]}


def export(pl_module: nn.Module, path: str | os.PathLike[str], *, network: str = "") -> None:
    """Write the effective weights of a network as safetensors, under its own names; it is not changed.

    If the model is sharded, every rank must call this, and rank 0 writes.

    Raises: WeightError if the file cannot be written there.
    """
    part = unwrap(pl_module.get_submodule(network))
    reshard_(part)
    if not is_conditioned(part):
        save_weights(part, Path(path), overwrite=True)
        return
    with folded(pl_module):
        save_weights(part, Path(path), overwrite=True)


def _save_effective(pl_module: Any, checkpoint: dict[str, Any]) -> None:
    type(pl_module).on_save_checkpoint(pl_module, checkpoint)
    if is_sharded(pl_module):
        return  # a strategy that shards loads weights before it asks anybody: they must be those to resume from
    if is_conditioned(pl_module):
        effective, resume = split_state(pl_module, checkpoint["state_dict"])
        checkpoint["state_dict"] = effective
        checkpoint[KEY] = {"conditioning": conditionings(pl_module), "resume": resume}


def _load_raw(pl_module: Any, checkpoint: dict[str, Any]) -> None:
    saved = checkpoint.get(KEY)  # None: written without this callback, and checked by the conditioned model itself
    if saved is not None:
        advice = (
            "Give WellcondCallback the condition of the first run. To train from the effective weights alone, load "
            "them with load_from_checkpoint and fit without ckpt_path."
        )
        check_conditioning(pl_module, saved["conditioning"], advice)
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **saved["resume"]}
    type(pl_module).on_load_checkpoint(pl_module, checkpoint)

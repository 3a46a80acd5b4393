"""Hugging Face's Trainer: `prepare` a model, let `WellcondCallback` measure it, `export` it.

model = prepare(model, init="calibrated", batch=batch)
trainer = Trainer(model, ...)
WellcondCallback(every=500).add_to(trainer)
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.attention.checks import Rollback
from wellcond.attention.sharding import gather_model, is_sharded, reshard_, unwrap
from wellcond.attention.slot import is_conditioned
from wellcond.conditioning.apply import folded, recondition_
from wellcond.conditioning.checkpoint import (
    MARKER,
    RAW_FILE,
    read_raw,
    read_settings,
    resume_in_trainer,
    save_pretrained,
    write_raw,
)
from wellcond.errors import WeightError, needs_extra
from wellcond.integrations.beside import Beside
from wellcond.integrations.common import (
    Choice,
    Measuring,
    apply_choices,
    check_batch,
    check_conditioning,
    conditionings,
    first_samples,
    on_device,
    without_labels,
)
from wellcond.private import without_callbacks, without_mixed_precision

with needs_extra("transformers", "text"):
    from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainerCallback

resume_in_trainer()
STATE = "wellcond"  # our entry in trainer_state.json
CONSOLE = ("pseudo_kappa_jacobian_worst", "entropy", "dead_heads", "kappa_q_worst", "kappa_k_worst", "kappa_v_worst")
"""The summaries that tell most, in that order: the console shows the first three that were measured."""


def prepare(
    model: nn.Module, *, init: Choice | None = None, condition: Choice | None = None, batch: Any = None
) -> nn.Module:
    """Initialise and condition a model for `Trainer`, in place, and have its checkpoints hold effective weights.

    A checkpoint of a conditioned model then loads in plain `AutoModel.from_pretrained` and computes the same; the raw
    weights are in a file of their own beside it, ``wellcond_raw.safetensors``, and
    `trainer.train(resume_from_checkpoint=...)` resumes from these, as `resume` does without a trainer. A model that is
    not a `PreTrainedModel` is saved by `Trainer` itself, with raw weights and the key that names the correction: resume
    from that, and `fold_` the model to publish it.

    Args:
        model: as built; or loaded with `from_pretrained`, without `init`, which would overwrite what was loaded.
        init: a method of `init_`, or ``{"method": ..., **options}``; ``calibrated`` needs `batch`.
        condition: a method of `condition_`, or ``{"method": ..., **options}``.
        batch: what the model is called with to calibrate it: a tensor, a mapping of its arguments, or a tuple of them,
            such as a few samples of the training data through the data collator.

    Returns: the same model.

    Raises: as `init_` and `condition_`; ValueError if there is no batch for an `init` that needs one.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = prepare(BertModel(BertConfig(**sizes)), init="conditioned", condition={"method": "polar"})
        >>> from wellcond import conditioning_of
        >>> conditioning_of(model)["method"]
        'polar'
    """
    check_batch(batch)
    apply_choices(model, init, condition, batch)
    _set_up_saving(model)
    return model


def _set_up_saving(model: nn.Module) -> None:
    plain = unwrap(model)
    if isinstance(plain, PreTrainedModel):
        plain.__dict__["save_pretrained"] = functools.partial(save_pretrained, plain)


def resume(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Make a model the conditioned one whose `save_pretrained` wrote a checkpoint, to train on without `Trainer`.

    It gets the correction and the raw weights of ``wellcond_raw.safetensors``; everything else must be loaded already,
    as `from_pretrained` does.

    Args:
        model: a model of the same architecture, plain or conditioned in the same way, in place.
        folder: where the checkpoint is.

    Returns: the same model.

    Raises:
        WeightError: there are no raw weights in the folder, or they do not fit the model.
        CheckpointMismatchError: the model is conditioned in another way. The model is then as it was.
    """
    raw = read_raw(folder)
    if raw is None:
        raise WeightError(
            f"expected raw weights of a conditioned model in {Path(folder, RAW_FILE)}, found no such file"
        )
    plain = unwrap(model)
    rollback = Rollback(plain)
    try:
        for key in [key for key in raw if key.rpartition(".")[2] == MARKER]:
            part = plain.get_submodule(key.rpartition(".")[0])
            if not is_conditioned(part):
                recondition_(part, read_settings(raw[key]))
        for name, parameter in plain.named_parameters():
            if name in raw:
                rollback.keep(parameter)
        unexpected = plain.load_state_dict(raw, strict=False).unexpected_keys
        if unexpected:
            raise WeightError(f"{Path(folder, RAW_FILE)} does not fit this model, which has no {unexpected[0]!r}")
    except BaseException:
        rollback.restore()
        raise
    return model


def export(trained: nn.Module | Trainer, folder: str | os.PathLike[str]) -> None:
    """Write the effective weights alone, nothing to resume from, with config and tokenizer: to be published.

    The model itself is not changed. A plain model is written as it is. If the model is sharded (FSDP2), every rank must
    call this, and rank 0 writes.

    Raises: TypeError if there is no `save_pretrained` to write it with.
    """
    model = unwrap(trained.model if isinstance(trained, Trainer) else trained)  # type: ignore[arg-type]
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a model of transformers or its Trainer, got {type(model).__name__}; for other models use "
            "`with wellcond.folded(model): torch.save(model.state_dict(), ...)`"
        )
    reshard_(model)
    with folded(model) if is_conditioned(model) else contextlib.nullcontext():
        if not is_sharded(model):
            type(model).save_pretrained(model, folder)
        elif state := gather_model(model):
            type(model).save_pretrained(model, folder, state_dict=state)
        else:
            return
    write_raw(Path(folder), {})  # of another model that was saved there
    processing = trained.processing_class if isinstance(trained, Trainer) else None
    if processing is not None:
        processing.save_pretrained(folder)


class WellcondCallback(Measuring, TrainerCallback):
    """Measures conditioning while `Trainer` trains, and logs it. The training is not changed.

    Summaries over heads (``wellcond/kappa_jacobian_worst``, ``wellcond/kappa_q_mean``, ``wellcond/entropy``, ...) go to
    `trainer.state.log_history` and to everything in ``report_to``; the console shows three of them. Each head at each
    step is a line of ``wellcond.jsonl`` in the output folder. Reporters are reached through the trainer, so use
    `add_to`.

    Args:
        batch: what the model is called with to measure it, kept for the whole run; by default the first samples of the
            training data. Needed where these cannot be read by number.
        measure: False not to measure.
        monitor: True, or options of `AttentionMonitor`: every head is read from the passes that the training makes,
            into ``monitor.jsonl`` of the output folder and all loggers.
        clip: `tau` of `QKClip`, or its options: the largest logit that is left alone.
        alarms: True for alarms in the log, or what `Alarms` sends them to; needs `monitor`.
        per_layer: summaries of each layer as well as of the model.
        export: folder, inside the output folder, for an `export` at the end of training.
        **options: of `ConditionTracker`: `every`, `weights_every`, `budget`, `samples`, `heads`, `sites`, ...

    Raises:
        UnknownChoiceError, ValueError: an option that does not exist, or a value that makes no sense.
        CheckpointMismatchError: when training resumes from a checkpoint of another conditioning.
    """

    def __init__(
        self,
        batch: Any = None,
        *,
        measure: bool = True,
        monitor: bool | Mapping[str, Any] = False,
        clip: float | Mapping[str, Any] | None = None,
        alarms: Any = False,
        per_layer: bool = False,
        export: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch, per_layer, options, measure=measure)
        self.measure, self.beside = measure, Beside(monitor, clip, alarms)
        if export is not None and not isinstance(export, str):
            raise ValueError(f"export: expected the name of a folder inside the output folder, got {export!r}")
        self.export_folder = export
        self._reference: weakref.ref[Trainer] | None = None

    def add_to(self, trainer: Trainer) -> WellcondCallback:
        """Add this callback to a trainer and log through it; returns the callback."""
        self._reference = weakref.ref(trainer)
        trainer.add_callback(self)
        return self

    @property
    def _trainer(self) -> Trainer | None:
        return None if self._reference is None else self._reference()

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure step 0, weights and attention maps within a budget, or resume at the step of a checkpoint."""
        model = unwrap(parts["model"])
        self._check_resumed(model, state)
        if is_conditioned(model):
            _set_up_saving(model)
        if self._trainer is None and args.report_to:
            warnings.warn(
                "WellcondCallback was given to callbacks=[...], from where it cannot reach "
                f"{', '.join(args.report_to)}; its numbers go to trainer.state.log_history and wellcond.jsonl. "
                "For all of them, call WellcondCallback(...).add_to(trainer).",
                stacklevel=2,
            )
        folder = Path(args.output_dir) if state.is_world_process_zero else None
        if self.measure:
            with without_mixed_precision(model):
                self.begin(
                    model, lambda: self._probe(model, args, parts["train_dataloader"]), folder, state.global_step
                )
            self._log(state)
        self.beside.begin(parts["model"], parts.get("optimizer"), folder, state.global_step)

    def _check_resumed(self, model: nn.Module, state: Any) -> None:
        """Raise if the checkpoint is of another conditioning, which `Trainer` would only report."""
        then = state.stateful_callbacks.get(STATE)
        if state.global_step and then is not None:
            check_conditioning(
                model, then["conditioning"], "Give Trainer a model that was prepared as the first one was."
            )
        state.stateful_callbacks[STATE] = {"conditioning": conditionings(model)}

    def _probe(self, model: nn.Module, args: Any, loader: Any) -> Any:
        device = next(model.parameters()).device
        if self.batch is not None:
            return on_device(self.batch, device)
        found = first_samples(loader, self.options.get("samples", 1))
        if not isinstance(found, Mapping):
            raise ValueError(f"batch: expected the data collator to return a dictionary, got {type(found).__name__}")
        shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and "decoder_input_ids" not in found and "labels" in found:
            # What the model does itself where it is given labels, which a probe leaves out.
            found = {**found, "decoder_input_ids": shift(labels=found["labels"].to(device))}
        return on_device(without_labels(found, args.label_names or ()), device)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure what is due; measurements within a budget are logged when `Trainer` logs."""
        self.beside.step()
        self._log_heads(state)
        if not self.measure:
            return
        with without_mixed_precision(unwrap(parts["model"])):
            self.measure_step()
        if control.should_log or self.logs_when_measured:
            self._log(state)

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure the last step at Trainer's last log: then loggers end, and the best checkpoint is put in place."""
        if "train_runtime" in (parts.get("logs") or {}):
            self._close(parts["model"])
            self.beside.end()
            self._log_heads(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Log what is left, and export."""
        self._close(parts["model"])
        self._log(state)
        self.beside.end()
        self._log_heads(state)
        if self.export_folder is not None and (state.is_world_process_zero or is_sharded(unwrap(parts["model"]))):
            export(self._trainer or parts["model"], Path(args.output_dir, self.export_folder))

    def _log_heads(self, state: Any) -> None:
        """Numbers of heads go to loggers alone: not to the console, nor to the trainer's history."""
        trainer, readings = self._trainer, self.beside.new_numbers()
        if trainer is None or not state.is_world_process_zero:
            return
        for step, numbers in readings:
            with without_callbacks(trainer, PrinterCallback, ProgressCallback, WellcondCallback):
                logged = {**numbers, "wellcond/monitored_step": float(step)}
                due = trainer.control.should_log
                trainer.callback_handler.on_log(trainer.args, state, trainer.control, logged)
                trainer.control.should_log = due

    def _close(self, model: nn.Module) -> None:
        if not self.measure:
            return
        with without_mixed_precision(unwrap(model)):
            self.measure_last()

    def _log(self, state: Any) -> None:
        numbers, trainer = self.new_summary(), self._trainer
        if not numbers:
            return
        if trainer is None:
            state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})
            return
        due = trainer.control.should_log
        _log_briefly(trainer, numbers)
        trainer.control.should_log = due  # logging ticks off Trainer's own log of this step, which has the loss


def _log_briefly(trainer: Trainer, numbers: dict[str, float]) -> None:
    """Log numbers everywhere, and only three of them on the console."""
    with without_callbacks(trainer, PrinterCallback, ProgressCallback) as consoles:
        trainer.log(numbers)  # which adds the epoch
    shown = [name for name in (f"wellcond/{name}" for name in CONSOLE) if name in numbers][:3]
    logs = {name: numbers[name] for name in (*shown, "epoch") if name in numbers}
    for console in consoles:
        console.on_log(trainer.args, trainer.state, trainer.control, logs=dict(logs))

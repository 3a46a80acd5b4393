"""The training loop: updates, evaluations, measurements and checkpoints at predetermined steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wellcond.attention.distributed import gather_model, unwrap
from wellcond.attention.find import find_attention
from wellcond.lab.recipe import Recipe
from wellcond.lab.tasks.base import AbstractTask
from wellcond.lab.train.accelerator import check_sharding
from wellcond.lab.train.averaging import WeightAverage
from wellcond.lab.train.batch_ramp import BatchRamp
from wellcond.lab.train.batches import Share, UpdatePlan, fetch_batches
from wellcond.lab.train.best_weights import BestWeights
from wellcond.lab.train.checkpoint import (
    gather_optimizer,
    last_checkpoint,
    read_checkpoint,
    save_checkpoint,
    scatter_,
)
from wellcond.lab.train.clock import RunClock
from wellcond.lab.train.conditioning_log import ConditioningLog, layer_numbers
from wellcond.lab.train.evaluator import Evaluator, find_test_set
from wellcond.lab.train.interrupts import StopFlag
from wellcond.lab.train.lengths import Lengths
from wellcond.lab.train.run_folder import RunFolder, check_links
from wellcond.lab.train.time_budget import TimeBudget
from wellcond.lab.train.train_state import Diverged, TrainState, check_loss, newest_loss
from wellcond.lab.train.updates import Updater

Event = dict[str, Any]
Observer = Callable[[Event], None]
SECONDS_BETWEEN_EVENTS = 0.2


class Interrupted(Exception):
    """Stopped on request, after a checkpoint."""


class Engine:
    """Trains one model. Only rank 0 writes to the folder."""

    def __init__(
        self,
        recipe: Recipe,
        task: AbstractTask,
        model: nn.Module,
        accelerator: Any,
        folder: RunFolder,
        *,
        seed: int,
        clock: RunClock,
        observer: Observer,
        on_saved: Callable[[], None],
    ) -> None:
        """Prepare a freshly built and conditioned model for this machine."""
        self.recipe, self.task, self.accelerator, self.folder = recipe, task, accelerator, folder
        self.clock, self.observer, self.on_saved = clock, observer, on_saved
        check_sharding(accelerator, task, recipe.task.model_dump()["name"])
        self.share = Share(accelerator.process_index, accelerator.num_processes)
        training = recipe.training
        repeats = recipe.augmentation.repeats
        self.plan = UpdatePlan(
            len(task.train), training.batch_size, training.accumulate, seed, repeats, following=task.following
        )
        self.plan.part_size(self.share)  # raises now, not after the first measurement
        self.lengths = Lengths.of(recipe, self.plan)
        self.ramp = BatchRamp(training.batch_ramp, training.accumulate, self.lengths.num_steps)
        self.test_samples = find_test_set(recipe, task)
        self.test: dict[str, Any] | None = None
        self.samples: list[dict[str, Any]] = []
        """Scores on the test split, and outputs of the last weights on samples; set after training."""
        self.best_weights = BestWeights(is_main=self.is_main) if recipe.evaluation.test == "best" else None
        self.state = TrainState()
        self.budget = TimeBudget(training.hours, clock, accelerator)
        self.log = ConditioningLog(
            recipe.tracking,
            task,
            model,
            accelerator,
            num_steps=self.lengths.num_steps,
            steps_per_epoch=self.lengths.steps_per_epoch,
        )
        self.model, self.optimizer = accelerator.prepare(model, recipe.optimizer.build(model))
        averaging = training.averaging
        self.average = WeightAverage(unwrap(self.model), averaging.decay) if averaging else None
        evaluated = self.average if averaging and averaging.evaluate else None
        self.evaluator = Evaluator(recipe, task, self.model, accelerator, share=self.share, average=evaluated)
        curve = recipe.schedule.curve(self.lengths.num_steps, self.lengths.steps_per_epoch)
        self.updater = Updater(
            accelerator,
            task,
            self.model,
            self.optimizer,
            curve=self.budget.squeezed(curve, self.lengths.num_steps),
            peak=recipe.optimizer.lr,
            clip_norm=training.clip_norm,
            average=self.average,
            sites=[] if accelerator.is_fsdp2 else find_attention(unwrap(self.model), strict=False),
            seed=seed,
        )
        self._losses: list[torch.Tensor] = []

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes."""
        return self.accelerator.is_main_process

    @property
    def full_updates(self) -> float:
        """Number of samples seen so far, in full batches."""
        return self.state.step - self.state.parts_spared / self.plan.accumulate

    @property
    def epoch(self) -> float:
        """Number of epochs completed."""
        return self.lengths.epoch(self.full_updates)

    # Resuming

    def resume(self) -> int:
        """Resume from the last checkpoint, if there is one; returns its step."""
        place = last_checkpoint(self.folder.path / "checkpoints")
        if place is None:
            if self.is_main:
                self.folder.cut_logs({})
            return 0
        model, optimizer, stored, average = read_checkpoint(place)
        scatter_(self.model, self.optimizer.optimizer, (model, optimizer), broadcast=self.share.processes > 1)
        if self.average is not None and average is not None:
            self.average.load_(average)
        if self.best_weights is not None:
            self.best_weights.resume(place)
        if self.accelerator.scaler is not None and stored["scaler"]:
            self.accelerator.scaler.load_state_dict(stored["scaler"])
        self.state = TrainState(**stored["train"])
        self.clock.add(stored["seconds"])
        if self.is_main:
            self.folder.cut_logs(stored["logs"])
        return self.state.step

    def save(self) -> None:
        """Write a checkpoint of the current step; every rank must call it."""
        with self.clock.spent_on("checkpointing"):
            self._take_losses()
            model = gather_model(self.model)
            optimizer = gather_optimizer(self.model, self.optimizer.optimizer)
            average = None if self.average is None else self.average.state()
            if self.is_main:
                scaler = self.accelerator.scaler
                state = {
                    "train": self.state.to_dict(),
                    "seconds": self.clock.now(),
                    "logs": self.folder.log_marks(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                }
                best = None if self.best_weights is None else self.best_weights.to_save
                folder = self.folder.path / "checkpoints"
                self.folder.check_there()
                check_links(self.folder.path)  # one may have been created since the run began
                place = save_checkpoint(folder, self.state.step, model, optimizer, state, average, best)
                if self.best_weights is not None:
                    self.best_weights.saved_in(place)
                self.on_saved()
                self.observer({"event": "saved", "step": self.state.step})

    # Training

    def train(self, stop: StopFlag) -> None:
        """Train from the current step to the end.

        Raises:
            Diverged: the loss is not finite or exceeds `training.diverged_above` times the first.
            Interrupted: the stop flag is set; the last step has a checkpoint.
        """
        state = self.state
        with self.clock.spent_on("measuring"):
            self.observer({"event": "phase", "phase": "measuring"})
            self._write_conditioning(self.log.begin(self.model, state.step))
        if state.step == 0:
            self._evaluate()
        told = time.perf_counter()
        self._end_if_time_is_up()
        parts = self.plan.parts(self.share, self.full_updates, self.lengths.num_steps)
        batches = fetch_batches(
            self.task.train, parts, workers=self.recipe.training.workers, device=self.accelerator.device
        )
        self.model.train()
        self.clock.switch("training")
        while (step := state.step) < self.lengths.num_steps:
            number = self.ramp.parts_of(self.budget.point(step, self.ramp.num_steps))
            mine = [next(batches) for _ in range(number)]
            state.parts_spared += self.ramp.parts - number
            done = step + 1
            logged = done % self.recipe.training.log_every == 0 or done == self.lengths.num_steps
            loss, norms = self.updater.update(step, mine, want_norms=logged)
            self._losses.append(loss)
            state.step = done
            self._end_if_time_is_up()
            if logged:
                self._log_step(norms)
            if (now := time.perf_counter()) - told > SECONDS_BETWEEN_EVENTS:
                event = {"event": "step", "step": done, "loss": newest_loss(state, self._losses)}
                self.observer(event | {"num_steps": self.budget.steps_expected(done, self.lengths.num_steps)})
                told = now
            self._at_boundaries(stop)
        self.clock.switch("evaluation")
        self.samples = self.evaluator.write_samples()
        self._test()

    def _end_if_time_is_up(self) -> None:
        self.budget.look()
        if self.budget.is_used and self.state.step < self.lengths.num_steps:
            self.lengths = self.lengths.ending_at(self.state.step)
            self.log.end_at(self.state.step)

    def _at_boundaries(self, stop: StopFlag) -> None:
        lengths, step = self.lengths, self.state.step
        last = step == lengths.num_steps
        if step in self.log.steps:
            self.observer({"event": "phase", "phase": "measuring"})
            with self.clock.spent_on("measuring"):
                self._write_conditioning(self.log.after(step))
        else:
            self.log.after(step)  # counts the step without waiting for the device
        if last or step % lengths.evaluate_every == 0:
            self._evaluate()
        stopping = self._should_stop(stop) and not last
        if last or stopping or step % lengths.save_every == 0:
            self.save()
        if stopping:
            raise Interrupted

    def _should_stop(self, stop: StopFlag) -> bool:
        """Whether the stop flag is set on any rank; several ranks synchronise only at logged steps."""
        if self.share.processes > 1 and self.state.step % self.recipe.training.log_every:
            return False
        return stop.any_rank(self.accelerator)

    def _take_losses(self) -> None:
        """Move the losses of recent updates to the state, averaged over ranks.

        Raises: Diverged if one is not finite.
        """
        if not self._losses:
            return
        losses = torch.stack(self._losses).double()
        if self.share.processes > 1:
            losses = self.accelerator.reduce(losses, reduction="mean")
        self._losses = []
        values = losses.tolist()
        first = self.state.step + 1 - len(values)
        self.state.take(values)
        for number, value in enumerate(values):
            check_loss(value, None, None, first + number)

    def _log_step(self, norms: dict[str, float]) -> None:
        step = self.state.step
        try:
            self._take_losses()
        finally:  # a loss that is not finite is logged too
            mean = self.state.close_window()
            row: dict[str, Any] = {"step": step, "epoch": self.epoch, "loss": mean}
            row |= {"lr": self.updater.learning_rate, **norms}
            if self.is_main:
                self.folder.append("steps.jsonl", [row])
                self.accelerator.log({f"train/{name}": value for name, value in row.items()}, step=step)
        check_loss(mean, self.state.first_loss, self.recipe.training.diverged_above, step)

    # Evaluation

    def _write_conditioning(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            place = {"step": self.state.step, "epoch": self.epoch}
            self.folder.append("conditioning.jsonl", (place | row for row in rows))
            self.accelerator.log(layer_numbers(rows), step=self.state.step)

    def _evaluate(self) -> None:
        with self.clock.spent_on("evaluation"):
            self._take_losses()
            self.observer({"event": "phase", "phase": "evaluating"})
            values = self.evaluator.evaluate_all(self.recipe.evaluation.samples)
            step = self.state.step
            row: dict[str, Any] = {"step": step, "epoch": self.epoch, **values}
            row |= {"train_loss": self.state.close_evaluation(), "seconds": self.clock.now()["training"]}
            if self.is_main:
                self.folder.append("evaluations.jsonl", [row])
                self.accelerator.log({f"evaluation/{name}": value for name, value in values.items()}, step=step)
            check_loss(values["loss"], None, None, step)
            self.state.final = row
            name = self.task.metric.name
            if self.state.best is None or self.task.metric.better(row[name], self.state.best[name]):
                self.state.best = row
                if self.best_weights is not None:
                    with self.evaluator.evaluated_weights():
                        self.best_weights.take(self.model)
            self.observer({"event": "evaluation", "row": row})

    def _test(self) -> None:
        """Score the test split after the last checkpoint: a run killed here resumes there and gives identical results.

        The model then has the tested weights.
        """
        if self.test_samples is None:
            return
        with self.clock.spent_on("evaluation"):
            self.observer({"event": "phase", "phase": "testing"})
            samples, weights = self.test_samples, self.recipe.evaluation.test
            if self.best_weights is None:
                values = self.evaluator.evaluate(samples)
            else:
                self.best_weights.put_into_(self.model, broadcast=self.share.processes > 1)
                values = self.evaluator.score(samples, len(samples))
            tested = self.state.best if weights == "best" else self.state.final
            assert tested is not None
            if not math.isfinite(loss := values["loss"]):
                raise Diverged(f"the loss on the test split is {loss} with the weights of step {tested['step']}")
            self.test = {"step": tested["step"], "epoch": tested["epoch"], "weights": weights, **values}
            if self.is_main:
                self.accelerator.log({f"test/{name}": value for name, value in values.items()}, step=self.state.step)
            self.observer({"event": "test", "row": self.test})

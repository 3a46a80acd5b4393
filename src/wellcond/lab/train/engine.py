"""The training loop: updates, evaluations, measurements and checkpoints at predetermined steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.find import find_attention
from wellcond.attention.sharding import full_tensor, is_sharded, reshard_, unwrap
from wellcond.attention.site import AttentionSite
from wellcond.errors import RecipeError
from wellcond.lab.optimizers import set_point
from wellcond.lab.recipe import Recipe
from wellcond.lab.seeding import derive, seed_device
from wellcond.lab.tasks.base import AbstractTask, Batch
from wellcond.lab.train import evaluate, run_folder
from wellcond.lab.train.batches import UpdatePlan, fetch_batches
from wellcond.lab.train.evaluate import ConditioningLog, WeightAverage, layer_numbers
from wellcond.lab.train.length import (
    Diverged,
    RunClock,
    StopFlag,
    StopVote,
    TimeBudget,
    TrainState,
    check_loss,
    ramped_parts,
)
from wellcond.lab.train.prepare import prepare_ranks_
from wellcond.lab.train.run_folder import RunFolder
from wellcond.training.monitor import AttentionMonitor

Event = dict[str, Any]
Observer = Callable[[Event], None]


@dataclass(eq=False)
class Engine:
    """Trains one model. Only rank 0 writes to the folder, but for shards of checkpoints."""

    recipe: Recipe
    seed: int
    task: AbstractTask
    model: nn.Module
    accelerator: Any
    folder: RunFolder
    clock: RunClock
    observer: Observer

    def __post_init__(self) -> None:
        recipe, task, accelerator = self.recipe, self.task, self.accelerator
        if accelerator.is_fsdp2 and not task.can_be_sharded:  # its ranks would deadlock
            name = recipe.task.model_dump()["name"]
            raise RecipeError(f"task.name: {name} does not run under FSDP; launch it with DDP (torchrun) or alone")
        self.is_main = accelerator.is_main_process
        training = recipe.training
        self.plan = UpdatePlan(
            num_samples=len(task.train),
            batch_size=training.batch_size,
            accumulate=training.accumulate,
            seed=self.seed,
            repeats=recipe.augmentation.repeats,
            following=task.following,
            rank=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        intervals = (training.length, recipe.evaluation.every, recipe.checkpoint.every)
        per_epoch = self.plan.steps_per_epoch
        self.num_steps, self.evaluate_every, self.save_every = (every.in_steps(per_epoch) for every in intervals)
        self.wants_best = recipe.evaluation.test == "best"
        self.best_weights: dict[str, Tensor] | None = None
        """Weights and buffers of the best evaluation so far, on the CPU."""
        self.state = TrainState()
        self.budget = TimeBudget(training.hours, self.clock, accelerator)
        self.log = ConditioningLog(recipe, task, accelerator, per_epoch, self._note)
        prepare_ranks_(accelerator, self.model)
        self.model, self.optimizer = accelerator.prepare(self.model, recipe.optimizer.build(self.model))
        recipe.optimizer.act_after_steps(self.model, self.optimizer.optimizer)
        self.evaluated_weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Inside, the model has the average, if that is what is evaluated."""
        self.average: WeightAverage | None = None
        if training.averaging is not None:
            self.average = WeightAverage(unwrap(self.model), training.averaging.decay)
            if training.averaging.evaluate:
                self.evaluated_weights = self.average.in_place
        self.planned_steps, self.learning_rate = self.num_steps, 0.0
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.sharded = is_sharded(unwrap(self.model))
        self.sites = [] if self.sharded else find_attention(unwrap(self.model), strict=False)
        self.monitor: AttentionMonitor | None = None
        self._losses: list[Tensor] = []
        self._vote = StopVote(accelerator.num_processes)
        self.results: dict[str, Any] = {}
        """For the record, after the last update."""

    @property
    def full_updates(self) -> float:
        """Number of samples seen so far, in full batches."""
        return self.state.step - self.state.parts_spared / self.plan.accumulate

    @property
    def epoch(self) -> float:
        """Number of epochs completed."""
        return round(self.full_updates / self.plan.steps_per_epoch, 6)

    def progress(self) -> dict[str, Any]:
        """What the record says of the training so far."""
        seconds, per_epoch = self.clock.now()["training"], self.plan.steps_per_epoch
        return {
            "final": self.state.final,
            "best": self.state.best,
            "progress": {
                "step": self.state.step,
                "num_steps": self.num_steps,
                "epoch": self.epoch,
                "num_epochs": round(self.num_steps / per_epoch, 6),
                "steps_per_epoch": per_epoch,
            },
            "samples_per_second": self.full_updates * self.plan.batch_size / max(seconds, 1e-9),
            "seconds_per_step": seconds / max(1, self.state.step),
            **self.results,
        }

    def resume(self) -> int:
        """Resume from the last checkpoint, if there is one; returns its step."""
        place = run_folder.last_checkpoint(self.folder.path / "checkpoints")
        if place is None:
            if self.is_main:
                self.folder.cut_logs({})
            return 0
        stored = run_folder.read_checkpoint(place)
        tensors = run_folder.read_tensors(place, "model", run_folder.model_tensors(self.model).get)
        run_folder.load_model_(self.model, tensors)
        run_folder.load_optimizer_(self.model, self.optimizer.optimizer, place, stored["groups"])
        if self.average is not None:
            self.average.load_(run_folder.read_tensors(place, "average", self.average.state.get))
        if self.wants_best:
            self._keep_best(run_folder.read_tensors(place, "best", run_folder.model_tensors(self.model).get))
        if self.accelerator.scaler is not None and stored["scaler"]:
            self.accelerator.scaler.load_state_dict(stored["scaler"])
        self.state = TrainState(**stored["train"])
        for activity, seconds in stored["seconds"].items():
            self.clock.seconds[activity] += seconds
        if self.is_main:
            self.folder.cut_logs(stored["logs"])
        return self.state.step

    def save(self) -> None:
        """Write a checkpoint of the current step; every rank must call it."""
        with self.clock.spent_on("checkpointing"):
            self._take_losses()
            scaler, optimizer = self.accelerator.scaler, self.optimizer.optimizer
            folder, step = self.folder.path / "checkpoints", self.state.step
            if self.is_main or self.sharded:
                tensors = {
                    "model": run_folder.model_tensors(self.model),
                    "optimizer": run_folder.optimizer_tensors(self.model, optimizer),
                    "average": None if self.average is None else self.average.state,
                    "best": self.best_weights,
                }
                state = {
                    "train": asdict(self.state),
                    "groups": run_folder.group_options(optimizer),
                    "seconds": self.clock.now(),
                    "logs": self.folder.log_marks(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                }
                run_folder.save_checkpoint(folder, step, tensors, state, sharded=self.sharded)
            self.accelerator.wait_for_everyone()
            if self.is_main:
                self.observer({"event": "saved", "step": step})

    def train(self, stop: StopFlag) -> bool:
        """Train from the current step to the end; False if it was stopped, after a checkpoint. Raises Diverged."""
        with self._monitored():
            return self._train(stop)

    @contextlib.contextmanager
    def _monitored(self) -> Iterator[None]:
        """Read every head meanwhile, if the recipe asks for it; what is on its way at the end is written too."""
        every, file = self.recipe.logging.monitor_every, self.folder.path / "monitor.jsonl"
        if every is None:
            yield
            return
        with AttentionMonitor(self.model, every=every, file=file, first_step=self.state.step) as self.monitor:
            yield

    def _train(self, stop: StopFlag) -> bool:
        state, training = self.state, self.recipe.training
        self.log.begin(self.model, state.step)
        if state.step == 0:
            self._measure_if_due(last=False)
            self._evaluate()
        told, shown = time.perf_counter(), None
        self._end_if_time_is_up()
        parts = self.plan.parts(self.full_updates, self.num_steps)
        batches = fetch_batches(self.task.train, parts, workers=training.workers, device=self.accelerator.device)
        self.model.train()
        self.clock.switch("training")
        while (step := state.step) < self.num_steps:
            point = self.budget.point(step, self.planned_steps)
            number = ramped_parts(training.batch_ramp, training.accumulate, point, self.planned_steps)
            mine = [next(batches) for _ in range(number)]
            state.parts_spared += training.accumulate - number
            done = step + 1
            logged = done % training.log_every == 0 or done == self.num_steps
            loss, norms = self.update(step, mine, want_norms=logged)
            self._losses.append(loss)
            state.step = done
            self._end_if_time_is_up()
            if logged:
                shown = self._log_step(norms)
            if (now := time.perf_counter()) - told > 0.2:
                event = {"event": "step", "step": done, "loss": shown}
                self.observer(event | {"num_steps": self.budget.steps_expected(done, self.num_steps)})
                told = now
            last = done == self.num_steps
            self._measure_if_due(last=last)
            if last or done % self.evaluate_every == 0:
                self._evaluate()
            stopping = self._vote.take(stop.requested) and not last
            if last or stopping or done % self.save_every == 0:
                self.save()
            if stopping:
                return False
        self.clock.switch("evaluation")
        with self.evaluated_weights():
            if samples := self.task.write_samples(unwrap(self.model)):
                self.results["samples"] = samples
        self._test()
        return True

    def update(self, step: int, batches: Sequence[Batch], *, want_norms: bool) -> tuple[Tensor, dict[str, float]]:
        """One update of the weights; returns this rank's loss and norms of gradients before clipping.

        Losses are divided by the number of terms over all parts and ranks; their mean over ranks is that of the update.
        """
        accelerator, clip_norm = self.accelerator, self.recipe.training.clip_norm
        # Dropout differs between ranks, but not between methods, sessions or measured and unmeasured runs.
        seed_device(derive(self.seed, "dropout", step, accelerator.process_index), accelerator.device)
        parts = range(accelerator.process_index, len(batches) * accelerator.num_processes, accelerator.num_processes)
        batches = [self.task.training_batch(batch, step, part) for part, batch in zip(parts, batches, strict=True)]
        num_terms: Any = sum(self.task.terms_to_train(batch) for batch in batches)
        # A number is the same on every rank, since each has as many samples; a tensor has to be added up.
        alone = accelerator.num_processes == 1 or isinstance(num_terms, int)
        share = 1 / num_terms if alone else self._share_of_all(num_terms)
        place = self.budget.point(step, self.planned_steps), self.planned_steps, self.plan.steps_per_epoch
        self.learning_rate = set_point(self.optimizer, self.recipe.schedule.point(*place), self.recipe.optimizer.lr)
        if self.recipe.precision.channels_last:
            batches = [{name: channels_last(values) for name, values in batch.items()} for batch in batches]
        losses = []
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                loss = self.task.loss(self.model, batch) * share
                accelerator.backward(loss)
            losses.append(loss.detach())
        norms = {}
        if want_norms:
            accelerator.unscale_gradients()
            total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
            norms = {"grad_norm": float(full_tensor(total))} | projection_norms(self.sites)
        if clip_norm is not None:
            accelerator.clip_grad_norm_(self.parameters, clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step()
        if self.average is not None:
            self.average.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), norms

    def _share_of_all(self, num_terms: Tensor) -> Tensor:
        """Number of ranks over the number of terms on all of them, for which the host does not wait."""
        terms = self.accelerator.reduce(num_terms.to(torch.float64), reduction="sum")
        return (self.accelerator.num_processes / terms).float()

    def _end_if_time_is_up(self) -> None:
        if self.budget.look() >= 1:
            self.num_steps = self.state.step

    def _take_losses(self) -> None:
        """Move the losses of recent updates to the state, averaged over ranks; raises Diverged if one is not finite."""
        if not self._losses:
            return
        values = self.accelerator.reduce(torch.stack(self._losses).double(), reduction="mean").tolist()
        self._losses = []
        first = self.state.step + 1 - len(values)
        self.state.take(values)
        for number, value in enumerate(values):
            check_loss(value, first + number)

    def _log_step(self, norms: dict[str, float]) -> float:
        """Write a row of steps.jsonl; returns its loss."""
        step = self.state.step
        try:
            self._take_losses()
        finally:  # a loss that is not finite is logged too
            mean = self.state.close_window()
            row: dict[str, Any] = {"step": step, "epoch": self.epoch, "loss": mean, "lr": self.learning_rate, **norms}
            if self.is_main:
                self.folder.append("steps.jsonl", [row])
                self._track("train", row)
        factor, first = self.recipe.training.diverged_above, self.state.first_loss
        if factor is not None and first is not None:
            check_loss(mean, step, factor * max(first, 1e-6))
        return mean

    def _track(self, group: str, values: dict[str, Any]) -> None:
        self.accelerator.log({f"{group}/{name}": value for name, value in values.items()}, step=self.state.step)

    def _note(self, text: str) -> None:
        self.observer({"event": "note", "text": text})

    def _measure_if_due(self, *, last: bool) -> None:
        step = self.state.step
        if (due := self.log.due(step, last=last)) is None:
            return
        with self.clock.spent_on("measuring"):
            self.observer({"event": "phase", "phase": "measuring"})
            points = self.log.measure(step, jacobian=due == "jacobian", seconds=self.clock.now())
            if points and self.is_main:
                place = {"step": step, "epoch": self.epoch}
                self.folder.append("conditioning.jsonl", (place | point.to_json_dict() for point in points))
                self.accelerator.log(layer_numbers(points), step=step)

    def _evaluate(self) -> None:
        with self.clock.spent_on("evaluation"), self.evaluated_weights():
            self._take_losses()
            self.observer({"event": "phase", "phase": "evaluating"})
            values = evaluate.score_all(self.recipe, self.task, self.model, self.accelerator)
            row: dict[str, Any] = {"step": self.state.step, "epoch": self.epoch, **values}
            row |= {"train_loss": self.state.close_evaluation(), "seconds": self.clock.now()["training"]}
            if self.is_main:
                self.folder.append("evaluations.jsonl", [row])
                self._track("evaluation", values)
            check_loss(values["loss"], self.state.step)
            self.state.final = row
            name = self.task.metric.name
            if self.state.best is None or self.task.metric.is_better(row[name], self.state.best[name]):
                self.state.best = row
                if self.wants_best:
                    self._keep_best(run_folder.model_tensors(self.model))
            self.observer({"event": "evaluation", "row": row})

    def _keep_best(self, tensors: dict[str, Tensor]) -> None:
        self.best_weights = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}

    def _test(self) -> None:
        """Score the test split after the last checkpoint: a run killed here resumes there with identical results."""
        weights, samples, tested = self.recipe.evaluation.test, self.task.test, self.state.final
        if weights is None or samples is None:
            return
        with self.clock.spent_on("evaluation"):
            self.observer({"event": "phase", "phase": "testing"})
            if self.best_weights is not None:
                reshard_(self.model)
                run_folder.load_model_(self.model, self.best_weights)
                tested, self.evaluated_weights = self.state.best, contextlib.nullcontext
            with self.evaluated_weights():
                values = evaluate.score(self.recipe, self.task, self.model, self.accelerator, samples)
            assert tested is not None
            if not math.isfinite(loss := values["loss"]):
                raise Diverged(f"the loss on the test split is {loss} with the weights of step {tested['step']}")
            row = {"step": tested["step"], "epoch": tested["epoch"], "weights": weights, **values}
            self.results["test"] = row
            if self.is_main:
                self._track("test", values)
            self.observer({"event": "test", "row": row})


def channels_last(values: Any) -> Any:
    """Images with their channels last in memory; anything else as it is."""
    is_images = isinstance(values, Tensor) and values.dim() == 4 and values.is_floating_point()
    return values.contiguous(memory_format=torch.channels_last) if is_images else values


def projection_norms(sites: Sequence[AttentionSite]) -> dict[str, float]:
    """Norm of the gradient of all W_Q, of all W_K and of all W_V; nothing where one has none."""
    norms = {}
    for role in "qkv":
        gradients = [(site.slots[role], site.slots[role].parameter.grad) for site in sites]
        if not gradients or any(gradient is None for _, gradient in gradients):
            return {}
        parts = [slot.view_heads(gradient).norm() for slot, gradient in gradients if gradient is not None]
        norms[f"grad_norm_{role}"] = float(torch.stack(parts).norm())
    return norms

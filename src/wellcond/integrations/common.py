"""What the callbacks of every training loop share: preparing a model, finding a batch, measuring and summing up."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from wellcond.arguments import CORRECTIONS, INITIALISATIONS
from wellcond.attention.slot import roots_in
from wellcond.conditioning.apply import condition_
from wellcond.conditioning.methods import make_method
from wellcond.errors import CheckpointMismatchError, UnknownChoiceError
from wellcond.files import lines_until, write_atomically
from wellcond.init.apply import check_options, init_, takes_batch
from wellcond.measurement.budget import Name, TrackingOptions
from wellcond.measurement.records import JACOBIAN_NUMBERS, geometric_mean
from wellcond.measurement.tracker import ConditionTracker, TrackPoint

Choice = str | Mapping[str, Any]
GENERATORS = (torch.Generator, np.random.Generator, random.Random)
Summaries = Sequence[tuple[str, str, Callable[[Sequence[float]], float]]]
"""Name in the log, field of a `TrackPoint`, and how the heads are summed up."""
SUMMARIES: Summaries = [
    ("kappa_jacobian_worst", "condition_number", max),
    ("kappa_jacobian_mean", "condition_number", geometric_mean),
    ("pseudo_kappa_jacobian_worst", "pseudo_condition_number", max),
    ("pseudo_kappa_jacobian_mean", "pseudo_condition_number", geometric_mean),
    ("sigma_max_jacobian", "sigma_max", geometric_mean),
    ("sigma_min_jacobian", "sigma_rank", geometric_mean),
    *((f"kappa_{role}_worst", f"kappa_{role}", max) for role in "qkv"),
    *((f"kappa_{role}_mean", f"kappa_{role}", geometric_mean) for role in "qkv"),
    *((f"sigma_max_{role}", f"sigma_max_{role}", geometric_mean) for role in "qkv"),
    *((f"sigma_min_{role}", f"sigma_min_{role}", geometric_mean) for role in "qkv"),
    ("entropy", "normalised_entropy", fmean),
    ("logit_std", "logit_std", fmean),
    ("dead_heads", "dead", sum),
]
FIELDS = list(dict.fromkeys(field for _, field, _ in SUMMARIES))


# -- preparing a model


def read_choice(what: str, choice: Choice) -> tuple[str, dict[str, Any]]:
    """Method and options of ``"balanced"`` or ``{"method": "balanced", "target": 3.0}``.

    Raises: ValueError if it is neither.
    """
    named = {"method": choice} if isinstance(choice, str) else choice
    if not isinstance(named, Mapping) or not isinstance(named.get("method"), str):
        raise ValueError(f"{what}: expected the name of a method or {{'method': name, ...options}}, got {choice!r}")
    return named["method"], {key: value for key, value in named.items() if key != "method"}


def check_choices(init: Choice | None, condition: Choice | None, batch: Any = None) -> None:
    """Raise what `init_` and `condition_` would raise about methods and options, before there is a model.

    `batch` is what an initialisation that measures, such as ``calibrated``, runs the model on.
    """
    if init is not None:
        method, options = read_choice("init", init)
        INITIALISATIONS.check(method, instead='condition="{name}"')
        if takes_batch(method) and options.get("batch", batch) is None:
            raise ValueError(
                f"init={method!r} sets scales on a batch, and none was given; give batch=..., what the model is called "
                "with: a tensor, a mapping of its arguments, or a tuple of them. A few samples suffice"
            )
        check_options(method, {key: value for key, value in options.items() if key not in ("sites", "generator")})
    if condition is not None:
        method, options = read_choice("condition", condition)
        CORRECTIONS.check(method, instead='init="{name}"')
        make_method(method, {k: v for k, v in options.items() if k not in ("sites", "projections", "num_tokens")})


def apply_choices(model: nn.Module, init: Choice | None, condition: Choice | None, batch: Any = None) -> nn.Module:
    """Initialise, then condition, in place; `batch` is for an initialisation that takes one.

    Raises: as `init_` and `condition_`; whatever can be checked is checked before the model is touched.
    """
    check_choices(init, condition, batch)
    if init is not None:
        method, options = read_choice("init", init)
        if takes_batch(method):
            options["batch"] = on_device(options.get("batch", batch), next(model.parameters()).device)
        init_(model, method, **options)
    if condition is not None:
        method, options = read_choice("condition", condition)
        condition_(model, method, **options)
    return model


def without_batch(init: Choice | None) -> Choice | None:
    """What names an initialisation, without the tensors that it runs on."""
    return init if init is None or isinstance(init, str) else {k: v for k, v in init.items() if k != "batch"}


def conditionings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Settings of every conditioned part of a model by its name, which is empty for the model itself."""
    return {name: settings for name, _, settings in roots_in(model)}


def check_conditioning(model: nn.Module, saved: Mapping[str, Any], advice: str) -> None:
    """Raise CheckpointMismatchError unless a model is conditioned as the one whose checkpoint is loaded."""
    now = conditionings(model)
    if saved != now:
        raise CheckpointMismatchError(
            "the checkpoint was written under another conditioning; training cannot resume from it.\n"
            f"  expected (the checkpoint): {saved or 'a plain model'}\n"
            f"  got (this model):          {now or 'a plain model'}\n  {advice}"
        )


# -- a batch to measure with


def check_batch(batch: Any) -> None:
    """Raise ValueError for a batch that no model can be called with: neither tensors nor a function of the model."""
    parts = [batch]
    if isinstance(batch, (Mapping, tuple, list)):
        parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    if batch is not None and not callable(batch) and not any(isinstance(part, torch.Tensor) for part in parts):
        found = f"a {type(batch).__name__} without a tensor" if parts and parts[0] is not batch else f"{batch!r:.80}"
        raise ValueError(
            "batch: expected what the model is called with (a tensor, a mapping of its arguments, or a tuple of them), "
            f"got {found}"
        )


@contextlib.contextmanager
def _preserved_rng_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    device = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _with_own_generators(collate: Any) -> Any:
    """A copy of a collator that draws from copies of its generators; a function is returned as it is."""
    twin = copy.copy(collate)
    if twin is not collate and hasattr(twin, "__dict__"):
        for name, value in vars(twin).items():
            if isinstance(value, GENERATORS):
                setattr(twin, name, copy.deepcopy(value))
            elif name == "data_collator":  # Trainer wraps a collator that is given to it
                setattr(twin, name, _with_own_generators(value))
    return twin


def first_samples(loader: Any, count: int) -> Any:
    """The first samples of a loader's data set, collated. Neither its sampler nor any random number is used up.

    Raises: ValueError if the data set has no samples by number.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            "batch: expected one to measure with, since the training data cannot be read by sample number "
            f"(found {type(dataset).__name__}); give batch=..., what the model is called with"
        )
    with _preserved_rng_state():
        collate = _with_own_generators(loader.collate_fn)
        return collate([dataset[i] for i in range(min(count, len(dataset)))])


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [on_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def without_labels(batch: Mapping[str, Any], names: Iterable[str] = ()) -> dict[str, Any]:
    """The tensors of a batch that the data loader made, except labels; a model takes no texts or file names."""
    labels = {"labels", "label", "label_ids", *names}
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and key not in labels}


# -- measuring and summing up


def summarise(prefix: str, heads: list[dict[str, Any]], summaries: Summaries) -> dict[str, float]:
    """Numbers of heads summed up, each under its name; loggers want finite ones, so others are left out."""
    found = {}
    for name, field, sum_up in summaries:
        known = [numbers[field] for numbers in heads if numbers.get(field) is not None]
        finite = [value for value in known if math.isfinite(value)]
        if finite:
            found[prefix + name] = float(sum_up(finite))
    return found


class Measuring:
    """What callbacks of different trainers share: a `ConditionTracker`, numbers for loggers, and lines of a file.

    Args:
        batch: what the model is called with to measure it; None for the first samples of the training data.
        per_layer: summaries of each layer as well as of the model.
        options: of `ConditionTracker`.
        **switches: further options that must be True or False.

    Raises: UnknownChoiceError, ValueError: an option that does not exist, or a value that makes no sense.
    """

    tracker: ConditionTracker | None = None
    restored: Mapping[Name, dict[str, float]] = {}
    """The latest numbers of every head in the checkpoint from which training resumes."""

    def __init__(self, batch: Any, per_layer: bool, options: Mapping[str, Any], **switches: Any) -> None:
        check_batch(batch)
        known = [field.name for field in dataclasses.fields(TrackingOptions)]
        for name in options:
            if name not in known:
                raise UnknownChoiceError("option of ConditionTracker", name, known)
        TrackingOptions(**options)
        for name, value in {"per_layer": per_layer, **switches}.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        self.batch, self.per_layer, self.options = batch, per_layer, options

    @property
    def points(self) -> list[TrackPoint]:
        """Everything measured since training began or resumed."""
        return [] if self.tracker is None else self.tracker.points

    @property
    def logs_when_measured(self) -> bool:
        """Whether numbers are logged at once: what the budget alone decides waits until the trainer logs."""
        return self.options.get("every", "auto") != "auto"

    def begin(self, model: nn.Module, probe: Callable[[], Any], folder: Path | None, first_step: int) -> None:
        """Measure step 0 of a model, if it is due and training starts there.

        Args:
            model: what is measured.
            probe: returns what it is called with; the time that takes counts as measuring.
            folder: of ``wellcond.jsonl``, where every point is a line of JSON; None on all ranks but the first.
            first_step: steps trained before. Lines of later steps, from a run that was cut off, are removed.
        """
        begun = time.perf_counter()
        self.file = None if folder is None else folder / "wellcond.jsonl"
        self.latest = dict(self.restored)
        self.unlogged = self.unlogged_jacobian = False
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            resumed = first_step and self.file.exists()
            kept = [line for _, line in lines_until(self.file, first_step)] if resumed else []
            write_atomically(self.file, "".join(kept))
        self.tracker = ConditionTracker(model, probe(), first_step=first_step, **self.options)
        self._take(self.tracker.points)
        self.tracker.charge(time.perf_counter() - begun - self.tracker.allowance.spent)  # what it has not counted

    def measure_step(self) -> None:
        """Call after every step of the optimiser."""
        assert self.tracker is not None
        self._take(self.tracker.step())

    def measure_last(self) -> None:
        """Call after the last step: measures it, and logs how much the budget allowed."""
        assert self.tracker is not None
        self._take(self.tracker.close())

    def _take(self, points: list[TrackPoint]) -> None:
        if self.tracker is None or not points:
            return
        self.unlogged = True
        self.unlogged_jacobian |= any(point.condition_number is not None for point in points)
        for point in points:
            values = {field: getattr(point, field) for field in FIELDS}
            # A head measured without its Jacobian keeps the Jacobian of last time.
            known = {field: value for field, value in values.items() if value is not None}
            self.latest[point.layer, point.head] = self.latest.get((point.layer, point.head), {}) | known
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as out:
                out.writelines(point.to_line(self.tracker.run) + "\n" for point in points)

    def new_summary(self) -> dict[str, float]:
        """The latest numbers of all heads, if some are new; those of Jacobians only where one of these is."""
        if self.tracker is None or not self.unlogged:
            return {}
        left_out = () if self.unlogged_jacobian else JACOBIAN_NUMBERS
        self.unlogged = self.unlogged_jacobian = False
        groups: dict[str, list[dict[str, float]]] = {"wellcond/": []}
        for (layer, _), numbers in self.latest.items():
            shown = {field: value for field, value in numbers.items() if field not in left_out}
            groups["wellcond/"].append(shown)
            if self.per_layer:
                groups.setdefault(f"wellcond/{layer}/", []).append(shown)
        summary: dict[str, float] = {}
        for prefix, heads in groups.items():
            summary |= summarise(prefix, heads, SUMMARIES)
            measured = [numbers["condition_number"] for numbers in heads if "condition_number" in numbers]
            if measured:
                infinite = sum(not math.isfinite(value) for value in measured)
                summary[prefix + "heads_without_finite_kappa"] = float(infinite)
        summary["wellcond/seconds"] = self.tracker.allowance.spent
        if math.isfinite(self.tracker.overhead):  # something was trained
            summary["wellcond/overhead"] = self.tracker.overhead
        return summary

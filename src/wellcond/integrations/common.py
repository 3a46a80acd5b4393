"""What the callbacks of every training loop share: preparing a model, finding a batch to probe with, summing up."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from wellcond.conditioning.apply import condition_
from wellcond.conditioning.checkpoint import settings_of
from wellcond.conditioning.methods import METHODS as CORRECTIONS
from wellcond.conditioning.methods import make_method
from wellcond.errors import UnknownChoiceError, check_method
from wellcond.init.apply import check_options, init_
from wellcond.init.plan import METHODS as INITIALISATIONS
from wellcond.measurement.budget import TrackingOptions

Choice = str | Mapping[str, Any]


def read_choice(what: str, choice: Choice) -> tuple[str, dict[str, Any]]:
    """Method and options of ``"balanced"`` or ``{"method": "balanced", "target": 3.0}``.

    Raises: ValueError if it is neither.
    """
    if isinstance(choice, str):
        return choice, {}
    if not isinstance(choice, Mapping) or not isinstance(choice.get("method"), str):
        raise ValueError(f"{what}: expected the name of a method or {{'method': name, ...options}}, got {choice!r}")
    return choice["method"], {key: value for key, value in choice.items() if key != "method"}


def check_choices(init: Choice | None, condition: Choice | None, batch: Any = None) -> None:
    """Raise what `init_` and `condition_` would raise about methods and options, before there is a model.

    `batch` is what an initialisation that measures, such as ``calibrated``, runs the model on.
    """
    if init is not None:
        method, options = read_choice("init", init)
        check_method("init_", method, sorted(INITIALISATIONS), instead='condition="{got}"')
        if takes_batch(method) and options.get("batch", batch) is None:
            raise ValueError(
                f"init={method!r} sets scales on a batch, and none was given; give batch=..., what the model is called "
                "with: a tensor, a mapping of its arguments, or a tuple of them. A few samples suffice"
            )
        check_options(method, {key: value for key, value in options.items() if key not in ("sites", "generator")})
    if condition is not None:
        method, options = read_choice("condition", condition)
        check_method("condition_", method, sorted(CORRECTIONS), instead='init="{got}"')
        make_method(method, {k: v for k, v in options.items() if k not in ("sites", "projections", "num_tokens")})


def apply_choices(model: nn.Module, init: Choice | None, condition: Choice | None, batch: Any = None) -> nn.Module:
    """Initialise, then condition, in place; `batch` is for an initialisation that takes one.

    Raises: as `init_` and `condition_`; whatever can be checked is checked before the model is touched.
    """
    check_choices(init, condition, batch)
    if init is not None:
        method, options = read_choice("init", init)
        if takes_batch(method):
            given = options.get("batch", batch)
            options = options | {"batch": on_device(given, next(model.parameters()).device)}
        init_(model, method, **options)
    if condition is not None:
        method, options = read_choice("condition", condition)
        condition_(model, method, **options)
    return model


def takes_batch(method: str) -> bool:
    """Whether an initialisation runs the model on a batch."""
    return "batch" in inspect.signature(INITIALISATIONS[method]).parameters


def without_batch(init: Choice | None) -> Choice | None:
    """What names an initialisation, without the tensors that it runs on."""
    return init if init is None or isinstance(init, str) else {k: v for k, v in init.items() if k != "batch"}


def check_batch(batch: Any) -> None:
    """Raise ValueError for a batch that no model can be called with: neither tensors nor a function of the model."""
    if batch is None or isinstance(batch, torch.Tensor) or callable(batch):
        return
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    if not any(isinstance(part, torch.Tensor) for part in parts):
        found = f"{batch!r:.80}" if not parts else f"a {type(batch).__name__} without a tensor"
        raise ValueError(
            "batch: expected what the model is called with (a tensor, a mapping of its arguments, or a tuple of them), "
            f"got {found}"
        )


def check_switches(**switches: Any) -> None:
    """Raise ValueError for a value other than True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")


def conditionings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Settings of every conditioned part of a model by its name, which is empty for the model itself."""
    found = ((name, settings_of(module)) for name, module in model.named_modules())
    return {name: settings for name, settings in found if settings is not None}


def check_tracking_options(options: Mapping[str, Any]) -> None:
    """Raise what `ConditionTracker` would raise about its options, before there is a model."""
    known = [field.name for field in dataclasses.fields(TrackingOptions)]
    for name in options:
        if name not in known:
            raise UnknownChoiceError("option of ConditionTracker", name, known)
    TrackingOptions(**options)


@contextlib.contextmanager
def preserve_rng_state(collate: Any = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy, torch and a collator's own generators on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    # Trainer wraps a collator that is given to it; generators may be made at the first call.
    holders = [held for held in (collate, getattr(collate, "data_collator", None)) if hasattr(held, "__dict__")]
    before = [(vars(held), dict(vars(held))) for held in holders]
    generators = [value for _, values in before for value in values.values() if isinstance(value, GENERATORS)]
    states = [copy.deepcopy(_state(generator)) for generator in generators]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for now, then in before:
            now.clear()
            now.update(then)
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)


GENERATORS = (torch.Generator, np.random.Generator, random.Random)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


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
    with preserve_rng_state(loader.collate_fn):
        return loader.collate_fn([dataset[i] for i in range(min(count, len(dataset)))])


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


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; 0 if one is 0.

    Example:
        >>> round(geometric_mean([1.0, 100.0]), 6)
        10.0
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if all(v > 0 for v in values) else 0.0

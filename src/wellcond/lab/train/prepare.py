"""From a recipe to data, task and model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellcond.lab.data.progress import Progress, telling
from wellcond.lab.data.registry import load_data, resolve_config
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.changes import add_layer_scale_, add_qk_norm_, check_untrained, remove_norms_, scale_true_
from wellcond.lab.models.trained import load_backbone
from wellcond.lab.recipe import Recipe
from wellcond.lab.seeding import derive
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.augmentation import AugmentationSettings
from wellcond.lab.tasks.base import (
    EVALUATION,
    TASKS,
    AbstractTask,
    TaskContext,
    need_several_classes_in_training,
)
from wellcond.models import ModelSpecError, build_model
from wellcond.weights import load_encoder, load_weights

CALIBRATION_SAMPLES = 64
"""Of the training set, for starts that are calibrated on data."""


def prepare_task(recipe: Recipe, *, seed: int, base: Path | None, progress: Progress | None = None) -> AbstractTask:
    """The task of a recipe with its data; the last one is kept, since the runs of a comparison share it."""
    parts = (recipe.task, recipe.data, recipe.augmentation)
    task, data, augmentation = (part.model_dump(mode="json") for part in parts)
    with_test = recipe.evaluation.test is not None
    key = json.dumps([task, data, augmentation, seed, str(base), with_test], sort_keys=True)
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = _make_task(task, data, augmentation, seed, base, progress, with_test)
    return _KEPT[key]


_KEPT: dict[str, AbstractTask] = {}


def _make_task(
    task: dict,
    data: dict,
    augmentation: dict,
    seed: int,
    base: Path | None,
    progress: Progress | None,
    with_test: bool,
) -> AbstractTask:
    settings, make = TASKS[task["name"]]
    with telling(progress):
        bundle = _bundle(json.dumps(data), base)
    context = TaskContext(bundle, seed, AugmentationSettings.model_validate(augmentation), progress, base, with_test)
    made = make(settings.model_validate(task), context)
    if made.tells_classes_apart:
        need_several_classes_in_training(bundle, task["name"])
    made.data = bundle
    return made


@functools.lru_cache(maxsize=1)
def _bundle(data: str, base: Path | None) -> Any:
    return load_data(resolve_config(json.loads(data)), base=base)


def prepare_model(
    recipe: Recipe,
    method: MethodSettings,
    task: AbstractTask,
    *,
    seed: int,
    base: Path | None,
    local_code: bool = False,
) -> nn.Module:
    """Build the model and apply the method. A seed fixes every other weight, so that methods are paired."""
    kind = recipe.model.name.partition(":")[0]
    arguments = _merge(task.model_arguments(kind), recipe.model.arguments, recipe.model.name)
    name = located(recipe.model.name, base)
    proxy = None if method.library else recipe.proxy
    if proxy is not None:
        _check_proxy(name, method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        model = _build(name, arguments, recipe.model.arguments, task, local_code)
        if recipe.model.norms != "keep":
            remove_norms_(model, recipe.model.norms, lambda: _check_takes(model, task, recipe.model.name))
        _check_takes(model, task, recipe.model.name)
        if recipe.model.qk_norm:
            add_qk_norm_(model, lambda: _check_takes(model, task, recipe.model.name))
        if recipe.model.layer_scale is not None:
            add_layer_scale_(model, recipe.model.layer_scale, lambda: _check_takes(model, task, recipe.model.name))
    if proxy is not None:
        scale_true_(model, proxy.width)
    if recipe.model.weights is not None:
        load_weights(model, (base or Path()) / recipe.model.weights)
    if recipe.model.encoder is not None:
        encoder = recipe.model.encoder.replace("{method}", method.slug).replace("{seed}", str(seed))
        path = (base or Path()) / encoder
        if hasattr(model, "encoder_prefix"):
            load_backbone(model, path, method)
        else:
            load_encoder(model, path)
        if "{method}" in recipe.model.encoder:  # its initialisation was that of pre-training
            method = method.model_copy(update={"init": "default", "init_options": {}, "tokens": {}})

    def build_teacher(name: str, given: dict[str, Any]) -> nn.Module:
        return _build(name, task.model_arguments(name.partition(":")[0]) | given, {}, task, local_code=False)

    def forward(model: nn.Module) -> None:
        batch = task.train.fetch([(sample, 0) for sample in range(min(CALIBRATION_SAMPLES, len(task.train)))])
        task.loss(model, batch)

    return method.apply_(model, seed=derive(seed, "method"), base=base, build=build_teacher, forward=forward)


def _check_proxy(name: str, method: MethodSettings) -> None:
    """Raise RecipeError for a model or a method whose start would not be that of the larger model."""
    check_untrained(name)
    if method.init == "default" and method.init_options and method.init_options.get("rule") != "torch":
        raise RecipeError(
            f"proxy: {method.label} draws the attention again at the scale of the library; expected default, which is "
            "scale-true, or default(library=true)"
        )


def located(name: str, base: Path | None) -> str:
    """A model's name with the file or folder in it taken from the recipe's folder."""
    kind, _, rest = name.partition(":")
    if base is None or kind in ("timm", "wellcond"):
        return name
    if kind == "hf":
        return f"hf:{base / rest}" if (base / rest).is_dir() else name
    return str(base / name)


def _check_takes(model: nn.Module, task: AbstractTask, name: str) -> None:
    """Raise RecipeError if the model does not take one sample: too small an image, too long a text."""
    was_training = [(module, module.training) for module in model.modules()]
    batch = task.evaluation.fetch([(0, EVALUATION)])
    try:
        model.eval()  # on its own: some classes override train() and return nothing
        with torch.no_grad():
            task.score(model, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise RecipeError(f"model: {name} does not take the data of this task ({shapes}): {error}") from error
    finally:
        for module, training in was_training:
            module.training = training


def _merge(needed: dict[str, Any], given: dict[str, Any], name: str) -> dict[str, Any]:
    for key in ("num_classes", "num_labels", "in_chans", "num_channels", "vocab_size"):
        if key not in given or key not in needed or given[key] == needed[key]:
            continue
        if key != "vocab_size" or given[key] < needed[key]:  # embeddings that no token uses do no harm
            raise RecipeError(f"model.arguments.{key}: the data need {needed[key]}, found {given[key]} for {name}")
    return needed | given


def _build(
    name: str, arguments: dict[str, Any], given: dict[str, Any], task: AbstractTask, local_code: bool
) -> nn.Module:
    """Build a model from all its arguments, of which `given` are those that somebody wrote down."""
    try:
        return build_model(name, arguments, auto_class=task.auto_class(), local_code=local_code)
    except ModelSpecError as error:
        # Some of timm's models take images of any size, and no img_size.
        takes_no_size = isinstance(error.__cause__, TypeError) and "img_size" in str(error.__cause__)
        if not takes_no_size or "img_size" in given:
            raise RecipeError(f"model: {error}") from error
    fewer = {key: value for key, value in arguments.items() if key != "img_size"}
    try:
        return build_model(name, fewer, auto_class=task.auto_class(), local_code=local_code)
    except ModelSpecError as error:
        raise RecipeError(f"model: {error}") from error

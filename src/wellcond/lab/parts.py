"""A recipe from parts: a shipped one or one for the user's own model and data, fitted to what there is."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellcond.errors import OptionError, RecipeError
from wellcond.lab.data.base import Data, SourceConfig
from wellcond.lab.data.own import ObjectConfig, held_data, source_of
from wellcond.lab.load_recipe import load_recipe, merge, recipe_from
from wellcond.lab.models.build import is_local_code
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import Interval
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.train.prepare import load_cached_data, prepare_task
from wellcond.lab.user_code import UserCode, import_file, name_of, takes

FEWEST_UPDATES = 300
"""Of a run on the user's own data; recipes count epochs, which may be a single update of a small folder."""
OWN: dict[str, dict[str, Any]] = {
    "image": {
        "name": "images",
        "title": "Your model on your images",
        "scale": "tiny",
        "task": {"name": "image_classification"},
        "methods": ["default", "gaussian", "conditioned", "calibrated"],
        "seeds": [0, 1, 2, 3, 4],
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "warmup": {"steps": 20}},
        "augmentation": {"flip": 0.5},
        "training": {"length": {"steps": FEWEST_UPDATES}, "batch_size": 32, "threads": 1},
        "evaluation": {"every": {"steps": 100}, "batch_size": 64},
        "checkpoint": {"every": {"steps": 100}},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    },
}
OWN["text"] = OWN["image"] | {
    "name": "texts",
    "title": "Your model on your texts",
    "task": {"name": "sequence_classification", "length": 256},
    "augmentation": {},
}
OWN["tokens"] = OWN["text"] | {"name": "tokens", "title": "Your model on your tokens"}
MODELS = {
    "image": {
        "name": "timm:vit_tiny_patch16_224",
        "arguments": {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4},
    },
    "text": {"name": "wellcond:long_range", "arguments": {"landmarks": 32}},
}
LARGEST_SIDE = 64
"""Of images that a model of scale tiny gets, unless it or the user says otherwise."""


@dataclass(frozen=True)
class OwnParts:
    """A recipe with the user's model and data in it."""

    recipe: Recipe
    base: Path | None
    code: UserCode
    model: str = ""
    """A word for a model that is not the recipe's."""
    data: str = ""
    """A word for data that are not the recipe's."""
    from_parts: bool = False
    """Whether there was no recipe to begin with."""

    @property
    def trusted(self) -> bool:
        """Whether the user named all code of model and data in this call."""
        model = bool(self.model) or not is_local_code(self.recipe.model.name)
        return model and (bool(self.data) or not self.recipe.data.local_code)


def join_parts(
    recipe: str | Path | Recipe | None,
    scale: str | None,
    settings: Sequence[str],
    model: str | Callable[..., Any] | None,
    data: Any,
    data_options: dict[str, Any],
    files: Sequence[str | Path],
    say: Callable[[str], Any],
) -> OwnParts:
    """The recipe of a comparison, or one for the user's model and data; `say` gets what was changed to fit the data."""
    imported = tuple(Path(file).resolve() for file in files)
    for file in imported:
        import_file(file)
    if data is None and data_options:
        raise OptionError("--input and --label name columns of --data; give it too")
    if recipe is None and data is None:
        raise OptionError("expected a recipe, or data with a model or the default one, found neither")
    source = None if data is None else source_of(data, **data_options)
    models: dict[str, Callable[..., Any]] = {}
    changes: dict[str, Any] = {}
    word = ""
    if callable(model):
        word = name_of(model)
        models[word] = model
        changes["model"] = {"name": f"python:{word}"}
    elif model is not None:
        word = re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")
        changes["model"] = {"name": model}
    if model is not None:
        changes["proxy"] = None  # of the recipe's model
    if source is not None:
        changes["data"] = source.model_dump(mode="json", exclude_defaults=True) | {"source": source.source}
    held = (source, held_data(source)) if isinstance(source, ObjectConfig) else None
    code = UserCode(imported, models, data=held)
    code.install()
    base: Path | None = None
    if isinstance(recipe, Recipe) and not changes and not settings:
        made = recipe
    elif isinstance(recipe, Recipe):
        made = recipe_from(recipe.model_dump(mode="json"), settings, changes, "the recipe")
    elif recipe is not None:
        made, base = load_recipe(str(recipe), scale=scale, overrides=settings, changes=changes)
    else:
        assert source is not None
        kind = load_cached_data(source.model_dump_json(), None, local_code=True).kind
        if kind not in OWN:
            raise RecipeError(f"expected images, texts or tokens without a recipe, found {kind}; give a recipe too")
        own = merge({"model": MODELS.get(kind, MODELS["text"]), **OWN[kind]}, {"data": changes["data"]})
        own["model"] = changes.get("model", own["model"])
        made = recipe_from(own, settings, {}, "the recipe")
    given = {one.partition("=")[0].strip() for one in settings}
    if source is not None:
        made = fit_to_data(made, base, given, model, say)
    place = "" if source is None else word_for(data, source)
    return OwnParts(made, base, code, word, place, recipe is None)


def word_for(data: Any, source: SourceConfig) -> str:
    """A word for a user's data, by which folders of runs differ: a name, and a mark of the place on this machine."""
    name = str(getattr(source, "name", "") or data)
    path = Path(name)
    if isinstance(data, (str, Path)) and path.exists():
        mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:4]
        name = f"{path.resolve().stem}-{mark}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]


def choose_folder(parts: OwnParts, ending: str = "") -> Path:
    """The folder of a comparison below runs/, named after recipe, model and data."""
    words = (parts.recipe.name, parts.recipe.scale, parts.model, parts.data)
    return Path("runs") / ("-".join(filter(None, words)) + ending)


def fit_to_data(recipe: Recipe, base: Path | None, given: set[str], model: Any, say: Callable[[str], Any]) -> Recipe:
    """The recipe for the user's own data: their size, their splits, and as many updates as a model needs to learn.

    Fields that the user has `given` stay; `say` gets a line for every change.
    """
    data = load_cached_data(recipe.data.model_dump_json(), base, local_code=True)
    changes: dict[str, Any] = {}
    if recipe.evaluation.test is not None and "test" not in TaskContext(data, seed=0).splits:
        say("note: evaluation.test=null, since the data have no test split; results are on the evaluation set")
        changes["evaluation"] = recipe.evaluation.model_copy(update={"test": None})
    if data.kind == "image" and not {"task", "task.image_size"} & given:
        changes["task"] = recipe.task.model_copy(update={"image_size": choose_size(recipe, data, model, say)})
    recipe = recipe.model_copy(update=changes)
    count = len(prepare_task(recipe, seed=recipe.seeds[0], base=base, local_code=True).train)
    training, parts = recipe.training, recipe.training.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
    fitting = count // parts * parts
    if training.batch_size > count and fitting:
        size = max(parts, fitting // 4 // parts * parts)
        say(f"note: training.batch_size={size}, since there are only {count} training samples")
        training = training.model_copy(update={"batch_size": size})
    recipe = recipe.model_copy(update={"training": training})
    if {"training", "training.length", "training.length.epochs"} & given:
        return recipe
    return _lengthened(recipe, max(1, count // training.batch_size), say)


def _lengthened(recipe: Recipe, per_epoch: int, say: Callable[[str], Any]) -> Recipe:
    """The recipe with enough updates: everything that it counts in epochs is as much longer as its length."""
    steps = recipe.training.length.in_steps(per_epoch)
    if steps >= FEWEST_UPDATES or recipe.training.length.epochs is None:
        return recipe
    factor = math.ceil(FEWEST_UPDATES / steps)
    length = recipe.training.length.epochs * factor
    say(f"note: training.length={{epochs: {length:g}}}, since {recipe.training.length.epochs:g} are {steps} updates")

    def longer(value: Any) -> Any:
        if isinstance(value, Interval):
            return value if value.epochs is None else Interval(epochs=value.epochs * factor)
        if isinstance(value, tuple) and value and isinstance(value[0], Interval):
            return tuple(map(longer, value))
        if hasattr(value, "model_fields_set"):
            fields = {name: longer(getattr(value, name)) for name in type(value).model_fields}
            return value.model_copy(update=fields)
        return value

    parts = ("training", "schedule", "evaluation", "checkpoint", "tracking")
    return recipe.model_copy(update={name: longer(getattr(recipe, name)) for name in parts})


def choose_size(recipe: Recipe, data: Data, model: Any, say: Callable[[str], Any]) -> int:
    """Side of the images: their own, rounded up to what patches divide (16), up to what the model is made for."""
    first = data.train[0]["image"]
    sides = tuple(first.shape[-2:]) if isinstance(first, torch.Tensor) else first.size
    if isinstance(first, torch.Tensor) and first.is_floating_point():  # normalised already, and never resized
        return int(sides[0])
    most = None if model is None else native_size(model, recipe.model.arguments)
    if most is None:
        most = LARGEST_SIDE if recipe.scale == "tiny" else max(sides)
    size = min(math.ceil(min(sides) / 16) * 16, most)
    if size != getattr(recipe.task, "image_size", None) or (size, size) != sides:
        say(f"note: task.image_size={size}; the first image has {sides[0]} x {sides[1]} pixels")
    return size


def native_size(model: str | Callable[..., Any], arguments: dict[str, Any]) -> int | None:
    """Side of the images that a model is made for; None if it does not say, or takes any."""
    for name in ("img_size", "image_size"):
        if isinstance(arguments.get(name), int):
            return int(arguments[name])
    if callable(model):
        return _default_size(model)
    kind, _, rest = model.partition(":")
    if kind == "timm":
        import timm

        found = timm.get_pretrained_cfg(rest, allow_unregistered=True) if timm.is_model(rest) else None
        return None if found is None or found.input_size is None else int(found.input_size[-1])
    if kind == "hf":
        import transformers

        folder = Path(rest)
        if folder.is_dir():
            from wellcond.lab.models.build import read_hf_config

            config = read_hf_config(folder)
        elif rest in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(rest)
        else:
            return None
        size = getattr(config, "image_size", None)
        return int(size) if isinstance(size, int) else None
    if ".py:" in model:
        from wellcond.lab.models.build import load_function

        return _default_size(load_function(model))
    return None


def _default_size(function: Callable[..., Any]) -> int | None:
    import inspect

    for name in takes(function)[0] & {"img_size", "image_size"}:
        default = inspect.signature(function).parameters[name].default
        if isinstance(default, int):
            return default
    return None

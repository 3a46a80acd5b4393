"""What a comparison runs: a recipe that fits model and data, methods at fair values, its jobs, and what says so."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wellcond.errors import FairnessWarning, OptionError, RecipeError, RunError
from wellcond.lab.data.base import Data, SourceConfig
from wellcond.lab.data.own import ObjectConfig, held_data, source_of
from wellcond.lab.methods import MethodSettings, check_distinct
from wellcond.lab.models.build import is_local_code, load_function, read_hf_config
from wellcond.lab.recipe import Recipe, config_hash, load_recipe, override_recipe, recipe_from
from wellcond.lab.records import SCHEMA
from wellcond.lab.settings import Interval, merge
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.train.prepare import load_cached_data, prepare_task
from wellcond.lab.train.run import Job, describe_change
from wellcond.lab.train.run_folder import RunFolder, read_sealed, write_sealed, writing
from wellcond.lab.user_code import UserCode, import_file, name_of, takes

KIND = "wellcond-comparison"
RATE = "optimizer.lr"


def plan_comparison(
    recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], folder: Path, **options: Any
) -> list[Job]:
    """All runs, seed by seed, so that an interrupted comparison has complete pairs.

    Methods train at the values that the recipe has from a search if it has them for all of them (`settle_methods`);
    FairnessWarning if some of them have such values and are left without.
    """
    check_distinct(methods)
    if not methods:
        raise RecipeError("expected methods to compare, found none; give --methods, or `methods` in the recipe")
    if recipe.baseline not in [method.label for method in methods]:
        raise RecipeError(f"the baseline {recipe.baseline!r} is not among the methods; add it, or set baseline")
    settled = settle_methods(recipe, methods)
    if settled.unsearched:
        warnings.warn(settled.note, FairnessWarning, stacklevel=2)
    return [
        Job(recipe, method, seed, folder / method.slug / f"seed{seed}", **options)
        for seed in seeds
        for method in settled.methods
    ]


def settings_hash(recipe: Recipe) -> str:
    """Hash of the settings that all runs of a comparison share."""
    return config_hash(recipe.config(MethodSettings(init="default"), 0))


def check_settings(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """comparison.json, if any; RunError if it is of another recipe, or under other settings."""
    path = folder / "comparison.json"
    if not path.exists():
        return {"methods": [], "seeds": []}
    former, settings = read_comparison(path), settings_hash(recipe)
    if (former["recipe"], former["scale"]) != (recipe.name, recipe.scale):
        problem = f"a comparison of {former['recipe']} ({former['scale']}), not of {recipe.name} ({recipe.scale})"
    elif former.get("settings_hash", settings) != settings:
        problem = f"a comparison of {recipe.name} under other settings"
        if runs := sorted(folder.glob("*/seed*/run.json")):
            there = (RunFolder(runs[0].parent).read_record() or {})["config"]
            method = recipe.at_tuned(MethodSettings.model_validate(there["method"] | {"set": {}}))
            problem += describe_change(there, override_recipe(recipe, method).config(method, there["seed"]))
    else:
        return former
    raise RunError(f"{folder} holds {problem}. Give another folder with --folder")


def write_comparison(
    folder: Path, recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], rates: str = ""
) -> None:
    """Write comparison.json; methods and seeds of an earlier call stay listed.

    `rates` says which learning rates the methods have and where those are from.
    """
    former, path = check_settings(folder, recipe), folder / "comparison.json"
    listed = [{"label": method.label, "slug": method.slug} for method in methods]
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "name": recipe.name,
        "title": recipe.title,
        "recipe": recipe.name,
        "scale": recipe.scale,
        "settings_hash": settings_hash(recipe),
        "methods": [*former["methods"], *(row for row in listed if row not in former["methods"])],
        "baseline": recipe.baseline,
        "seeds": sorted({*seeds, *former["seeds"]}),
        "notes": recipe.description,
        **({"rates": rates} if rates else {}),
    }
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_sealed(path, content)


def read_comparison(path: Path) -> dict[str, Any]:
    """comparison.json; RunError if it is not one, or was changed."""
    advice = "Delete it, then run the same command: it is written again, and the runs are kept"
    return read_sealed(path, KIND, advice, ("methods", "seeds", "recipe", "scale"))


# Searched values in a comparison: every method has them, or none has.


class Settled(NamedTuple):
    """Methods as a comparison trains them."""

    methods: tuple[MethodSettings, ...]
    note: str
    """Which learning rates they have and where those are from, for people and for the record."""
    lacking: tuple[str, ...] = ()
    """Methods without a searched value, because of which the others do without theirs."""
    outdated: bool = False
    """Whether searched values are left out because they are of another model or other data."""

    @property
    def unsearched(self) -> bool:
        """Whether searched values of some methods are left out."""
        return self.outdated or bool(self.lacking)


def settle_methods(
    recipe: Recipe, methods: Sequence[MethodSettings], *, but: Collection[str] = (), command: str = ""
) -> Settled:
    """Methods of a comparison at the values that the recipe has from a search, if it has them for all of them.

    If one method has no searched value of a field, and does not set it itself, none gets one: all of them train at the
    recipe's own values, and the note names the ``--tune`` option that searches them, to be added to `command`, by
    default the one that is running. Fields of `but` are searched by the comparison itself.
    """
    methods, tuned, add = tuple(methods), recipe.tuned, f"run {command}" if command else "add"
    if tuned is None or not any(tuned.values.values()):
        return Settled(methods, _describe_recipe(recipe, but, add))
    current = tuned.model_copy(update={"changed": ()})
    found = {method.label: current.find(method) for method in methods}
    fields = sorted({field for values in found.values() for field in values} - set(but))
    if not fields:
        return Settled(methods, _describe_recipe(recipe, but, add))
    own = {field: value_at(recipe, field) for field in fields}
    at_own = ", ".join(f"{field}={show_value(value)}" for field, value in own.items())
    for_all = f"every method trains at the recipe's own {at_own}"
    if tuned.outdated:
        changed = ", ".join(tuned.outdated)
        search = _tune_options({field: around(value) for field, value in own.items()})
        note = (
            f"The values of {', '.join(fields)} that were searched for this recipe ({tuned.record}) are not used, "
            f"since {changed} changed: {for_all}. To compare each method at its best, {add} {search}"
        )
        return Settled(methods, note, outdated=True)
    lacking = [
        method.label
        for method in methods
        if any(field not in method.set and field not in found[method.label] for field in fields)
    ]
    if lacking:
        known = {field: [values[field] for values in found.values() if field in values] for field in fields}
        search = _tune_options({field: sorted_numbers([own[field], *known[field]]) for field in fields})
        note = (
            f"There is no searched value of {', '.join(fields)} for {', '.join(lacking)}, so {for_all}, also those "
            f"that have one ({tuned.record}). To compare each method at its best, {add} {search}"
        )
        return Settled(methods, note, tuple(lacking))
    where = tuned.record
    if tuned.changed:
        where += f", which had other values of {', '.join(tuned.changed)}"
    note = f"Each method trains at its searched value of {', '.join(fields)} ({where})"
    return Settled(tuple(recipe.at_tuned(method, but=but) for method in methods), note)


def describe_rate(recipe: Recipe, method: MethodSettings) -> str:
    """The learning rate of a method in a run by itself, and where it is from."""
    tuned = recipe.tuned
    rate = recipe.at_tuned(method).set.get(RATE, value_at(recipe, RATE))
    if RATE in method.set:
        origin = "as the method sets it"
    elif tuned is not None and RATE in tuned.find(method):
        origin = (
            f"searched for this method ({tuned.record}); `compare` with a method for which none was searched trains "
            f"all at {show_value(value_at(recipe, RATE))}"
        )
    else:
        origin = "of the recipe; none was searched for this method"
        if tuned is not None and tuned.outdated and any(tuned.values.values()):
            origin = f"of the recipe; searched ones are not used, since {', '.join(tuned.outdated)} changed"
    return f"learning rate {show_value(rate)}, {origin}"


def _describe_recipe(recipe: Recipe, but: Collection[str], add: str) -> str:
    if RATE in but:
        return ""
    rate = value_at(recipe, RATE)
    search = _tune_options({RATE: around(rate)})
    return (
        f"Learning rates were not searched: {show_value(rate)} for every method that sets none itself. To compare each "
        f"method at its best, {add} {search}"
    )


def _tune_options(grids: Mapping[str, Sequence[float]]) -> str:
    """Options of `wellcond compare` that search fields, each over its values."""
    return " ".join(f"--tune {field}={','.join(map(show_value, values))}" for field, values in grids.items())


def value_at(recipe: Recipe, path: str) -> Any:
    """The value of a field such as ``optimizer.lr``; None where it is not set."""
    value: Any = recipe.model_dump(include={path.partition(".")[0]})
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def around(value: Any) -> list[float]:
    """A grid of three values around a number, a factor of three apart."""
    return [float(f"{value * factor:.3g}") for factor in (1 / 3, 1, 3)] if is_number(value) else [0.1, 1]


def sorted_numbers(values: Sequence[Any]) -> list[float]:
    """Different numbers among some values, ascending; with neighbours if there is only one."""
    found = sorted({value for value in values if is_number(value)})
    return found if len(found) > 1 else around(found[0] if found else None)


def is_number(value: Any) -> bool:
    """Whether a value is a positive number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def show_value(value: Any) -> str:
    """A value as an option takes it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# A recipe from parts: a shipped one or one for the user's own model and data, fitted to what there is.

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
OWN["language"] = OWN["image"] | {
    "name": "text",
    "title": "Your language model on your text",
    "task": {"name": "language_modelling", "context": 128},
    "training": {"length": {"steps": FEWEST_UPDATES}, "batch_size": 16, "threads": 1},
    "augmentation": {},
}
"""For texts without labels: the next byte is what a model learns."""
MODELS = {
    "language": {"name": "wellcond:nanogpt", "arguments": {"layers": 4, "heads": 4, "width": 128}},
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

    def job_options(self, *, cpu: bool, local_code: bool = False) -> dict[str, Any]:
        """What every job needs besides recipe, method and seed."""
        allowed = local_code or self.trusted
        return {"base": self.base, "cpu": cpu, "local_code": allowed, "user_code": self.code}


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
        read = load_cached_data(source.model_dump_json(), None, local_code=True)
        kind = "language" if read.kind == "text" and read.train.labels is None else read.kind
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
            config = read_hf_config(folder)
        elif rest in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(rest)
        else:
            return None
        size = getattr(config, "image_size", None)
        return int(size) if isinstance(size, int) else None
    if ".py:" in model:
        return _default_size(load_function(model))
    return None


def _default_size(function: Callable[..., Any]) -> int | None:

    for name in takes(function)[0] & {"img_size", "image_size"}:
        default = inspect.signature(function).parameters[name].default
        if isinstance(default, int):
            return default
    return None

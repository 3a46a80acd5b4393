"""A recipe: everything that decides what a run does, validated before anything starts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

import wellcond.lab.data  # noqa: F401  (registers the sources)
import wellcond.lab.tasks  # noqa: F401  (registers the tasks)
from wellcond.errors import RecipeError
from wellcond.lab.data.base import SourceConfig, resolve_config
from wellcond.lab.methods import MethodSettings, check_distinct
from wellcond.lab.models.changes import ProxySettings
from wellcond.lab.optimizers import Constant, OptimizerSettings, ScheduleSettings
from wellcond.lab.settings import (
    Interval,
    Scale,
    Settings,
    change_fields,
    choose_by_name,
    list_problems,
    plain_numbers,
    read_fields,
    set_path,
)
from wellcond.lab.tasks.base import TASKS, AugmentationSettings, ModelSettings


def _check_folder_name(name: str) -> str:
    """Text that becomes a part of a path, which it cannot leave."""
    if not re.fullmatch(r"[^\W_][\w.+ -]*", name):
        raise ValueError("expected a name for a folder: letters, digits, and . _ + - or spaces after the first")
    return name


class AveragingSettings(Settings):
    """Exponential moving average of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)]
    evaluate: bool = True
    """Whether the average is what is evaluated; kept beside the weights otherwise."""


class TrainingSettings(Settings):
    """How long, and with how much at once."""

    length: Interval
    hours: PositiveFloat | None = None
    """Time that may be spent on training alone; `length` is then an upper limit, and the schedule of such a length is
    squeezed into the time. Not reproducible to the bit."""
    batch_size: PositiveInt
    """Samples of one update, over all processes and accumulations."""
    accumulate: PositiveInt = 1
    """Parts in which a process computes its share of an update."""
    batch_ramp: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the length, or of the time, over which the batch grows from one part (batch_size / accumulate) to all of
    them. Epochs are then still those of full batches in `length` and other intervals; records count what was seen."""
    clip_norm: PositiveFloat | None = None
    averaging: AveragingSettings | None = None
    diverged_above: PositiveFloat | None = 10.0
    """A mean loss of this many times the first one ends the run as diverged; null: only a loss that is not finite."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that decode and augment, where that is slow."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Of torch on the CPU; null leaves torch's own choice."""
    log_every: PositiveInt = 10
    recompute: bool = False
    """Whether activations inside blocks are computed again for the backward pass instead of kept: a third more work,
    a fraction of the memory."""
    shard: bool = False
    """Whether several processes divide weights, gradients and the optimiser's state among them, block by block (FSDP2),
    instead of each having all (DDP)."""


class PrecisionSettings(Settings):
    """Number formats, their order in memory, and compilation."""

    mixed: Literal["no", "bf16", "fp16"] = "no"
    tf32: bool = False
    """Whether a GPU may round the factors of float32 matrix products to 10 bits; what is in bf16 stays so."""
    channels_last: bool = False
    """Whether images and weights of convolutions are stored with their channels last, which GPUs prefer in half
    precision."""
    compile: str | None = None
    """Backend of torch.compile, such as inductor; null for none."""

    @model_validator(mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, values: Any) -> Any:
        """YAML reads no and off as false, which for these fields can only mean that there is none."""
        if not isinstance(values, dict):
            return values
        off = {"mixed": "no", "compile": None}
        return {name: off[name] if name in off and value is False else value for name, value in values.items()}


class EvaluationSettings(Settings):
    """When and how to score."""

    every: Interval = Interval(epochs=1)
    batch_size: PositiveInt = 256
    samples: PositiveInt | None = None
    """Score only so many samples, the first of the evaluation set, at every evaluation, the last one too; null: all."""
    test: Literal["best", "last"] | None = None
    """Score the whole test split once, after training: with the weights of the best evaluation, or with the last."""


class CheckpointSettings(Settings):
    """When to save what resuming needs."""

    every: Interval = Interval(epochs=1)


class TrackingSettings(Settings):
    """When to measure conditioning."""

    weights_every: Interval | None = Interval(epochs=1)
    """Condition numbers of the weights, and the attention maps."""
    jacobian_points: Annotated[int, Field(ge=0, le=10_000)] = 12
    """How often to measure the Jacobian: first, last, and logarithmically spaced between."""
    samples: PositiveInt = 1
    stacked: bool = False
    """Whether the Jacobian is the papers' matrix [J_Q; J_K; J_V], which is defined for plain softmax attention."""
    heads: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | Literal["all"] | None = None
    """These key/value heads of each layer, or all; null: the first."""
    budget: Annotated[float, Field(gt=0, le=1)] | None = 0.1
    """Share of the training time, or ten seconds if that is more, beyond which the Jacobian is not measured: of all
    chosen heads at a step or of none. null: whatever is due is measured, however long it takes."""


class LoggingSettings(Settings):
    """What is kept of a run besides its results."""

    trackers: tuple[str, ...] = ()
    """Where metrics go besides the run's folder, through Accelerate: tensorboard, wandb, ..."""
    monitor_every: PositiveInt | None = None
    """Steps between readings of every head by `AttentionMonitor`, into monitor.jsonl of the run's folder; null: none.
    It changes no number of the run."""


class TunedSettings(Settings):
    """Values of fields that a search found for methods, and where its record is."""

    record: str
    """The comparison with the search: a folder, or a packed file without its ending."""
    values: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Fields and their values by method, in text such as ``conditioned`` or ``identity(lam=1)``."""
    changed: tuple[str, ...] = ()
    """Fields that have other values than in the recipe; `load_recipe` fills it in."""

    @field_validator("values")
    @classmethod
    def _by_canonical_text(cls, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {MethodSettings.model_validate(text).canonical(): fields for text, fields in values.items()}

    @property
    def outdated(self) -> tuple[str, ...]:
        """Changed fields that make it another problem, for which the values mean nothing."""
        return tuple(path for path in self.changed if path.partition(".")[0] in PROBLEM or path == "optimizer.name")

    def find(self, method: MethodSettings) -> dict[str, Any]:
        """What was found for a method, whatever its label and whether options at their default are written out.

        Fields that the method sets itself are left out; nothing is found if the values are outdated.
        """
        if self.outdated:
            return {}
        for text, values in self.values.items():
            if MethodSettings.model_validate(text).is_same(method, but=values):
                return {field: value for field, value in values.items() if field not in method.set}
        return {}


PROBLEM = ("task", "data", "model", "proxy")
"""Parts of a recipe that say what is learned, and by what: searched values are of these, and of one optimiser."""


class Recipe(Settings):
    """One task, one model, one way to train; and the methods and seeds to compare."""

    name: Annotated[str, AfterValidator(_check_folder_name)]
    """Runs are in a folder of this name, unless --folder says otherwise."""
    title: str = ""
    description: str = ""
    scale: Scale
    task: Annotated[
        SerializeAsAny[Settings], BeforeValidator(choose_by_name("task", *(kind for kind, _ in TASKS.values())))
    ]
    data: Annotated[SerializeAsAny[SourceConfig], BeforeValidator(resolve_config)]
    model: ModelSettings
    proxy: ProxySettings | None = None
    """The model that this one stands in for: matrices of the blocks start at its sigma sqrt(fan_in)."""
    method: MethodSettings = MethodSettings(init="default")
    methods: tuple[MethodSettings, ...] = ()
    """Those of a comparison."""
    baseline: str = "default"
    seeds: tuple[NonNegativeInt, ...] = (0, 1, 2, 3, 4)
    optimizer: OptimizerSettings
    schedule: ScheduleSettings = Constant()
    augmentation: AugmentationSettings = AugmentationSettings()
    training: TrainingSettings
    precision: PrecisionSettings = PrecisionSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    logging: LoggingSettings = LoggingSettings()
    tuned: TunedSettings | None = None
    """What `wellcond compare --tune` found for methods; in a comparison it is used if it is there for all of them."""

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: expected different numbers, found {list(self.seeds)}")
        check_distinct(self.methods)
        for method in (self.method, *self.methods):
            override_recipe(self, method)
        for field in ("weights", "encoder"):
            if self.proxy is not None and getattr(self.model, field) is not None:
                raise ValueError(
                    f"proxy: expected a model that starts from scratch, found model.{field}, which replaces the start; "
                    "remove one of them (proxy: null)"
                )
        for text, values in self.tuned.values.items() if self.tuned is not None else ():
            method = MethodSettings.model_validate(text)
            override_recipe(self, method.model_copy(update={"set": method.set | values}))
        return self

    def at_tuned(self, method: MethodSettings, *, but: Collection[str] = ()) -> MethodSettings:
        """The method at the values that were searched for it, except for fields that it sets itself and those of `but`.

        This is for a run by itself. In a comparison every method has such values or none: `settle_methods`.
        """
        found = {} if self.tuned is None else self.tuned.find(method)
        kept = {field: value for field, value in found.items() if field not in but}
        return MethodSettings.model_validate(method.model_dump() | {"set": method.set | kept}) if kept else method

    def config(self, method: MethodSettings, seed: int) -> dict[str, Any]:
        """The resolved recipe of one run."""
        data = self.model_dump(mode="json", exclude={"method", "methods", "baseline", "seeds", "tuned"})
        return data | {"method": method.model_dump(mode="json"), "seed": seed}


NEUTRAL = {
    "schedule.rate_of": "update",
    "schedule.over_warmup": False,
    "augmentation.mixed_together": 1,
    "tracking.stacked": False,
    "precision.tf32": False,
    "precision.channels_last": False,
    "optimizer.fused": False,
    "task.metric": "perplexity",
    "optimizer.heads": "fused",
}
"""Fields that came after the first records, with the values at which a run is what it was without them.

A later field may also be None, which is the same as none.
"""


WITHOUT_EFFECT = {"training": ("workers", "recompute", "shard"), "tracking": ("budget",)}
"""Fields by part that change how a run is computed, to rounding, or how much of it is measured."""


def with_effect(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that changes a run's numbers; a run may be resumed with another rest.

    Fields that are None, and those of `NEUTRAL` at their values there, are left out, so that older records keep their
    hash.
    """
    kept = {key: value for key, value in config.items() if key not in ("title", "description", "checkpoint", "logging")}
    for path, neutral in NEUTRAL.items():
        part, _, field = path.partition(".")
        kept[part] = {key: value for key, value in (kept.get(part) or {}).items() if (key, value) != (field, neutral)}
    for part, fields in WITHOUT_EFFECT.items():
        kept[part] = {key: value for key, value in (kept.get(part) or {}).items() if key not in fields}
    if not kept["tracking"].get("jacobian_points") and kept["tracking"].get("weights_every") is None:
        kept["tracking"] = {}  # nothing is measured
    # What a method sets is in the other parts of the configuration already.
    kept["method"] = {key: value for key, value in kept["method"].items() if key not in ("label", "set")}
    return _without_none(plain_numbers(kept))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def config_hash(config: dict[str, Any]) -> str:
    """16 hexadecimal digits that name what a run computes."""
    return hashlib.sha256(json.dumps(with_effect(config), sort_keys=True).encode()).hexdigest()[:16]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two configurations differ, such as ``optimizer.lr: 1 there, 2 here``."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for key in a | b for line in differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))]
    return [] if a == b else [f"{path}: {a!r} there, {b!r} here"]


# `set(...)` of a method: fields of the recipe that one method changes for its own runs.

PARTS = ("optimizer", "schedule", "augmentation", "model", "training")
MethodParts = create_model(
    "MethodParts",
    __base__=Settings,
    **{part: (Recipe.model_fields[part].rebuild_annotation(), None) for part in PARTS},  # type: ignore[call-overload]
)
"""The parts that a method changes, each checked as in a recipe."""
ALLOWED = re.compile(
    r"(optimizer|schedule|augmentation)\..+|training\.(clip_norm|averaging)(\..+)?"
    r"|model\.(?!(name|arguments|weights|encoder)\b).+"  # those make another model, which is no pair of the others
)


def override_recipe(recipe: Recipe, method: MethodSettings) -> Recipe:
    """The recipe of a method's runs: its `set` applied; the recipe itself if it has none."""
    if not method.set:
        return recipe
    fields: dict[str, Any] = {}
    try:
        for field, value in method.set.items():
            if not ALLOWED.fullmatch(field):
                raise ValueError(
                    "expected a field that one method may change (of optimizer, schedule and augmentation, "
                    "training.clip_norm, training.averaging, and what of model leaves it the same model), found "
                    f"{field!r}: all runs of a comparison share the others; change those for all with --set"
                )
            part = field.partition(".")[0]
            if part not in fields:
                former = getattr(recipe, part)
                fields[part] = former.model_dump(mode="json", exclude_unset=True)
                fields[part] |= {"name": former.name} if part in ("optimizer", "schedule") else {}
            set_path(fields, field, value)
        changed = MethodParts.model_validate(fields)
    except ValueError as error:
        raise RecipeError(f"{method.label}: set: {'; '.join(list_problems(error))}") from error
    return recipe.model_copy(update={part: getattr(changed, part) for part in fields})


def load_recipe(
    name_or_path: str,
    *,
    scale: str | None = None,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> tuple[Recipe, Path | None]:
    """A recipe, shipped or in a YAML file, and the folder its relative paths start from (None for one that ships).

    `scale` is by default the smallest that ships; `overrides` are ``path.to.field=value``, values in YAML; before them,
    parts of it are replaced by `changes`. What is wrong can often be seen before torch is imported.
    """
    fields, base, where = read_fields(name_or_path, scale)
    return recipe_from(fields, overrides, changes or {}, where), base


def recipe_from(fields: dict[str, Any], overrides: Sequence[str], changes: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from its fields, with parts replaced by `changes`, then with `overrides`; `where` is for messages."""
    try:
        return Recipe.model_validate(change_fields(fields, overrides, changes))
    except ValidationError as error:
        raise RecipeError("\n  ".join([f"{where} is not a valid recipe:", *list_problems(error)])) from error

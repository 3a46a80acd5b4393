"""From a recipe to accelerator, data, task and model."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellcond.attention.find import find_attention
from wellcond.conditioning.apply import recondition_
from wellcond.conditioning.checkpoint import MARKER
from wellcond.conditioning.tokens import condition_tokens_
from wellcond.errors import ModelSpecError, RecipeError, WellcondError, needs_extra
from wellcond.lab.data.base import Data, Progress, load_data, progress_to, resolve_config
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model, is_local_code, load_function
from wellcond.lab.models.changes import add_layer_scale_, add_qk_norm_, remove_norms_, scale_true_
from wellcond.lab.models.memory_guard import MemoryGuard
from wellcond.lab.models.weights import load_state, load_weights, read_state_dict
from wellcond.lab.recipe import Recipe
from wellcond.lab.seeding import derive
from wellcond.lab.tasks.base import EVALUATION, TASKS, AbstractTask, TaskContext, evaluating
from wellcond.lab.train.length import LONGEST_WAIT, environment
from wellcond.lab.train.run_folder import read_finished_run
from wellcond.lab.train.trained import load_encoder, load_published, load_teacher
from wellcond.lab.user_code import MODELS, choose_arguments
from wellcond.private import keep_from_ddp_


def make_accelerator(recipe: Recipe, folder: Path, *, cpu: bool = False) -> Any:
    """An `accelerate.Accelerator` for one run: one process, DDP or FSDP2, by how the program was launched."""
    with needs_extra("accelerate", "train"):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.tracking import get_available_trackers
        from accelerate.utils import InitProcessGroupKwargs
    AcceleratorState._reset_state()  # the precision of an earlier run of this process must not persist
    trackers, installed = list(recipe.logging.trackers), [str(name) for name in get_available_trackers()]
    if missing := [name for name in trackers if name not in installed]:  # Accelerate would skip them
        expected = ", ".join(installed)
        raise RecipeError(f"logging.trackers: {missing[0]!r} is not installed or not known; expected one of {expected}")
    shards = recipe.training.shard and int(os.environ.get("WORLD_SIZE", "1")) > 1
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # sharded, by `accelerate launch`
    try:
        with environment(SHARDED if shards and not launched else {}):
            accelerator = Accelerator(
                mixed_precision=recipe.precision.mixed,
                dynamo_backend=recipe.precision.compile,
                log_with=trackers or None,
                project_dir=str(folder) if trackers else None,
                cpu=cpu,
                kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
            )
            if (shards or launched) and accelerator.device.type == "cpu":
                _shard_on_cpu(accelerator)
    except ValueError as error:
        raise RecipeError(f"precision or logging does not suit this machine: {error}") from error
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision.tf32
    return accelerator


SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
"""What `accelerate launch` tells a process by which a run is to be sharded."""


def _shard_on_cpu(accelerator: Any) -> None:
    """Shard over gloo, as torch's FSDP2 can; Accelerate itself requires a GPU."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if accelerator.num_processes > 1:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()


def prepare_ranks_(accelerator: Any, model: nn.Module) -> None:
    """Tell Accelerate what several ranks need to know of a model before it is wrapped.

    Sharded: which layers one by one, unless a variable or the model's class names them. Otherwise: which buffers never
    change, since those that may are sent from rank 0 in every update.
    """
    buffers = model.named_buffers()
    keep_from_ddp_(model, [name for name, value in buffers if not value.is_floating_point() or name.endswith(MARKER)])
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and not plugin.transformer_cls_names_to_wrap and not hasattr(model, "_no_split_modules"):
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks_of(model)})


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Around each attention layer, the innermost entry of a list of layers."""
    blocks = {}
    for site in find_attention(model, strict=False):
        parts = site.name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if isinstance(model.get_submodule(".".join(parts[: depth - 1])), (nn.ModuleList, nn.Sequential)):
                blocks[".".join(parts[:depth])] = model.get_submodule(".".join(parts[:depth]))
                break
    return list(blocks.values())


def recompute_(model: Any) -> None:
    """Let the blocks of a model compute their activations again for the backward pass, as its library does that."""
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        raise RecipeError(
            f"training.recompute: {type(model).__name__} cannot compute activations again; expected a model of timm "
            "or transformers, or one with their method set_grad_checkpointing"
        )


_KEPT: dict[tuple[Any, ...], AbstractTask] = {}


def prepare_task(
    recipe: Recipe, *, seed: int, base: Path | None, progress: Progress | None = None, local_code: bool = False
) -> AbstractTask:
    """The task of a recipe with its data; the last one is kept, since the runs of a comparison share it."""
    parts = [part.model_dump_json() for part in (recipe.task, recipe.data, recipe.augmentation)]
    with_test = recipe.evaluation.test is not None
    key = (*parts, seed, base, with_test)
    if key not in _KEPT:
        _KEPT.clear()  # before the next is made: there may be no room for two
        with progress_to(progress):
            data = load_cached_data(parts[1], base, local_code=local_code)
            context = TaskContext(data, seed, recipe.augmentation, base, with_test)
            _KEPT[key] = TASKS[recipe.task.model_dump()["name"]][1](recipe.task, context)
    return _KEPT[key]


@functools.lru_cache(maxsize=1)
def load_cached_data(data: str, base: Path | None, *, local_code: bool = False) -> Data:
    """The data of these settings, in JSON; the runs of a comparison share them."""
    return load_data(resolve_config(json.loads(data)), base=base, local_code=local_code)


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
    settings, proxy = recipe.model, None if method.library else recipe.proxy
    root, name = base or Path(), settings.name
    kind, _, rest = name.partition(":")
    if is_local_code(name):
        name = str(root / name)
    elif kind == "hf" and (root / rest).is_dir():
        name = f"hf:{root / rest}"
    drawn_again = method.init == "default" and method.init_options and method.init_options.get("rule") != "torch"
    if proxy is not None and drawn_again:
        raise RecipeError(
            f"proxy: {method.label} draws the attention again at the scale of the library; expected default, which "
            "is scale-true, or default(library=true)"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        model = _build(name, settings.arguments, task, local_code, task.model_arguments(kind))
        check = functools.partial(_check_takes, model, task, settings.name)
        if settings.norms != "keep":
            remove_norms_(model, settings.norms, check)
        check()
        if settings.qk_norm:
            add_qk_norm_(model, check, gain=settings.qk_norm == "gain")
        if settings.layer_scale is not None:
            add_layer_scale_(model, settings.layer_scale, check)
    if proxy is not None:
        scale_true_(model, proxy.width)
    if settings.weights is not None:
        load_weights(model, root / settings.weights)
    if settings.encoder is not None:
        path = settings.encoder.replace("{method}", method.slug).replace("{seed}", str(seed))
        load_encoder(model, root / path, method)
        if "{method}" in settings.encoder:  # its initialisation was that of pre-training
            method = method.model_copy(update={"init": "default", "init_options": {}, "tokens": {}})

    if settings.token_correction is not None:
        correction = settings.token_correction
        try:
            condition_tokens_(model, correction.name, of=correction.of, **correction.options)
        except WellcondError as error:
            raise RecipeError(f"model.token_correction: {error}") from error

    def build_teacher(name: str, given: dict[str, Any]) -> nn.Module:
        return _build(name, {}, task, local_code=False, needed=task.model_arguments(name.partition(":")[0]) | given)

    def teacher(options: dict[str, Any]) -> nn.Module:
        if options["teacher"].startswith("timm:"):
            return load_published(options["teacher"], task.model_arguments("timm"))
        return load_teacher(options, base, build_teacher)

    def forward(model: nn.Module) -> None:
        task.loss(model, task.train.fetch([(sample, 0) for sample in range(min(64, len(task.train)))]))

    return method.apply_(model, seed=derive(seed, "method"), teacher=teacher, forward=forward)


def rebuild_run(folder: Path) -> tuple[nn.Module, AbstractTask, dict[str, Any]]:
    """The model of a finished run with its last weights, its task, and its record; a model in a file is refused.

    Relative paths of its data start at the current folder.
    """
    record, path = read_finished_run(folder, "MODEL", "a MODEL such as timm:NAME")
    config, seed = record["config"], record["seed"]
    recipe = Recipe.model_validate({key: value for key, value in config.items() if key not in ("method", "seed")})
    untrained = recipe.model.model_copy(update={"weights": None, "encoder": None})
    recipe = recipe.model_copy(update={"model": untrained})
    task = prepare_task(recipe, seed=seed, base=None)
    model = prepare_model(recipe, MethodSettings(init="default"), task, seed=seed, base=None)
    state = read_state_dict(path)
    if MARKER in state:
        recondition_(model, state)
    load_state(model, state, str(path))
    return model.eval(), task, record


def _check_takes(model: nn.Module, task: AbstractTask, name: str) -> None:
    """Raise RecipeError if the model does not take one sample: too small an image, too long a text."""
    batch = task.evaluation.fetch([(0, EVALUATION)])
    try:
        with evaluating(model):
            task.score(model, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise RecipeError(f"model: {name} does not take the data of this task ({shapes}): {error}") from error


def _build(name: str, given: dict[str, Any], task: AbstractTask, local_code: bool, needed: dict[str, Any]) -> nn.Module:
    """Build a model from the arguments that its task needs and those of the recipe."""
    for key in ("num_classes", "num_labels", "in_chans", "num_channels", "vocab_size"):
        if key not in given or key not in needed or given[key] == needed[key]:
            continue
        if key != "vocab_size" or given[key] < needed[key]:  # embeddings that no token uses do no harm
            raise RecipeError(f"model.arguments.{key}: the data need {needed[key]}, found {given[key]} for {name}")
    kind, _, rest = name.partition(":")
    if kind == "python":
        return _call(MODELS[rest], rest, given, task)
    if is_local_code(name):
        return _call(load_function(name, local_code=local_code), name, given, task)
    arguments = needed | given
    try:
        return build_model(name, arguments, auto_class=task.auto_class, local_code=local_code)
    except ModelSpecError as error:
        # Some of timm's models take images of any size, and no img_size.
        takes_no_size = isinstance(error.__cause__, TypeError) and "img_size" in str(error.__cause__)
        if takes_no_size and "img_size" in arguments and "img_size" not in given:
            del arguments["img_size"]
            return _build(name, given, task, local_code, arguments)
        raise RecipeError(f"model: {error}") from error


def _call(function: Callable[..., Any], name: str, given: dict[str, Any], task: AbstractTask) -> nn.Module:
    """The model that a user's function returns, given what its signature names of what the data ask for."""
    offered = {library: task.model_arguments(library) for library in ("timm", "hf")}
    arguments = choose_arguments(function, given, offered)
    try:
        with MemoryGuard():
            model = function(**arguments)
    except WellcondError:
        raise
    except Exception as error:  # the user's code
        raise RecipeError(
            f"model: {name} cannot be called with {arguments}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model: {name} returned {type(model).__name__}, expected a torch.nn.Module")
    return model

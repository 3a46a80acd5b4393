"""Trained models that others start from, teachers of weight selection and encoders; no code of theirs is ever run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.checks import choose_projections
from wellcond.attention.find import find_attention
from wellcond.conditioning.apply import fold_, recondition_
from wellcond.conditioning.checkpoint import MARKER
from wellcond.conditioning.methods import make_method
from wellcond.errors import NumericalWarning, RecipeError, needs_extra
from wellcond.init.selection import exclusion
from wellcond.lab.data.disk import find_in_mirror, in_a_mirror
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model, similar
from wellcond.lab.models.weights import conditioning_in, load_state, read_state_dict
from wellcond.lab.train.run_folder import read_finished_run

Build = Callable[[str, dict[str, Any]], nn.Module]


def load_teacher(options: dict[str, Any], base: Path | None = None, build: Build | None = None) -> nn.Module:
    """The trained model, built for the student's data by `build`, with plain weights: corrected ones are folded."""
    path = (base or Path()) / options["teacher"]
    record, weights = read_finished_run(path, "teacher", "the folder of another run")
    model, size = record["config"]["model"], record["config"]["task"].get("image_size")
    if ".py:" in model["name"]:
        raise RecipeError(f"teacher: the model of {path} is code in a file ({model['name']}), which is not run here")
    for field, plain in (("norms", "keep"), ("qk_norm", False), ("layer_scale", None), ("token_correction", None)):
        if model.get(field, plain) != plain:
            raise RecipeError(f"teacher: the run in {path} has model.{field}: {model[field]}; expected {plain}")
    size_name = "img_size" if model["name"].startswith("timm:") else "image_size"
    sizes = {} if size is None else {size_name: size}
    with torch.random.fork_rng(devices=[]):
        teacher = (build or build_model)(model["name"], sizes | model["arguments"])
    # What is not selected, such as a classifier of other classes, stays as the model has it.
    state, excluded = read_state_dict(weights), exclusion(teacher, options.get("exclude", ("head",)))
    kept = {key: value for key, value in state.items() if not excluded(key)}
    own = {key: value for key, value in teacher.state_dict().items() if excluded(key)}
    return load_folded(teacher, kept | own, conditioning_in(state), str(weights))


def load_published(name: str, arguments: dict[str, Any]) -> nn.Module:
    """``timm:NAME.TAG`` with the weights ``timm/NAME.TAG/model.safetensors`` of a mirror, or of the hub.

    timm fits what depends on `arguments`, the size and channels of the data's images and the number of their classes.
    """
    with needs_extra("timm", "vision"):
        import huggingface_hub
        import timm
    architecture = name.removeprefix("timm:")
    if not timm.is_model(architecture):
        known = timm.list_models(pretrained=True)
        raise RecipeError(f"teacher: timm has no model {architecture!r}. Similar names: {similar(architecture, known)}")
    file = f"timm/{architecture}/model.safetensors"
    if (weights := find_in_mirror(file)) is None:
        try:
            weights = Path(huggingface_hub.hf_hub_download(f"timm/{architecture}", "model.safetensors"))
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise RecipeError(
                f"teacher: expected the weights of {name} as {file} {in_a_mirror()}, or on the hub: "
                f"{str(error).splitlines()[0]}"
            ) from error
    try:
        with torch.random.fork_rng(devices=[]):
            return timm.create_model(
                architecture, pretrained=True, pretrained_cfg_overlay={"file": str(weights)}, **arguments
            )
    except Exception as error:  # whatever timm raises for a damaged file, or weights of another model
        raise RecipeError(f"teacher: {name} with {weights}: {type(error).__name__}: {error}") from error


def load_encoder(model: nn.Module, path: Path, method: MethodSettings) -> None:
    """Load the encoder of a pre-trained model: of a classifier into a detector, of a language model into a classifier.

    Raw weights under a correction stay raw if `method` is about to correct them in the same way; otherwise what was
    corrected is folded. What only the classifier has (`model.encoder_left_out`) is left out, everything else must fit,
    but for parts of an encoder of transformers that its language model does not have (the pooler).
    `path` is the folder of a finished run, whose last weights are taken, or a file of weights.
    """
    prefix = str(getattr(model, "encoder_prefix", f"{getattr(model, 'base_model_prefix', 'encoder')}."))
    file = read_finished_run(path, "model.encoder", "a file of weights")[1] if path.is_dir() else path
    state = read_state_dict(file)
    settings = conditioning_in(state)
    if any(key.startswith(prefix) for key in state):
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    left_out: tuple[str, ...] = getattr(model, "encoder_left_out", ())  # type: ignore[assignment]
    state = {key: value for key, value in state.items() if not key.startswith(left_out)}
    body = model.get_submodule(prefix.rstrip("."))
    if hasattr(model, "base_model_prefix"):
        parts = {key.partition(".")[0] for key in state}
        state |= {key: value for key, value in body.state_dict().items() if key.partition(".")[0] not in parts}
    if settings is None or _same_correction(settings, method):
        load_folded(body, state, None, str(file))
        return
    present = {site.name for site in find_attention(body, strict=False)}
    sites = [name.removeprefix(prefix) for name in settings["sites"]]
    settings |= {"sites": [name for name in sites if name in present]}
    # A copy: weights that do not fit leave the model as it is.
    body.load_state_dict(load_folded(copy.deepcopy(body), state, settings, str(file)).state_dict())


def _same_correction(settings: dict[str, Any], method: MethodSettings) -> bool:
    """Whether a method corrects weights as settings say, from the weights alone."""
    if method.condition is None:
        return False
    chosen = make_method(method.condition, method.condition_options)
    wanted = {"method": chosen.name, **(chosen.settings or {}), "projections": choose_projections(method.projections)}
    return not chosen.frozen and wanted == {key: value for key, value in settings.items() if key != "sites"}


def load_folded(model: nn.Module, state: dict[str, Tensor], settings: dict[str, Any] | None, what: str) -> nn.Module:
    """Load weights into a plain model; raw ones under the correction that `settings` describe, which is then folded."""
    state = {key: state[key] for key in state if key != MARKER}
    if settings is None:
        load_state(model, state, what)
        return model
    with warnings.catch_warnings(action="ignore", category=NumericalWarning):  # given when it was trained
        recondition_(model, settings)
    # A copy: the model's own marker would be taken for what torch fills in where a checkpoint has none.
    load_state(model, state | {MARKER: model.get_buffer(MARKER).clone()}, what)
    return fold_(model)

"""The encoder of a classification run, or of an exported file, as the backbone of a detector."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wellcond.attention.checks import choose_projections
from wellcond.attention.find import find_attention
from wellcond.conditioning.apply import fold_, make_method, recondition_
from wellcond.conditioning.checkpoint import find_markers, marker_of
from wellcond.errors import NumericalWarning, WeightError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.train.checkpoint import read_finished_run
from wellcond.weights import conditioning_in, load_state, read_state_dict


def encoder_path(text: str, method: MethodSettings, seed: int) -> str:
    """A path of `model.encoder` with the method and the seed of a run in their places.

    Example:
        >>> encoder_path("runs/xcit-small/{method}/seed{seed}", MethodSettings(init="conditioned"), 3)
        'runs/xcit-small/conditioned/seed3'
    """
    return text.replace("{method}", method.slug).replace("{seed}", str(seed))


def has_backbone(model: nn.Module) -> bool:
    """Whether a model says where the weights of a pre-trained classifier belong in it."""
    return hasattr(model, "encoder_prefix")


def load_backbone(model: nn.Module, path: Path, method: MethodSettings) -> None:
    """Load the encoder of a classifier, or of a detector, into the backbone of a model.

    Raw weights under a correction stay raw if `method` is about to correct them in the same way; otherwise what was
    corrected is folded. What only the classifier has is left out, everything else must fit.

    Args:
        model: with `encoder_prefix`, where the encoder is, and `encoder_left_out`, beginnings of the names of weights
            that a classifier has and it has not.
        path: folder of a finished run, whose last weights are taken, or a file of weights.
        method: applied to the model afterwards.

    Raises: RecipeError, WeightError; the model is then unchanged.
    """
    prefix: str = model.encoder_prefix  # type: ignore[assignment]
    left_out: tuple[str, ...] = model.encoder_left_out  # type: ignore[assignment]
    file = _weights_file(path)
    state = read_state_dict(file)
    settings = conditioning_in(state)
    if any(key.startswith(prefix) for key in state):
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    state = {key: value for key, value in state.items() if not key.startswith(left_out)}
    for marker in find_markers(state):
        del state[marker]
    body = model.get_submodule(prefix.rstrip("."))
    if settings is None or _same_correction(settings, method):
        load_state(body, state, str(file))
    else:
        _load_and_fold(body, state, settings, prefix, str(file))


def _weights_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    return read_finished_run(path, "model.encoder", "a file of weights")[1]


def _same_correction(settings: dict[str, Any], method: MethodSettings) -> bool:
    """Whether a method corrects weights as settings say, from the weights alone."""
    if method.condition is None:
        return False
    chosen = make_method(method.condition, method.condition_options)
    wanted = {"method": chosen.name, **chosen.settings, "projections": choose_projections(method.projections)}
    return not chosen.frozen and wanted == {key: value for key, value in settings.items() if key != "sites"}


def _load_and_fold(body: nn.Module, state: dict[str, Tensor], settings: dict[str, Any], prefix: str, what: str) -> None:
    former = {key: value.clone() for key, value in body.state_dict().items()}
    present = {site.name for site in find_attention(body, strict=False)}
    sites = [name.removeprefix(prefix) for name in settings["sites"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # said when it was trained
        recondition_(body, settings | {"sites": [name for name in sites if name in present]})
    try:
        marker = marker_of(body)
        assert marker is not None
        # A copy: the model's own marker would be taken for what torch fills in where a checkpoint has none.
        load_state(body, state | {marker: body.get_buffer(marker).clone()}, what)
    except WeightError:
        fold_(body).load_state_dict(former)
        raise
    fold_(body)

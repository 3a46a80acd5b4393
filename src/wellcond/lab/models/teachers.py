"""The larger model of weight selection, from a run's folder or a safetensors file; no code of either is ever run."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.conditioning.apply import fold_, recondition_
from wellcond.conditioning.checkpoint import PREFIX
from wellcond.errors import NumericalWarning
from wellcond.init.selection import exclusion
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.checkpoint import read_finished_run
from wellcond.models import build_model
from wellcond.weights import conditioning_in, load_state, read_state_dict

OPTIONS = ("teacher_model", "teacher_arguments", "teacher_sha256")
"""Options of a recipe beside those of `wellcond.init_`."""
EXCLUDED = ("head",)

Build = Callable[[str, dict[str, Any]], nn.Module]


def check_teacher(options: dict[str, Any]) -> None:
    """Raise ValueError for options of weight selection that cannot be meant.

    Example:
        >>> check_teacher({"teacher": "runs/large/default/seed0", "layout": "heads"})
    """
    teacher, model = options["teacher"], options.get("teacher_model")
    if not isinstance(teacher, str) or not teacher:
        raise ValueError(f"teacher: expected the folder of a run or a .safetensors file, found {teacher!r}")
    is_file = teacher.endswith(".safetensors")
    if is_file and (not isinstance(model, str) or not model.startswith(("timm:", "hf:"))):
        raise ValueError(f"teacher_model: expected timm:NAME or hf:TYPE beside {teacher}, found {model!r}")
    if not is_file and model is not None:
        raise ValueError(f"teacher_model: the run {teacher} says itself which model it is; found {model!r}")
    if not isinstance(options.get("teacher_arguments", {}), dict):
        raise ValueError(f"teacher_arguments: expected a mapping, found {options['teacher_arguments']!r}")
    digest = options.get("teacher_sha256", "0" * 64)
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"teacher_sha256: expected 64 hexadecimal digits, found {digest!r}")
    if options.get("layout", "blind") not in ("blind", "heads"):
        raise ValueError(f"layout: expected blind or heads, found {options['layout']!r}")
    exclude = options.get("exclude", [])
    if not isinstance(exclude, (list, tuple)) or not all(isinstance(part, str) and part for part in exclude):
        raise ValueError(f"exclude: expected a list of parts of names, such as [head], found {exclude!r}")


def selection_options(options: dict[str, Any], base: Path | None, build: Build | None = None) -> dict[str, Any]:
    """Options of `wellcond.init_` for those of a recipe: the teacher itself instead of its path."""
    own = {name: value for name, value in options.items() if name not in OPTIONS}
    return own | {"teacher": load_teacher(options, base, build)}


def load_teacher(options: dict[str, Any], base: Path | None, build: Build | None = None) -> nn.Module:
    """The trained model, with plain weights: those of a conditioned one are folded.

    Args:
        options: of `MethodSettings`; ``teacher_arguments`` go over the arguments of a run.
        base: folder that a relative path starts from.
        build: builds a model from its name and arguments; `build_model` by default. What the student's data ask of a
            model comes from here: a teacher may only differ from it in what is excluded (the classifier).

    Raises: RecipeError, WeightError, RunError; each names the file.
    """
    weights, name, arguments = _describe(options, base)
    expected = options.get("teacher_sha256")
    if expected is not None and (found := file_sha256(weights)) != expected:
        raise RecipeError(
            f"teacher_sha256: {weights} is not the teacher of this recipe: expected {expected}, found {found}"
        )
    state = read_state_dict(weights)
    build = build or (lambda name, arguments: build_model(name, arguments, local_code=False))
    with torch.random.fork_rng(devices=[]):
        teacher = build(name, arguments)
    settings = conditioning_in(state)
    if settings is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # said when it was trained
            recondition_(teacher, settings)
    excluded = tuple(options.get("exclude", EXCLUDED))
    load_state(teacher, _with_own_heads(state, teacher, excluded), str(weights))
    return teacher if settings is None else fold_(teacher)


def pin_teacher(options: dict[str, Any], base: Path | None) -> dict[str, Any]:
    """The same options with the digest of the weights, so that a hash over them depends on what the file holds."""
    return options | {"teacher_sha256": file_sha256(_describe(options, base)[0])}


def file_sha256(path: Path) -> str:
    """Digest of a file.

    Raises: RecipeError if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(f"teacher: {path} cannot be read: {error.strerror}") from error


def _describe(options: dict[str, Any], base: Path | None) -> tuple[Path, str, dict[str, Any]]:
    """Weights, model and arguments of a teacher."""
    path = (base or Path()) / options["teacher"]
    arguments: dict[str, Any] = options.get("teacher_arguments", {})
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise RecipeError(f"teacher: no such file: {path}")
        return path, options["teacher_model"], arguments
    record, weights = read_finished_run(path, "teacher", "a .safetensors file")
    model, size = record["config"]["model"], record["config"]["task"].get("image_size")
    if ".py:" in model["name"]:
        raise RecipeError(f"teacher: the model of {path} is code in a file ({model['name']}), which is not run here")
    if model.get("norms", "keep") != "keep":
        raise RecipeError(f"teacher: the run in {path} was trained with model.norms: {model['norms']}; expected keep")
    if model.get("qk_norm", False):
        raise RecipeError(f"teacher: the run in {path} was trained with model.qk_norm: true; expected false")
    names = {"timm": "img_size", "hf": "image_size"}
    sized = {} if size is None else {names[model["name"].partition(":")[0]]: size}
    return weights, model["name"], sized | model["arguments"] | arguments


def _with_own_heads(state: dict[str, Tensor], teacher: nn.Module, excluded: tuple[str, ...]) -> dict[str, Tensor]:
    """The state with what is not selected, such as a classifier of other classes, as the model has it."""
    left_out = exclusion(teacher, excluded)

    def is_excluded(name: str) -> bool:
        return not name.startswith(PREFIX) and left_out(name)

    kept = {name: value for name, value in state.items() if not is_excluded(name)}
    return kept | {name: own for name, own in teacher.state_dict().items() if is_excluded(name)}

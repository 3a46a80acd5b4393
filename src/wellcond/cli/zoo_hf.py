"""Which attention of transformers' models is described: one shrunken model of each config type, walked.

Models are built from their default configs on the meta device, so that nothing is downloaded and no memory is spent.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from wellcond.attention.find import Scan, find_adapter, scan_attention
from wellcond.cli.zoo import Progress, ZooRow, is_known, not_built, summarise
from wellcond.cli.zoo_forms import forms_of
from wellcond.errors import MissingExtraError
from wellcond.models import LAYER_COUNTS

NUM_LAYERS = 2
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
MODEL_MAPPINGS = (
    "MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING", "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING",
    "MODEL_FOR_KEYPOINT_MATCHING_MAPPING",
    "MODEL_FOR_KEYPOINT_DETECTION_MAPPING", "MODEL_FOR_DEPTH_ESTIMATION_MAPPING", "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING", "MODEL_FOR_RETRIEVAL_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "MODEL_FOR_BACKBONE_MAPPING",
)  # fmt: skip
LOOKS_LIKE_ATTENTION = re.compile(r"Attention|Attn")


def walk_hf(progress: Progress = iter) -> list[ZooRow]:
    """One row for every config type of transformers.

    Args:
        progress: wraps the sequence of config types that is walked, to show how far it is.

    Returns: rows in the order of transformers' own table.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise MissingExtraError("transformers", "text") from error
    rows = []
    for model_type in progress(list(CONFIG_MAPPING.keys())):
        with quiet():
            rows.append(walk_one(model_type, forms=True))
    return rows


def walk_one(model_type: str, *, forms: bool = False) -> ZooRow:
    """Build one config type small, on the meta device, and describe its attention.

    Args:
        model_type: a key of transformers' CONFIG_MAPPING.
        forms: also try which form of the Jacobian measures each kind of attention in it.
    """
    try:
        model, scan = _smallest_with_attention(model_type)
    except Exception as error:  # whatever a constructor of 600 families raises is the reason that is reported
        return not_built("transformers", model_type, error)
    missed = sorted({type(model.get_submodule(name)).__name__ for name in missed_attention(model, scan)})
    row = summarise("transformers", model_type, scan, missed)
    return replace(row, forms=forms_of(scan.sites)) if forms else row


def _smallest_with_attention(model_type: str) -> tuple[nn.Module, Scan]:
    # Two layers are enough for most; hybrids may keep their first attention later, and some configs resist shrinking.
    first_error: Exception | None = None
    model: nn.Module | None = None
    scan = Scan([], [])
    for num_layers in (NUM_LAYERS, None):
        try:
            model = build_model(model_type, num_layers)
        except Exception as error:  # reported by the caller if the unshrunken config fails too
            first_error = first_error or error
            continue
        scan = scan_attention(model)
        if scan.sites or scan.refusals or missed_attention(model, scan):
            return model, scan
    if model is None:
        assert first_error is not None
        raise first_error
    return model, scan


def build_model(model_type: str, num_layers: int | None = NUM_LAYERS, device: str = "meta") -> nn.Module:
    """A model of a config type from its default config.

    Args:
        model_type: a key of transformers' CONFIG_MAPPING.
        num_layers: shrink every stack of layers to this many; None leaves the default.
        device: where the parameters are created.

    Returns: the base model, or the first task model where there is no base model.

    Raises:
        LookupError: transformers has no model for this config.
    """
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    if num_layers is not None:
        shrink_(config, num_layers)
    model_class = find_model_class(type(config))
    with torch.device(device):
        return model_class(config).eval()


def find_model_class(config_class: type) -> Any:
    """The base model of a config class, else the first task model that takes it."""
    from transformers.models.auto import modeling_auto

    for name in MODEL_MAPPINGS:
        mapping = getattr(modeling_auto, name, None)
        if mapping is not None and config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, (tuple, list)) else found
    # Parts of larger models (vision towers, mask decoders) are in no mapping, only beside their config.
    modeling = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    own = [
        cls
        for name, cls in vars(modeling).items()
        if isinstance(cls, type) and getattr(cls, "config_class", None) is config_class
        if issubclass(cls, nn.Module) and not name.endswith("PreTrainedModel")
    ]
    if not own:
        raise LookupError(f"transformers maps {config_class.__name__} to no model")
    return min(own, key=lambda cls: len(cls.__name__))


def shrink_(config: Any, num_layers: int) -> None:
    """Set the usual layer and expert counts of a config and of its sub-configs, in place, where present."""
    for part in (config, *sub_configs(config)):
        types = getattr(part, "layer_types", None)
        count = num_layers
        if isinstance(types, (list, tuple)) and types:
            # The shortest prefix that shows every kind of layer.
            count = max(num_layers, max(types.index(kind) for kind in set(types)) + 1)
        for name in LAYER_COUNTS:
            value = vars(part).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > count:
                for listed, per_layer in list(vars(part).items()):
                    if isinstance(per_layer, list) and len(per_layer) == value and listed != "out_indices":
                        setattr(part, listed, per_layer[:count])
                setattr(part, name, count)
        for name in EXPERT_COUNTS:
            value = vars(part).get(name)
            if isinstance(value, int) and value > 16:
                setattr(part, name, 16)


def sub_configs(config: Any) -> Iterator[Any]:
    """Every config stored inside a config, at any depth."""
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield value
            yield from sub_configs(value)


def missed_attention(model: nn.Module, scan: Scan) -> list[str]:
    """Names of modules that call themselves attention, hold weights, and were neither described nor refused."""
    candidates = [
        name
        for name, module in model.named_modules()
        if name and LOOKS_LIKE_ATTENTION.search(type(module).__name__) and holds_matrix(module)
        # An adapter that describes nothing has said that this is no attention.
        if find_adapter(module) is None and not is_known(name, scan)
    ]
    return [name for name in candidates if not any(other.startswith(f"{name}.") for other in candidates)]


def holds_matrix(module: nn.Module) -> bool:
    """Whether a module holds a weight matrix."""
    return any(parameter.dim() > 1 for parameter in module.parameters())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, logging and prints of constructors; they are about checkpoints that are not loaded."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)

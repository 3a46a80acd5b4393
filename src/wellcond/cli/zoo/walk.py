"""Which attention of a library is described, by one small model of each architecture.

Models are built from their default configs on the meta device: nothing is downloaded, and no memory is spent.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from wellcond.attention.find import Scan, find_adapter, find_attention, scan_attention
from wellcond.cli.zoo.forms import DESCRIBED, captured_forms, forms_of, is_structured, one_of_each_kind
from wellcond.errors import needs_extra
from wellcond.jacobian.capture import capture_attention
from wellcond.lab.models.build import LAYER_COUNTS

# From the smallest up: the first word that a model's name contains decides; names with none of them come last.
SMALL_WORDS = """
    test zepto atto femto pico nano xxs xs tiny t0 mini s0 b0 m0 small s1 m1 d1 18 s12 050 26 medium base
""".split()
# A module of timm that holds one of these projects queries, keys or values; a squeeze-excite gate holds none.
PROJECTION_NAME = re.compile(r"^(to_|c_|in_proj_)?(q|k|v|qk|kv|qkv|qkvs|query|key|value)(_proj|_lin|_gate)?$")
NUM_LAYERS, NUM_EXPERTS = 2, 16
"""Of a shrunken model of transformers."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class ZooRow:
    """What a walk found in one model.

    `status` is ``found`` (every attention described), ``partly``, ``refused``, ``no attention`` or ``not built``.
    """

    family: str
    model: str
    status: str
    num_sites: int
    kinds: str
    detail: str
    forms: str = ""
    """Which forms of the Jacobian measure what was found."""


Progress = Callable[[Sequence[str]], Iterable[str]]
"""Wraps the names that are walked, to show how far it is."""


def describe(family: str, name: str, scan: Scan, missed: Iterable[str]) -> ZooRow:
    """The row of one scanned model; `missed` are classes that look like attention and were not recognised."""
    kinds = ", ".join(sorted({site.kind for site in scan.sites}))
    reasons = list(dict.fromkeys(f"{r.class_name}: {first_line(r.problem)}" for r in scan.refusals))
    if missed := sorted(set(missed)):
        reasons.append(f"has modules named {', '.join(missed)} that were not recognised")
    status = ("partly" if reasons else "found") if scan.sites else ("refused" if reasons else "no attention")
    return ZooRow(family, name, status, len(scan.sites), kinds, "; ".join(reasons), forms_of(scan.sites))


def not_built(family: str, name: str, error: Exception) -> ZooRow:
    """The row of a model whose constructor failed."""
    return ZooRow(family, name, "not built", 0, "", f"{type(error).__name__}: {first_line(error)}")


def first_line(message: object) -> str:
    """The first line of an error, shortened."""
    return (str(message).strip().splitlines() or [""])[0][:200]


def missed_attention(model: nn.Module, scan: Scan, is_attention: Callable[[nn.Module], bool]) -> list[str]:
    """Classes of innermost modules that call themselves attention and were neither described nor refused."""
    known = [site.name for site in scan.sites] + [refusal.name for refusal in scan.refusals]

    def is_known(name: str) -> bool:  # or inside such a module, or around one
        return any(k in ("", name) or name.startswith(f"{k}.") or k.startswith(f"{name}.") for k in known)

    found = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name and re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) and is_attention(module)
        # An adapter that describes nothing has said that this is no attention.
        if find_adapter(module) is None and not is_known(name)
    }
    return [kind for name, kind in found.items() if not any(other.startswith(f"{name}.") for other in found)]


# timm: one small model of every architecture file


def walk_timm(progress: Progress = iter) -> list[ZooRow]:
    """One row for every architecture file of timm, in timm's order.

    The smallest model that has any attention stands for its file (FastViT's smallest are convolutional); "no
    attention" means that no model of the file has any.
    """
    with needs_extra("timm", "vision"):
        import timm

    return [
        _first_with_attention(family, timm.list_models(module=family), timm.create_model)
        for family in progress(timm.list_modules())
    ]


def _first_with_attention(family: str, names: Iterable[str], create: Callable[[str], nn.Module]) -> ZooRow:
    rows = []
    for name in smallest_first(names):
        row = inspect_model(family, name, partial(create, name))
        if row.status in ("found", "partly") and not (is_structured(row.forms) and DESCRIBED not in row.forms):
            # Windows and maps do not fit into a trial of the attention alone: ask the whole model.
            return replace(row, forms=_forms_in_use(create(name)) or row.forms)
        if row.status in ("found", "partly", "refused"):
            return row
        rows.append(row)
    return rows[0]


def _forms_in_use(model: nn.Module) -> str:
    """Which forms of the Jacobian measure the attention of a model of timm, on an image of noise; empty if it fails."""
    config: Any = getattr(model, "default_cfg", {})
    size = config.get("input_size", (3, 224, 224))
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # One of each kind: the maps of all layers of a model of 1,024 pixels have many GB.
            chosen = one_of_each_kind(find_attention(model, strict=False))
            return captured_forms(capture_attention(model, image, chosen, max_samples=1, required=False))
        except Exception:  # a model that takes no image
            return ""


def smallest_first(names: Iterable[str]) -> list[str]:
    """The names in the order of how small they sound; among equals the shortest first.

    Example:
        >>> smallest_first(["vit_base", "vit_tiny_384", "vit_tiny"])
        ['vit_tiny', 'vit_tiny_384', 'vit_base']
    """

    def rank(name: str) -> tuple[int, int, str]:
        words = re.split(r"[^a-z0-9]+", name)
        first = next((n for n, word in enumerate(SMALL_WORDS) if word in words), len(SMALL_WORDS))
        return first, len(name), name

    return sorted(names, key=rank)


def inspect_model(family: str, name: str, build: Callable[[], nn.Module]) -> ZooRow:
    """Build a model on the meta device, on the CPU where its constructor needs values, and describe its attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constructors warn of their own affairs (deprecated names, meta copies)
        try:
            try:
                with torch.device("meta"):
                    model = build()
            except Exception:  # data-dependent constructors raise many kinds of errors on meta tensors
                model = build()
        except Exception as error:  # a model that cannot be built is a row of the table, whatever it raised
            return not_built(family, name, error)
    scan = scan_attention(model)
    return describe(family, name, scan, missed_attention(model, scan, _holds_projection))


def _holds_projection(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_children()] + list(module._parameters)
    return any(PROJECTION_NAME.match(name) for name in names)


# transformers: one shrunken model of every config type


def walk_hf(progress: Progress = iter) -> list[ZooRow]:
    """One row for every config type, in the order of transformers' own table."""
    with needs_extra("transformers", "text"):
        from transformers import CONFIG_MAPPING
    return [walk_one(model_type) for model_type in progress(list(CONFIG_MAPPING.keys()))]


def walk_one(model_type: str) -> ZooRow:
    """Build one config type small, and describe its attention."""
    with quiet():
        first_error: Exception | None = None
        row: ZooRow | None = None
        # Two layers are enough for most; hybrids may keep their first attention later, and some configs resist
        # shrinking.
        for num_layers in (NUM_LAYERS, None):
            try:
                model = build_model(model_type, num_layers)
            except Exception as error:  # whatever a constructor of 600 families raises is the reason that is reported
                first_error = first_error or error
                continue
            scan = scan_attention(model)
            missed = missed_attention(model, scan, lambda module: any(p.dim() > 1 for p in module.parameters()))
            row = describe("transformers", model_type, scan, missed)
            if row.status != "no attention":
                break
        if row is None:
            assert first_error is not None
            return not_built("transformers", model_type, first_error)
        return row


def build_model(model_type: str, num_layers: int | None) -> nn.Module:
    """A model of a config type from its default config, with every stack shrunk to so many layers; None: as it is."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    if num_layers is not None:
        _shrink_(config, num_layers)
    model_class = _find_model_class(type(config))
    with torch.device("meta"):
        return model_class(config).eval()


def _find_model_class(config_class: type) -> Any:
    """The base model of a config class, else the first task model that takes it."""
    from transformers.models.auto import modeling_auto

    mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch(r"MODEL_(FOR_.*_)?MAPPING", name)]
    for mapping in mappings:
        if config_class in mapping:
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


def _shrink_(config: Any, num_layers: int) -> None:
    """Set the usual layer and expert counts of a config and of its sub-configs, in place, where present."""
    for part in (config, *_sub_configs(config)):
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
            if isinstance(value, int) and value > NUM_EXPERTS:
                setattr(part, name, NUM_EXPERTS)


def _sub_configs(config: Any) -> Iterator[Any]:
    """Every config stored inside a config, at any depth."""
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield value
            yield from _sub_configs(value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, logging and prints of constructors; they are about checkpoints that are not loaded."""
    previous, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)

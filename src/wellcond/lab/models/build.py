"""Building the MODEL of a command line or a recipe from the library, the architecture or the file it names."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellcond.errors import TRUST_NEEDED, ModelSpecError, WellcondError, needs_extra

if TYPE_CHECKING:
    from torch import nn

# A library would fetch or load what these name. Weights are for model.weights or --weights, code is for nobody.
REFUSED = {
    "timm": ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"),
    "hf": ("trust_remote_code", "code_revision", "auto_map", "subfolder", "_configuration_file", "gguf_file"),
}
LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Libraries make a list, or a name, for each of so many before they make a tensor.
MOST = dict.fromkeys(LAYER_COUNTS, 10_000) | dict.fromkeys(("num_labels", "num_classes"), 1_000_000)


def similar(name: str, known: Sequence[str], most: int = 5) -> str:
    """Names nearest to one that does not exist: those that it begins, the shortest first, then those spelled alike.

    Example:
        >>> similar("lama", ["bert", "llama", "lamanet"])
        'lamanet, llama'
    """
    begun = sorted((other for other in known if other.startswith(name)), key=lambda other: (len(other), other))
    found = dict.fromkeys([*begun, *difflib.get_close_matches(name, known, most)])
    return ", ".join(list(found)[:most]) or "none"


def parse_values(pairs: Sequence[str]) -> dict[str, Any]:
    """``key=value`` pairs of a command line; values are JSON where they parse as JSON, else text.

    Raises: ModelSpecError for a pair without ``=``.

    Example:
        >>> parse_values(["depth=2", "value=joint", "lam=0.5"])
        {'depth': 2, 'value': 'joint', 'lam': 0.5}
    """
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ModelSpecError(f"expected key=value, got {pair!r}")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values


BUILDERS: dict[str, Callable[[str, dict[str, Any]], nn.Module]] = {}
"""Further kinds of models by prefix, from a name and its arguments; `wellcond.lab` adds its own."""


def is_local_code(spec: str) -> bool:
    """Whether a MODEL is path/to/file.py:callable."""
    return ".py:" in spec and spec.partition(":")[0] not in ("timm", "hf", "wellcond")


def check_model(spec: str, arguments: dict[str, Any]) -> None:
    """What can be known of a MODEL and its arguments without the library that builds it.

    Raises: ModelSpecError.
    """
    kind, colon, rest = spec.partition(":")
    if colon and kind in ("timm", "hf", "wellcond"):
        if not rest or "\0" in rest:
            raise ModelSpecError(f"unknown MODEL {spec!r}: expected a name after {kind}:")
    elif not is_local_code(spec):
        raise ModelSpecError(f"unknown MODEL {spec!r}: {_suggest(spec)}")
    elif not Path(spec.rpartition(":")[0]).is_file():
        raise ModelSpecError(f"no such file: {spec.rpartition(':')[0]}")
    if kind == "hf" and Path(rest).is_dir():
        _check_config(Path(rest))
    for name in REFUSED.get(kind, ()):
        if name in arguments:
            raise ModelSpecError(
                f"{spec}: expected arguments of the model's architecture, found {name!r}, which loads files or code; "
                "remove it. Weights are named by model.weights of a recipe, or --weights"
            )
    _check_counts(arguments, spec)


def _suggest(spec: str) -> str:
    """What to type instead of a MODEL that does not say which library it is from."""
    if Path(spec).is_dir():
        return f"for a folder that transformers wrote, type hf:{spec}"
    if HUB_ID.fullmatch(spec):
        return _download_first(spec)
    if not re.fullmatch(r"[\w.-]+", spec):
        return "expected timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME or path/to/file.py:callable"
    if (architecture := spec.partition(".")[0]) in _names_in_timm():
        return f"type timm:{architecture}"
    if _is_type_in_transformers(spec):
        return f"type hf:{spec}"
    if "-" in spec:
        return _download_first(spec)
    return (
        f"say which library it is from: timm:{spec}, or hf:{spec} (a configuration type or a local folder), or "
        f"wellcond:{spec}, or path/to/file.py:callable"
    )


def _download_first(hub_id: str) -> str:
    owner, _, name = hub_id.rpartition("/")
    download = f"hf download {hub_id} --local-dir {name}"
    if owner == "timm":
        return (
            f"for the architecture type timm:{name.partition('.')[0]}; for its weights too, type {download}, then add "
            f"--weights {name}/model.safetensors"
        )
    return (
        f"{hub_id} looks like an id of the hub, from which wellcond downloads nothing by itself; type {download}, then "
        f"hf:{name}"
    )


def _models_folder(library: str) -> Path | None:
    """The folder `models` of a library, which is not imported for a message: that takes seconds."""
    found = importlib.util.find_spec(library)
    return None if found is None or found.origin is None else Path(found.origin).parent / "models"


def _names_in_timm() -> set[str]:
    folder = _models_folder("timm")
    sources = [] if folder is None else [path.read_text("utf-8") for path in folder.glob("*.py")]
    return {name for source in sources for name in re.findall(r"^@register_model\s+def (\w+)", source, re.MULTILINE)}


def _is_type_in_transformers(name: str) -> bool:
    folder = _models_folder("transformers")
    return folder is not None and (folder / name.replace("-", "_") / "__init__.py").is_file()


def _check_counts(settings: dict[str, Any], where: str) -> None:
    for name, most in MOST.items():
        value = settings.get(name)
        if isinstance(value, (int, float)) and not value <= most:  # NaN is not
            raise ModelSpecError(f"{where}: {name}: expected at most {most}, found {value}")


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_text("utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSpecError(f"{folder}: expected a config.json of transformers: {error}") from error
    if not isinstance(stored, dict):
        found = "no such file" if stored is None and not path.is_file() else f"{str(stored)[:80]!r}"
        raise ModelSpecError(f"{folder}: expected a config.json of transformers, a mapping of settings; found {found}")
    _check_counts(stored, str(path))


def build_model(
    spec: str,
    arguments: dict[str, Any] | None = None,
    *,
    auto_class: str | None = None,
    local_code: bool = True,
    on_meta: bool = False,
) -> nn.Module:
    """Build a model from a MODEL argument; nothing is downloaded.

    Args:
        spec: what to build.
        arguments: keyword arguments for timm's constructor, the Hugging Face configuration or the callable.
        auto_class: class of transformers that puts a head on an ``hf:`` model, such as AutoModelForCausalLM.
        local_code: whether ``path/to/file.py:callable`` may be run.
        on_meta: on the meta device: shapes without values.

    Raises:
        ModelSpecError: the spec leads nowhere, or its library cannot build it with these arguments.
        ModelTooLargeError: there is not enough memory.
        MissingExtraError: the library it names is not installed.
    """
    arguments = arguments or {}
    if is_local_code(spec) and not local_code:
        raise ModelSpecError(TRUST_NEEDED.format(spec))
    check_model(spec, arguments)
    from wellcond.errors import ModelTooLargeError

    try:
        return _build_within_memory(spec, arguments, auto_class, on_meta)
    except ModelTooLargeError as error:
        raise ModelTooLargeError(f"{_written(spec, arguments)}: {error}") from error
    except WellcondError:
        raise
    except Exception as error:  # whatever a constructor raises for values that it was not made for
        said = (str(error).strip() or type(error).__name__)[:1000]
        todo = "Correct these arguments or leave them out" if arguments else "Correct the model, or name another"
        raise ModelSpecError(f"{_written(spec, arguments)}: {type(error).__name__}: {said}\n  {todo}.") from error


def _build_within_memory(spec: str, arguments: dict[str, Any], auto_class: str | None, on_meta: bool) -> nn.Module:
    """Build a model; a large one is first built on the meta device, to see whether it fits."""
    import torch

    from wellcond.errors import ModelTooLargeError
    from wellcond.lab.models.memory_guard import LargeModel, MemoryGuard, check_fits

    if is_local_code(spec):  # run once, since it may do anything
        with MemoryGuard():
            return _build_from_file(spec, arguments)
    if on_meta:
        with _loading_tensors_only(), MemoryGuard(), torch.device("meta"):
            return _build(spec, arguments, auto_class, on_meta)
    state = torch.get_rng_state()
    try:
        with _loading_tensors_only(), MemoryGuard(stop_at_large=True):
            return _build(spec, arguments, auto_class, on_meta)
    except LargeModel:
        pass
    try:
        sized = _build_within_memory(spec, arguments, auto_class, True)
    except Exception as error:
        if "overflow" in str(error):  # of the number of bytes of one tensor
            raise ModelTooLargeError(f"{error}; take a smaller model") from error
    else:  # a constructor that needs values does not get here: it has to be tried
        check_fits(sized)
    torch.set_rng_state(state)
    with _loading_tensors_only(), MemoryGuard():
        return _build(spec, arguments, auto_class, on_meta)


def _written(spec: str, arguments: dict[str, Any]) -> str:
    return f"{spec} cannot be built with {arguments}" if arguments else f"{spec} cannot be built"


def _build(spec: str, arguments: dict[str, Any], auto_class: str | None, on_meta: bool) -> nn.Module:
    kind, _, rest = spec.partition(":")
    if kind == "timm":
        return _build_timm(rest, arguments)
    if kind == "hf":
        return _build_hf(rest, arguments, auto_class, on_meta)
    if kind not in BUILDERS:
        raise ModelSpecError(f"{spec} is a model of wellcond's laboratory; import wellcond.lab first")
    return BUILDERS[kind](rest, arguments)


@contextlib.contextmanager
def _loading_tensors_only() -> Iterator[None]:
    """Have every `torch.load` of a library refuse code: a configuration may make it load a file."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    former = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ModelSpecError(
            "the model's configuration names a file of weights that is a pickle of other objects than tensors, which "
            "could run any code; nothing of it was run. Remove it from the configuration"
        ) from error
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former


def _build_timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    with needs_extra("timm", "vision"):
        import timm
    if not timm.is_model(name):
        raise ModelSpecError(f"timm has no model {name!r}. Similar names: {similar(name, timm.list_models())}")
    return timm.create_model(name, pretrained=False, **arguments)


def _build_hf(name: str, arguments: dict[str, Any], auto_class: str | None, on_meta: bool) -> nn.Module:
    with needs_extra("transformers", "text"):
        import transformers
    path = Path(name)
    if path.is_dir():
        config = read_hf_config(path, arguments)
    elif name in transformers.CONFIG_MAPPING:
        _refuse_fetched_kernels(arguments, name)
        config = transformers.AutoConfig.for_model(name, **arguments)
        _refuse_kernels_of(config, name)
    else:
        close = similar(name, sorted(transformers.CONFIG_MAPPING))
        on_hub = HUB_ID.fullmatch(name) or (close == "none" and "-" in name)  # such as bert-base-uncased
        todo = _download_first(name) if on_hub else f"Similar: {close}"
        raise ModelSpecError(f"{name!r} is neither a folder nor a configuration type of transformers. {todo}")
    architecture = (getattr(config, "architectures", None) or [None])[0]
    model_class = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    if auto_class is not None:
        model = getattr(transformers, auto_class).from_config(config, trust_remote_code=False)
    elif isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        model = model_class(config)
    else:
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    if path.is_dir() and not on_meta:
        _load_folder(model, path)
    return model


def read_hf_config(folder: Path, arguments: dict[str, Any] | None = None) -> Any:
    """The configuration of a folder of transformers, built by transformers' own classes alone.

    Raises: ModelSpecError if it names code, in the folder or on the hub.
    """
    import transformers

    _check_config(folder)
    try:
        stored, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelSpecError(f"{folder}: expected a config.json of transformers: {error}") from error
    if "auto_map" in stored and stored.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ModelSpecError(
            f"{folder / 'config.json'}: expected a model_type of transformers, found {stored.get('model_type')!r} with "
            f"code of its own ({stored['auto_map']}), which wellcond never runs. If you trust it, write a file that "
            "builds the model and name that: path/to/file.py:callable"
        )
    _refuse_fetched_kernels(stored, str(folder / "config.json"))
    _refuse_fetched_kernels(arguments or {}, str(folder))
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **(arguments or {})
    )
    if hasattr(config, "auto_map"):
        del config.auto_map
    _refuse_kernels_of(config, str(folder))
    return config


def _refuse_fetched_kernels(settings: dict[str, Any], where: str) -> None:
    """Raise ModelSpecError for attn_implementation: owner/name as written, before transformers reads it."""
    for key, value in settings.items():
        if isinstance(value, dict) and not key.endswith("attn_implementation"):
            _refuse_fetched_kernels(value, where)
        elif key.endswith("attn_implementation") and "/" in str(value):
            raise ModelSpecError(
                f"{where}: {key}: expected what is installed, such as sdpa or eager, found {value!r}, which would be "
                "fetched from the hub and run"
            )


def _refuse_kernels_of(config: Any, spec: str) -> None:
    """Raise ModelSpecError where a built configuration, or a part of it, would have transformers fetch compiled code.

    That is a name owner/name, however it came there, and a flash attention that is not installed: transformers then
    takes the one of kernels-community, where the package kernels is there.
    """
    from transformers.utils import is_flash_attn_2_available

    allowed = {None, "eager", "sdpa", "flex_attention"} | (
        {"flash_attention_2"} if is_flash_attn_2_available() else set()
    )
    chosen = getattr(config, "_attn_implementation", None)
    if not isinstance(chosen, str | None) or chosen not in allowed:
        raise ModelSpecError(
            f"{spec}: attn_implementation: expected what is installed, one of "
            f"{', '.join(sorted(filter(None, allowed)))}, found {chosen!r}, which might be fetched from the hub and run"
        )
    for part in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, part, None)) is not None:
            _refuse_kernels_of(inner, f"{spec}, {part}")


def _load_folder(model: nn.Module, path: Path) -> None:
    """Weights of a saved folder: one file or shards; a folder with a configuration alone keeps random weights."""
    from wellcond.lab.models.weights import load_state, read_state_dict

    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _shards(index)
    else:
        names = [name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).is_file()][:1]
    if not names:
        others = sorted(
            p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".msgpack", ".h5")
        )
        if others:
            raise ModelSpecError(
                f"{path}: expected model.safetensors, its index, or pytorch_model.bin, found {', '.join(others[:4])}; "
                "load those weights with --weights"
            )
        return
    for name in names:
        if Path(name).name != name:
            raise ModelSpecError(f"{index}: a shard may not lie outside its folder, found {name!r}")
    state = {key: value for name in names for key, value in read_state_dict(path / name).items()}
    load_state(model, state, str(path))


def _shards(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a name that is no text")
        return sorted(names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelSpecError(
            f'{index}: expected {{"weight_map": {{tensor: file}}}}: {type(error).__name__}: {error}'
        ) from error


def load_function(spec: str, *, local_code: bool = True) -> Callable[..., Any]:
    """The callable of ``path/to/file.py:callable``; ModelSpecError if it may not be run, or there is none."""
    if not local_code:
        raise ModelSpecError(TRUST_NEEDED.format(spec))
    check_model(spec, {})
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    module_spec = importlib.util.spec_from_file_location(f"wellcond_user_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise ModelSpecError(f"{spec} cannot be loaded: {type(error).__name__}: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ModelSpecError(f"{path} has no callable {name!r}. It defines: {', '.join(defined) or 'none'}")
    return build


def _build_from_file(spec: str, arguments: dict[str, Any]) -> nn.Module:
    model = load_function(spec)(**arguments)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ModelSpecError(f"{spec} returned {type(model).__name__}, expected a torch.nn.Module")
    return model

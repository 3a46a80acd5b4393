"""The batch that `wellcond measure` gives a model: digits, random numbers, images of a folder, or an array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wellcond.attention.watch import run, undisturbed
from wellcond.cli.app import InputError, check_input
from wellcond.jacobian.select import available_bytes

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
PYTHON_WAY = "build the batch in Python and call wellcond.measure(model, batch)"


@dataclass(frozen=True)
class Reads:
    """What a model reads."""

    kind: Literal["images", "tokens", "unknown"]
    keyword: str | None = None
    """Name of the argument; None for the first one."""
    channels: int = 0
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    vocabulary: int = 0
    longest: int | None = None
    width: int | None = None
    decoder: bool = False


def what_it_reads(model: nn.Module) -> Reads:
    """Images or token ids, and of which size, as far as the model tells: timm, transformers, torchvision, nanoGPT."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    keyword = main if isinstance(main, str) else None
    if keyword == "pixel_values":
        channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", None)
        return Reads("images", keyword, int(channels), _pair(size))
    if keyword in (None, "input_ids"):
        text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
        vocabulary = getattr(text, "vocab_size", None)
        if isinstance(vocabulary, int):
            longest = getattr(text, "max_position_embeddings", None) or getattr(text, "block_size", None)
            width = getattr(text, "hidden_size", None)
            limit = longest if isinstance(longest, int) and longest > 0 else None
            decoder = bool(getattr(config, "is_encoder_decoder", False))
            return Reads("tokens", keyword, vocabulary=vocabulary, longest=limit, width=width, decoder=decoder)
    return Reads("unknown") if keyword is not None else _image_model(model)


def _image_model(model: nn.Module) -> Reads:
    # timm keeps default_cfg as it was when img_size= or in_chans= are given: the modules know better.
    found = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    cfg: dict[str, Any] = found if isinstance(found, dict) else {}
    declared = tuple(cfg.get("input_size") or ())
    patches = getattr(model, "patch_embed", None)
    size = _pair(getattr(patches, "img_size", None)) or _pair(getattr(model, "image_size", None))
    size = size or (_pair(declared[1:]) if len(declared) == 3 else None)
    names = cfg.get("first_conv") or ()
    channels = _channels(model, [names] if isinstance(names, str) else list(names)) or (declared[0] if declared else 0)
    if not channels or (size is None and not cfg):
        return Reads("unknown")
    mean, std = (tuple(cfg.get(key) or (0.5,)) for key in ("mean", "std"))
    return Reads("images", None, channels, size, mean, std)


def _channels(model: nn.Module, names: list[str]) -> int:
    for name in [*names, "patch_embed.proj", "conv_proj"]:
        try:
            count = getattr(model.get_submodule(name), "in_channels", None)
        except AttributeError:
            continue
        if isinstance(count, int):
            return count
    return 0


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(s, int) for s in size):
        return size[0], size[1]
    return None


def make_batch(model: nn.Module, source: str, *, samples: int, tokens: int = 32, seed: int = 0) -> tuple[Any, str]:
    """The batch that ``--input`` names, and a description of it; InputError if it is not what the model reads."""
    check_input(source, tokens=tokens)
    reads, path = what_it_reads(model), Path(source)
    if source == "random":
        values, text = _random(reads, samples, tokens, seed)
    elif source == "digits":
        values, text = _digits(reads, samples)
    else:
        values, text = (_folder if path.is_dir() else _array)(reads, path, samples)
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is not None:
        values = values.to(weight.device, weight.dtype if values.is_floating_point() else None)
    batch: Any = values
    if reads.keyword is not None:
        name = "inputs_embeds" if reads.kind == "tokens" and values.is_floating_point() else reads.keyword
        batch = {name: values}
        if reads.decoder:
            other = _random(reads, samples, tokens, seed + 1)[0].to(values) if source == "random" else values
            batch[f"decoder_{name}"] = other
    _try_forward(model, batch)
    return batch, text


def _image_shape(reads: Reads, source: str) -> tuple[int, int, int]:
    """(channels, height, width), or why not."""
    if reads.kind == "tokens":
        raise InputError(
            f"--input {source}: expected a model that reads images, found one that reads token ids (vocabulary "
            f"{reads.vocabulary}). Use --input random, or a .npy file of integer ids (samples, tokens)"
        )
    if reads.kind == "unknown" or reads.size is None:
        raise InputError(
            f"--input {source}: expected a model that tells its image size (patch_embed.img_size, default_cfg, "
            f"config.image_size), found none. Give the batch as a .npy file, or {PYTHON_WAY}"
        )
    return reads.channels, *reads.size


def _random(reads: Reads, samples: int, tokens: int, seed: int) -> tuple[Tensor, str]:
    generator = torch.Generator().manual_seed(seed)
    if reads.kind == "tokens":
        if reads.longest is not None and tokens > reads.longest:
            raise InputError(f"--tokens: expected at most {reads.longest} for this model, found {tokens}")
        _check_fits(8 * tokens**2, f"--tokens {tokens}", "the attention of one head")
        _check_fits(8 * samples * tokens, f"--samples {samples}", "the token ids")
        ids = torch.randint(reads.vocabulary, (samples, tokens), generator=generator)
        return ids, f"{samples} x {tokens} random token ids below {reads.vocabulary}, seed {seed}"
    shape = _image_shape(reads, "random")
    _check_fits(4 * samples * math.prod(shape), f"--samples {samples}", f"images of {_times(shape)}")
    images = torch.randn(samples, *shape, generator=generator)
    return images, f"{samples} x {_times(shape)} standard normal noise, seed {seed}"


def _check_fits(wanted: int, option: str, what: str) -> None:
    left = available_bytes()
    if wanted > left:
        raise InputError(
            f"{option}: {what} would take {wanted / 2**30:,.1f} GiB, and {left / 2**30:,.1f} GiB of memory are free. "
            "Give a smaller number"
        )


def _digits(reads: Reads, samples: int) -> tuple[Tensor, str]:
    channels, *size = _image_shape(reads, "digits")
    from wellcond.lab.data.digits import load_digits

    images = load_digits()[0].inputs
    if samples > len(images):
        raise InputError(f"--samples: expected at most {len(images)} digits, found {samples}")
    scaled = nn.functional.interpolate(images[:samples], size, mode="bilinear", antialias=False)
    shown = f"{samples} of scikit-learn's digits, zero mean and unit variance, resized to {_times((channels, *size))}"
    return scaled.expand(-1, channels, -1, -1).contiguous(), shown


def _folder(reads: Reads, folder: Path, samples: int) -> tuple[Tensor, str]:
    from wellcond.lab.data.images import decode_image, import_pil, read_image, to_channels

    channels, height, width = _image_shape(reads, str(folder))
    bilinear = import_pil().Resampling.BILINEAR
    if channels not in (1, 3):
        raise InputError(f"--input {folder}: expected a model of 1 or 3 channels, found {channels}. Use a .npy file")
    files = images_in(folder)
    if len(files) < samples:
        raise InputError(
            f"--input {folder}: expected at least {samples} images ({', '.join(IMAGE_SUFFIXES)}), found {len(files)}. "
            "Lower --samples or add images"
        )
    pictures = []
    for file in files[:samples]:
        where = f"--input: {file}"
        picture: Any = to_channels(decode_image(read_image(file, where), where), channels, where)
        pixels = torch.from_numpy(np.array(picture.resize((width, height), bilinear), dtype=np.float32)) / 255
        pictures.append(pixels.view(height, width, channels).permute(2, 0, 1))
    mean, std = (_per_channel(numbers, channels) for numbers in (reads.mean, reads.std))
    names = ", ".join([*(str(file.relative_to(folder)) for file in files[: min(samples, 3)]), *["..."] * (samples > 3)])
    text = f"{samples} images of {folder} ({names}) resized to {_times((channels, height, width))}, "
    text += f"mean {mean.flatten().tolist()}, std {std.flatten().tolist()}"
    return (torch.stack(pictures) - mean) / std, text


def images_in(folder: Path, *, depth: int = 2) -> list[Path]:
    """Images of a folder, sorted; of a folder of folders, the first of each class, then the second of each."""
    own = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if own or not depth:
        return own
    classes = [images_in(place, depth=depth - 1) for place in sorted(folder.iterdir()) if place.is_dir()]
    return [file for row in itertools.zip_longest(*classes) for file in row if file is not None]


def _per_channel(numbers: tuple[float, ...], channels: int) -> Tensor:
    if len(numbers) != channels:
        numbers = (sum(numbers) / len(numbers),) * channels
    return torch.tensor(numbers, dtype=torch.float64).round(decimals=6).float().view(channels, 1, 1)


def _array(reads: Reads, path: Path, samples: int) -> tuple[Tensor, str]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(
            f"{path}: expected an array of numbers saved by numpy.save (pickles are not loaded): {error}"
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InputError(f"{path}: expected floats (images, embeddings) or integers (token ids), found {found}")
    if array.ndim == 0 or len(array) < samples:
        count = 0 if array.ndim == 0 else len(array)
        raise InputError(f"{path}: expected at least {samples} samples along the first axis, found {count}")
    whole, kept = array.dtype.kind in "iu", array[:samples]
    if problem := _does_not_fit(reads, array, whole):
        raise InputError(f"{path}: {problem}, found {array.dtype} {array.shape}")
    if not whole and not np.isfinite(kept).all():
        raise InputError(f"{path}: expected finite numbers, found NaN or infinity")
    text = f"the first {samples} of {path}, {array.dtype} {array.shape}"
    return torch.from_numpy(kept.astype(np.int64 if whole else np.float64)), text


def _does_not_fit(reads: Reads, array: np.ndarray, whole: bool) -> str:
    """What was expected of an array that is not what the model reads; empty if it may be."""
    if reads.kind == "images":
        shape = (reads.channels, *(reads.size or ("height", "width")))
        fits = array.ndim == 4 and array.shape[1:] == (shape if reads.size else (reads.channels, *array.shape[2:]))
        scaled = " of pixels divided by 255, less the mean, divided by the standard deviation" if whole else ""
        return "" if fits and not whole else f"expected floats (samples, {', '.join(map(str, shape))}){scaled}"
    if reads.kind == "tokens" and whole:
        if array.ndim != 2 or not 0 < array.shape[1] <= (reads.longest or math.inf):
            return f"expected token ids (samples, {f'at most {reads.longest} ' if reads.longest else ''}tokens)"
        lowest, highest = array.min(), array.max()
        fits = lowest >= 0 and highest < reads.vocabulary
        return "" if fits else f"expected token ids from 0 to {reads.vocabulary - 1}, found {lowest} to {highest}"
    if reads.kind == "tokens":
        if reads.keyword is None:
            return "expected integer token ids (samples, tokens)"
        if array.ndim != 3 or (reads.width is not None and array.shape[2] != reads.width):
            return f"expected embeddings (samples, tokens, {reads.width or 'width'}) or integer token ids"
    return ""


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _try_forward(model: nn.Module, batch: Any) -> None:
    """Run the model once, so that a wrong batch is told from a failure to measure."""
    tensors = batch.values() if isinstance(batch, dict) else [batch]
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
    try:
        with undisturbed(model):
            run(model, batch)
    except Exception as error:  # whatever a model raises
        said = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise InputError(
            f"expected a batch that this model can read, found {shapes}, on which its forward pass fails: {said}\n"
            f"  Give another --input (a .npy file has any shape), or {PYTHON_WAY}."
        ) from error

"""The batch that a command gives a model: digits, random numbers, images of a folder, a text, or an array."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellcond.attention.evaluation import eval_scope, run
from wellcond.cli.app import TEXTS
from wellcond.errors import OptionError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Reads:
    """What a model reads, as far as its configuration and modules show it."""

    keyword: str | None = None
    """Name of the argument; None for the first one."""
    image: tuple[int, ...] = ()
    """Channels, height and width, if it reads images."""
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    vocabulary: int = 0
    """If it reads token ids."""
    longest: int | None = None
    decoder: bool = False

    def __str__(self) -> str:
        if self.image:
            return f"images as floats (samples, {', '.join(map(str, self.image))})"
        if self.vocabulary:
            length = "tokens" if self.longest is None else f"at most {self.longest} tokens"
            return f"integer token ids below {self.vocabulary} (samples, {length})"
        return "inputs that its configuration does not name"


def what_it_reads(model: nn.Module) -> Reads:
    """Images or token ids, and of which size: of transformers by its config, of timm and torchvision by its modules."""
    config: Any = getattr(model, "config", None)
    keyword = getattr(model, "main_input_name", None)
    if keyword == "pixel_values":
        return Reads(keyword, (getattr(config, "num_channels", 3), *_pair(getattr(config, "image_size", None))))
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if keyword in (None, "input_ids") and isinstance(vocabulary, int):
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "block_size", None)
        limit = longest if isinstance(longest, int) and longest > 0 else None
        decoder = bool(getattr(config, "is_encoder_decoder", False))
        return Reads(keyword, vocabulary=vocabulary, longest=limit, decoder=decoder)
    # timm keeps default_cfg as it was when img_size= or in_chans= are given: the modules know better.
    found = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    cfg: dict[str, Any] = found if isinstance(found, dict) else {}
    own = _pair(getattr(getattr(model, "patch_embed", None), "img_size", None))
    size = own or _pair(getattr(model, "image_size", None)) or tuple(cfg.get("input_size") or ())[1:]
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if keyword is not None or first is None or not size:
        return Reads(keyword)
    mean, std = (tuple(cfg.get(key) or (0.5,)) for key in ("mean", "std"))
    return Reads(None, (first.in_channels, *size), mean, std)


def _pair(size: Any) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size or ())


def folder_of(spec: str) -> Path | None:
    """The folder of an ``hf:FOLDER``, where its tokenizer may lie too."""
    kind, _, rest = spec.partition(":")
    return Path(rest) if kind == "hf" and Path(rest).is_dir() else None


def make_batch(
    model: nn.Module, source: str, *, samples: int, tokens: int = 32, seed: int = 0, folder: Path | None = None
) -> tuple[Any, str]:
    """The batch that ``--data`` names, and a description of it; OptionError if it is not what the model reads.

    Args:
        model: what is to read the batch.
        source: digits, random, a folder of images, a text file or FILE.npy.
        samples: how many.
        tokens: length of a text sample.
        seed: of random numbers.
        folder: where the model's tokenizer may be; without one a text is read as bytes.
    """
    reads, path = what_it_reads(model), Path(source)
    if path.suffix == ".npy":
        values, text = _array(path, samples)
    elif source == "random" and reads.vocabulary:
        values = torch.randint(reads.vocabulary, (samples, tokens), generator=torch.Generator().manual_seed(seed))
        text = f"{samples} x {tokens} random token ids below {reads.vocabulary}, seed {seed}"
    elif path.suffix in TEXTS:
        values, text = _text(reads, path, samples, tokens, folder)
    elif not reads.image:
        raise OptionError(
            f"--data {source}: expected a model that reads images, found one that reads {reads}. Use a text file, a "
            ".npy file, or build the batch in Python and call wellcond.measure(model, batch)"
        )
    elif source == "random":
        values = torch.randn(samples, *reads.image, generator=torch.Generator().manual_seed(seed))
        text = f"{samples} images of standard normal noise, seed {seed}"
    else:
        values, text = _digits(reads, samples) if source == "digits" else _folder(reads, path, samples)
    if len(values) < samples:
        raise OptionError(f"--data {source}: expected at least {samples} samples, found {len(values)}")
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is not None:
        values = values.to(weight.device, weight.dtype if values.is_floating_point() else None)
    batch: Any = values
    if reads.keyword is not None:
        name = "inputs_embeds" if reads.vocabulary and values.is_floating_point() else reads.keyword
        batch = {name: values}
        if reads.decoder:
            batch[f"decoder_{name}"] = values.flip(-1)
    try:
        with eval_scope(model):
            run(model, batch)
    except Exception as error:  # whatever a model raises: a wrong batch is told from a failure to measure
        said = (str(error) or type(error).__name__).splitlines()[0][:300]
        found = f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
        raise OptionError(
            f"--data {source}: expected {reads}, found {found}, on which the forward pass fails: {said}\n"
            "  Give another --data, or build the batch in Python and call wellcond.measure(model, batch)."
        ) from error
    return batch, text


def _digits(reads: Reads, samples: int) -> tuple[Tensor, str]:
    from wellcond.lab.data.images import load_digits

    channels, *size = reads.image
    images = load_digits()[0].inputs[:samples]
    scaled = nn.functional.interpolate(images, size, mode="bilinear", antialias=False)
    shown = f"{samples} of scikit-learn's digits, zero mean and unit variance, resized"
    return scaled.expand(-1, channels, -1, -1).contiguous(), shown


def _folder(reads: Reads, folder: Path, samples: int) -> tuple[Tensor, str]:
    from wellcond.lab.data.images import decode_image, import_pil, read_image, to_channels

    channels, height, width = reads.image
    bilinear, files = import_pil().Resampling.BILINEAR, images_in(folder)[:samples]
    pictures = torch.empty(len(files), channels, height, width)
    for at, file in enumerate(files):
        where = f"--data: {file}"
        picture: Any = to_channels(decode_image(read_image(file), where), channels, where)
        pixels = torch.from_numpy(np.array(picture.resize((width, height), bilinear), dtype=np.float32)) / 255
        pictures[at] = pixels.view(height, width, channels).permute(2, 0, 1)
    mean, std = (  # of all channels, if the model has another number of them than its library says
        [round(number, 6) for number in (known if len(known) == channels else [sum(known) / len(known)] * channels)]
        for known in (reads.mean, reads.std)
    )
    text = f"the first {samples} images of {folder}, resized, mean {mean}, std {std}"
    return (pictures - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1), text


def images_in(folder: Path) -> list[Path]:
    """Images of a folder, sorted; of folders of classes, the first of each, then the second of each."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    classes = [list(some) for _, some in groupby(files, key=lambda path: path.parent)]
    return [file for row in zip_longest(*classes) for file in row if file is not None]


def _text(reads: Reads, path: Path, samples: int, tokens: int, folder: Path | None) -> tuple[Tensor, str]:
    """Samples of consecutive tokens, spread evenly over a text."""
    from wellcond.lab.tokenizers import ByteTokenizer, read_tokenizer

    if not reads.vocabulary:
        raise OptionError(f"--data {path}: expected a model that reads token ids, found one that reads {reads}")
    own = folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = read_tokenizer(folder) if folder is not None and own else ByteTokenizer()
    if tokenizer.vocabulary_size > reads.vocabulary:
        todo = "Use hf:FOLDER with the model's own tokenizer.json in it" if not own else "They are not of one model"
        raise OptionError(
            f"--data {path}: expected a tokenizer of at most {reads.vocabulary} tokens, as the model has, found "
            f"{tokenizer.vocabulary_size}. {todo}"
        )
    [ids] = tokenizer.encode_batch([path.read_text("utf-8", errors="replace")])
    if len(ids) < samples * tokens:
        raise OptionError(
            f"--data {path}: expected at least {samples} x {tokens} tokens, found {len(ids)}. Lower --samples or "
            "--tokens"
        )
    begins = np.linspace(0, len(ids) - tokens, samples).round().astype(int)
    values = torch.from_numpy(np.stack([ids[begin : begin + tokens] for begin in begins]).astype(np.int64))
    how = f"the tokenizer of {folder}" if own else "bytes as tokens, since no tokenizer of the model is at hand"
    return values, f"{samples} x {tokens} consecutive tokens of {path} ({how})"


def _array(path: Path, samples: int) -> tuple[Tensor, str]:
    try:
        array = np.load(path, allow_pickle=False)
        whole = array.dtype.kind in "iu"
        kept = torch.from_numpy(array[:samples].astype(np.int64 if whole else np.float64, casting="same_kind"))
    except (ValueError, TypeError, AttributeError, IndexError, OSError, EOFError) as error:
        raise OptionError(
            f"{path}: expected floats or integers saved by numpy.save (pickles are not loaded): {error}"
        ) from error
    return kept, f"the first {samples} of {path}, {array.dtype} {array.shape}"

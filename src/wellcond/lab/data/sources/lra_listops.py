"""Source `lra_listops`: the original files of ListOps of the Long Range Arena."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from wellcond.lab.data.base import Data, TensorDataset, describe_sizes
from wellcond.lab.data.disk_cache import CacheEntry, CacheError
from wellcond.lab.data.listops_files import FILES, read_lra_file
from wellcond.lab.data.listops_language import SYMBOLS
from wellcond.lab.data.progress import tell
from wellcond.lab.data.registry import SourceConfig, register_source

VERSION = 1
log = logging.getLogger(__name__)


class LraListOpsConfig(SourceConfig):
    """Settings of `lra_listops`."""

    source: Literal["lra_listops"] = "lra_listops"
    path: str
    """Folder with basic_train.tsv, basic_val.tsv and basic_test.tsv."""
    max_length: int = Field(2000, ge=1)
    """Sequences are padded to it; a longer one is an error."""
    verify: bool = True
    """Compute every answer and refuse rows with another."""


@register_source(LraListOpsConfig)
def load(config: LraListOpsConfig, base: Path) -> Data:
    """The tokens of the generator `listops`; evaluation is the validation file, the test file is the split test."""
    folder = (base / Path(os.path.expanduser(config.path))).absolute()
    splits = {name: _load_file(folder / file, config) for name, file in FILES.items()}
    train, evaluation, test = (splits[name] for name in ("train", "evaluation", "test"))
    names = tuple(str(digit) for digit in range(10))
    sizes = f"{describe_sizes(train, evaluation, names)}, {len(test)} test examples"
    return Data(
        "lra_listops",
        "tokens",
        train,
        evaluation,
        names,
        f"ListOps of the Long Range Arena, from its files: {sizes}",
        others={"test": test},
        vocabulary_size=len(SYMBOLS),
    )


def _load_file(path: Path, config: LraListOpsConfig) -> TensorDataset:
    """Read a file, or what was kept of a file with the same content."""
    if not path.is_file():
        return read_lra_file(path, config.max_length, verify=config.verify)  # which says what is wrong
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    made_from = {"version": VERSION, "sha256": content, "max_length": config.max_length, "verify": config.verify}
    cache = CacheEntry("lra_listops", made_from)
    kept = _read_kept(cache)
    if kept is not None:
        return kept
    try:
        with cache.locked(lambda: tell(f"reading {path.name} (another process does)", 0, 1)):
            kept = _read_kept(cache)
            if kept is not None:
                return kept
            split = read_lra_file(path, config.max_length, verify=config.verify)
            try:
                _keep(cache, split)
            except CacheError as error:
                log.info("%s", error)
            return split
    except CacheError as error:
        log.info("%s", error)
        return read_lra_file(path, config.max_length, verify=config.verify)


def _read_kept(cache: CacheEntry) -> TensorDataset | None:
    tokens, labels = cache.find("tokens.npy"), cache.read("labels.npy")
    if tokens is None or labels is None:
        return None
    inputs = torch.from_numpy(np.load(tokens, allow_pickle=False))
    return TensorDataset("tokens", inputs, torch.from_numpy(np.load(io.BytesIO(labels), allow_pickle=False)))


def _keep(cache: CacheEntry, split: TensorDataset) -> None:
    assert split.labels is not None
    for name, part in (("tokens.npy", split.inputs), ("labels.npy", split.labels)):
        with cache.adding(name) as file:
            np.save(file, part.numpy(), allow_pickle=False)

"""Sources `object` and `factory`: data that a user has in Python, as Hugging Face or torch datasets.

`source_of` makes settings of whatever a user gives as data: a folder, a file, an id of the hub, ``file.py:function``,
or a dataset. A dataset is held by this process under its name and a digest of its content, by which recipes and records
name it; `held_data` is what another process needs to be sent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from wellcond.errors import DataError
from wellcond.lab.data.base import (
    Data,
    SourceConfig,
    fingerprint,
    listed,
    register_source,
    resolve_config,
)
from wellcond.lab.data.disk import canonical_json, find_in_mirror
from wellcond.lab.data.examples import join_examples
from wellcond.lab.data.images import has_classes
from wellcond.lab.data.tables import (
    BUILDERS,
    EVALUATION_SPLITS,
    HUB_ID,
    TableConfig,
    TableDataset,
    join_tables,
    split_of,
    suffix_of,
)

SHARE = 0.1
"""Of the training examples, to evaluate on where no split is given for it."""


class OwnConfig(TableConfig):
    """What may be set of data that are given in Python; `input` and `label` are keys of an example, or columns."""

    evaluation_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of the training examples to evaluate on, of every class alike; 0.1 if there is no split for it."""


class FactoryConfig(OwnConfig):
    """Settings of `factory`."""

    source: Literal["factory"] = "factory"
    factory: str = Field(pattern=r".+\.py:[^\W\d]\w*$")
    """path/to/file.py:function, from the recipe's folder; what it returns may be anything that `wrap` takes."""
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def local_code(self) -> str:
        """The file whose code is run."""
        return self.factory


class ObjectConfig(SourceConfig):
    """Settings of `object`, which `hold_data` makes."""

    source: Literal["object"] = "object"
    name: str
    sha256: str = Field(pattern="^[0-9a-f]{16}$")
    """Of the sizes, the labels and some of the inputs."""


# What a user gives


def source_of(data: Any, *, name: str | None = None, **options: Any) -> SourceConfig:
    """Settings of the source for what a user gives as data.

    Args:
        data: a folder (of images by class, or of files), a file of a table, an id of the hub, ``file.py:function``, the
            settings of a source as a mapping, or an object that `wrap` takes.
        name: of an object, in records and folders; by default what the object calls itself.
        options: further settings of the source, such as `input`, `label` and `evaluation_fraction`.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(data, SourceConfig):
        return data
    if isinstance(data, Mapping) and "source" in data:
        return resolve_config({**data, **options})
    if not isinstance(data, (str, Path)):
        return hold_data(data, name=name, **options)
    text, path = str(data), Path(data).expanduser()
    if path.is_dir():
        return resolve_config({**_folder_source(path.resolve()), **options})
    if path.is_file():
        return resolve_config({"source": "files", "train": str(path.resolve()), **options})
    if ".py:" in text:
        file, _, function = text.rpartition(":")
        return resolve_config({"source": "factory", "factory": f"{Path(file).resolve()}:{function}", **options})
    is_id = HUB_ID.fullmatch(text) and "/" in text and suffix_of(path) not in BUILDERS
    if is_id or find_in_mirror(text):
        return resolve_config({"source": "hub", "id": text, **options})
    raise DataError(
        f"no such file or folder: {text}",
        expected="a folder, a file, file.py:function, an id of the Hugging Face hub such as uoft-cs/cifar10, or a "
        "Dataset of torch or of `datasets`",
        found=f"{type(data).__name__} {text!r}",
    )


def _folder_source(folder: Path) -> dict[str, Any]:
    """Settings for a folder: of images by class, or else of table files, one or more for each split."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and suffix_of(path) in BUILDERS)
    if has_classes(folder) or not files:
        return {"source": "image_folder", "path": str(folder)}
    splits: dict[str, list[str]] = {}
    for path in files:
        splits.setdefault(split_of(path.name), []).append(str(path))
    usual = next((split for split in EVALUATION_SPLITS if split in splits), None)
    if "train" not in splits or usual is None:
        return {"source": "files", "train": [str(path) for path in files]}
    return {"source": "files", "train": splits["train"], "evaluation": splits[usual]}


# Objects


_HELD: dict[tuple[str, str], Data] = {}


def hold_data(data: Any, *, name: str | None = None, **options: Any) -> ObjectConfig:
    """Keep data that are given as an object, and return the settings by which a recipe names them.

    Args:
        data: what `wrap` takes.
        name: in records and folders; by default what the object calls itself.
        options: fields of `OwnConfig`.
    """
    wrapped = wrap(data, OwnConfig(source="object", **options), name)
    digest = hashlib.sha256(canonical_json(fingerprint(wrapped)).encode()).hexdigest()[:16]
    _HELD[wrapped.name, digest] = wrapped
    return ObjectConfig(name=wrapped.name, sha256=digest)


def held_data(config: ObjectConfig) -> Data:
    """The data that `hold_data` kept; DataError if another process holds them."""
    try:
        return _HELD[config.name, config.sha256]
    except KeyError:
        raise DataError(
            f"{config.name}: these data are an object of another Python process.",
            expected=f"data whose digest is {config.sha256}, given to this process",
            found=f"{listed(' '.join(key) for key in _HELD)}",
            todo="Give the same data again, or give a function that makes them: file.py:function.",
        ) from None


def hold_again(config: ObjectConfig, data: Data) -> None:
    """Keep in this process what `held_data` returned in another one."""
    _HELD[config.name, config.sha256] = data


@register_source(ObjectConfig)
def load_object(config: ObjectConfig, base: Path) -> Data:
    """The data that were given in Python, which this process holds."""
    return held_data(config)


@register_source(FactoryConfig)
def load_factory(config: FactoryConfig, base: Path) -> Data:
    """Run the function, which `load_data` allows only if local code is trusted."""
    file, _, function = config.factory.rpartition(":")
    path = (base / Path(file).expanduser()).absolute()
    try:
        spec = importlib.util.spec_from_file_location(f"wellcond_user_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # where classes are looked up that a worker process unpickles
        spec.loader.exec_module(module)
        made = getattr(module, function)(**config.arguments)
    except Exception as error:  # the user's code
        raise DataError(
            f"{path}: {function} cannot be called with {config.arguments or 'no arguments'}.",
            expected="a function that returns a Dataset of torch or of `datasets`, or several by split",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return wrap(made, config, f"{path.stem}-{function}")


def wrap(given: Any, config: OwnConfig, name: str | None = None) -> Data:
    """Data from datasets that a user made.

    Args:
        given: a map-style torch dataset, a `datasets.Dataset`, `Data`, or several datasets: a mapping by split, of
            which train is trained on, or a tuple (train, evaluation) or (train, evaluation, test). An example is
            (input, label), or a mapping with these; the input is an image (PIL, array (height, width, channels), or
            tensor (channels, height, width)), a text, or token ids of shape (length,).
        config: columns, limits, and the part to evaluate on if no split is given for it.
        name: by default the one of the set or its class.
    """
    if isinstance(given, Data):
        return given
    parts = _parts(given)
    train = parts.pop("train")
    name = name or _name_of(train)
    usual = next((split for split in EVALUATION_SPLITS if split in parts), None)
    fraction = config.evaluation_fraction or (0.0 if usual else SHARE)
    evaluation = None if fraction or usual is None else parts.pop(usual)
    if all(_is_table(part) for part in (train, evaluation, *parts.values()) if part is not None):
        tables = {split: TableDataset(part, f"{name}, split {split!r}", paths=True) for split, part in parts.items()}
        trained = TableDataset(train, name, paths=True)
        evaluated = None if evaluation is None else TableDataset(evaluation, f"{name}, evaluation", paths=True)
        return join_tables(name, "Python", trained, evaluated, tables, config, fraction)
    return join_examples(name, train, evaluation, parts, config, fraction)


def _parts(given: Any) -> dict[str, Any]:
    """Datasets by split, with one named train; DataError if a part has no examples by number."""
    if isinstance(given, (tuple, list)) and 2 <= len(given) <= 3 and all(_has_examples(part) for part in given):
        parts = dict(zip(("train", "validation", "test"), given, strict=False))
    else:
        parts = dict(given) if isinstance(given, Mapping) else {"train": given}
    wrong = {split: part for split, part in parts.items() if not _has_examples(part)}
    if wrong or "train" not in parts:
        found = {split: type(part).__name__ for split, part in (wrong or parts).items()}
        raise DataError(
            "These data cannot be used.",
            expected="a torch Dataset with __len__ and __getitem__ (an iterable one has no examples by number, so no "
            "run could be resumed), a `datasets.Dataset`, or a mapping of these by split with one named train",
            found=listed(f"{split}: {kind}" for split, kind in found.items()),
        )
    return parts


def _has_examples(part: Any) -> bool:
    kind = type(part)
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not isinstance(part, (Mapping, str, Tensor))


def _is_table(part: Any) -> bool:
    """Whether it is a `datasets.Dataset` that is read as stored; one with a transform is read through that."""
    return type(part).__module__.partition(".")[0] == "datasets" and part.format["type"] != "custom"


def _name_of(part: Any) -> str:
    while hasattr(part, "dataset") and _has_examples(part.dataset):  # as torch's Subset
        part = part.dataset
    named = getattr(getattr(part, "info", None), "dataset_name", None)
    return str(named or type(part).__name__)

"""Source `hub`: a data set of the Hugging Face hub, from a local mirror if there is one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from wellcond.lab.data.base import Data, DataError, files_or_folders, listed, register_source
from wellcond.lab.data.disk import (
    MIRROR_VARIABLE,
    call_load_dataset,
    find_in_mirror,
    import_datasets,
    quiet_progress,
    reading_errors,
    require_cache,
    root_cause,
    searched_mirrors,
)
from wellcond.lab.data.tables import Part, Table, TableConfig, load_tables

EVALUATION_SPLITS = ("validation", "val", "dev", "test", "validation_matched")
NAME = r"[A-Za-z0-9_][\w.-]*"


class HubConfig(TableConfig):
    """Settings of `hub`."""

    source: Literal["hub"] = "hub"
    id: str = Field(pattern=rf"^{NAME}(/{NAME})?$")
    config: str | None = Field(None, pattern=rf"^{NAME}$")
    revision: str | None = None
    """Commit or tag on the hub; a mirror is taken as it is."""
    train_split: str = "train"
    """One split, or several joined: train+validation."""
    evaluation_split: str | None = None
    """By default the first that exists of validation, val, dev, test, validation_matched."""
    held_out: float | None = Field(None, gt=0, lt=1)
    """Share of the training split to evaluate on, of every class alike; what would have been the evaluation split is
    then the test split, and limits count what is left."""
    limit_test: int | None = Field(None, ge=1)

    @field_validator("id")
    @classmethod
    def _stay_inside(cls, value: str) -> str:
        if ".." in value:
            raise ValueError(f"expected an id such as 'uoft-cs/cifar10', got {value!r}.")
        return value


@register_source(HubConfig)
def load(config: HubConfig, base: Path) -> Data:
    """All splits of the set; those beside training and evaluation are in `others`."""
    require_cache()
    mirror = find_in_mirror(config.id)
    splits = _load_hub(config) if mirror is None else _load_mirror(config, mirror)
    full_name = config.id if config.config is None else f"{config.id} ({config.config})"
    joined = [_require_split(name, splits, full_name, "train_split") for name in config.train_split.split("+")]
    usual = next((name for name in EVALUATION_SPLITS if name in splits and name != joined[-1]), None)
    evaluation = _require_split(config.evaluation_split or usual, splits, full_name, "evaluation_split")
    parts = {split: Part(f"{full_name}, split {split!r}", len(data), mirror) for split, data in splits.items()}
    kept = [split for split in splits if split not in joined or split == evaluation]
    tables = {split: Table(splits[split], [parts[split]]) for split in kept}
    data = import_datasets().concatenate_datasets([splits[split] for split in joined])
    tables[train := "+".join(joined)] = Table(data, [parts[split] for split in joined])
    if config.held_out is not None:
        if evaluation in joined:
            raise DataError(
                f"{full_name}: there is no split left to test on.",
                expected="an evaluation split beside the training split, since 'held_out' sets a part of that aside",
                found=f"{evaluation!r} for both",
                todo="Name another 'evaluation_split'.",
            )
        # Under another name if one trains on the set's own split test.
        whole, train = tables[train], "train" if train == "test" else train
        tables = {train: whole, "test": tables[evaluation]}
        evaluation = train
    return load_tables(
        full_name,
        tables,
        train,
        evaluation,
        config,
        origin="the Hugging Face hub" if mirror is None else "a local mirror",
        fraction=config.held_out,
        limit_test=config.limit_test,
    )


def _require_split(split: str | None, splits: dict[str, Any], full_name: str, field: str) -> str:
    if split is None or split not in splits:
        raise DataError(
            f"{full_name}: there is no split {'to evaluate on' if split is None else repr(split)}.",
            expected=f"one of {listed(EVALUATION_SPLITS)}" if split is None else f"the split that '{field}' names",
            found=f"splits {listed(splits)}",
            todo=f"Set '{field}' to one of the splits.",
        )
    return split


def _load_hub(config: HubConfig) -> dict[str, Any]:
    try:
        return dict(call_load_dataset(config.id, name=config.config, revision=config.revision))
    except (*reading_errors(), *network_errors()) as error:
        raise DataError(
            f"{config.id}: the data set cannot be loaded.",
            expected=f"a folder {config.id} in a mirror that {MIRROR_VARIABLE} names, or access to the hub",
            found=f"{searched_mirrors()}; from the hub: {root_cause(error)}",
            todo=f"Set {MIRROR_VARIABLE} to a folder that holds {config.id}, or connect to the network "
            "(and unset HF_HUB_OFFLINE), or correct 'id', 'config' and 'revision'.",
        ) from error


def network_errors() -> tuple[type[Exception], ...]:
    """What a hub out of reach raises."""
    # huggingface_hub talks through httpx since version 1; through requests before, whose errors are OSErrors.
    try:
        import httpx
    except ImportError:
        return ()
    return (httpx.HTTPError,)


def _load_mirror(config: HubConfig, mirror: Path) -> dict[str, Any]:
    arguments = mirror_arguments(config, mirror)
    try:
        require_files_inside(mirror, arguments)
        return dict(call_load_dataset(str(mirror), **arguments))
    except DataError:
        raise
    except reading_errors() as error:
        broken, problem = _find_broken_parquet(mirror / arguments.get("data_dir", ""))
        raise DataError(
            f"{broken or mirror}: the mirror of {config.id} cannot be read.",
            expected="whole files laid out as on the hub, such as train-00000-of-00001.parquet",
            found=problem or root_cause(error),
            todo="Copy the file from the hub again." if broken else "Check that the files have one schema per split.",
        ) from error


def mirror_arguments(config: HubConfig, mirror: Path) -> dict[str, Any]:
    """How to ask for the configuration: by name if the card of the set declares it, else as a folder."""
    declared = [str(entry["config_name"]) for entry in _declared(mirror) if "config_name" in entry]
    folders = sorted({path.parent.name for path in mirror.glob("*/*.parquet")})
    if config.config is None and (declared or len(folders) < 2):
        return {}
    if config.config in declared:
        return {"name": config.config}
    if config.config is not None and (mirror / config.config).is_dir():
        files = _files_of_splits(mirror / config.config)
        return {"data_dir": config.config} | ({"data_files": files} if files else {})
    several = config.config is None
    raise DataError(
        f"{mirror}: {config.id} has {'several configurations' if several else f'no configuration {config.config!r}'}.",
        expected="the field 'config'" if several else "a folder of that name",
        found=f"configurations {listed(sorted({*declared, *folders}))}; entries {files_or_folders(mirror.iterdir())}",
        todo="Set 'config' to one of these, or add the folder to the mirror.",
    )


def _declared(mirror: Path) -> list[dict[str, Any]]:
    """Configurations that the card of a data set declares.

    Raises:
        DataError: one names an address, which `load_dataset` would ask for before anyone can look at it.
    """
    found: list[dict[str, Any]] = []
    for card in (mirror / "README.md", mirror / ".huggingface.yaml"):
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        head = text.split("\n---", 1)[0] if card.name == "README.md" else text
        try:
            content = yaml.safe_load(head.removeprefix("---"))
        except (yaml.YAMLError, RecursionError):
            continue  # load_dataset says what is wrong with it
        configurations = content.get("configs") if isinstance(content, dict) else None
        for text in texts_in(configurations):
            if "://" in text:
                _refuse_card(card, mirror, text)
        if isinstance(configurations, list):
            found += [entry for entry in configurations if isinstance(entry, dict)]
    return found


def _refuse_card(card: Path, mirror: Path, found: str) -> None:
    raise DataError(
        f"{card}: the card of the data set leads out of its folder.",
        expected=f"files within {mirror}",
        found=repr(found),
        todo="Correct 'data_files' in the card, or remove the card.",
    )


def require_files_inside(mirror: Path, arguments: dict[str, Any]) -> None:
    """Look at what `load_dataset` would open: a card may name any file of the machine or of the network.

    Raises: DataError if a file is not in the mirror.
    """
    _declared(mirror)
    with quiet_progress():
        builder = import_datasets().load_dataset_builder(str(mirror), **arguments)
    homes = (mirror, mirror.resolve(), Path(os.path.normpath(mirror)))  # the mirror itself may be reached by a link
    for files in (builder.config.data_files or {}).values():
        # By name: links within the mirror are its owner's, and followed.
        for file in files:
            if not any(Path(os.path.normpath(file)).is_relative_to(home) for home in homes):
                _refuse_card(mirror / "README.md", mirror, str(file))


def texts_in(value: Any) -> Iterator[str]:
    """Texts below a value of YAML; what aliases repeat is looked at once, however often it stands there.

    Example:
        >>> list(texts_in({"files": ["a", {"train": "b"}], "count": 3}))
        ['a', 'b']
    """
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict | list) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item


def _files_of_splits(folder: Path) -> dict[str, list[str]]:
    """Files by split, if all are named as on the hub; nothing otherwise.

    `load_dataset` by itself takes validation_matched and validation_mismatched for one split, validation.
    """
    splits: dict[str, list[str]] = {}
    for name in sorted(path.name for path in folder.iterdir() if path.suffix == ".parquet"):
        matched = re.fullmatch(r"(\w+)-\d{5}-of-\d{5}\.parquet", name)
        if matched is None:
            return {}
        splits.setdefault(matched[1], []).append(name)
    return splits


def _find_broken_parquet(folder: Path) -> tuple[Path | None, str]:
    """The file that `load_dataset` failed at, and why, if one of the files is at fault by itself."""
    import pyarrow
    import pyarrow.parquet

    for path in sorted(folder.rglob("*.parquet")):
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                if not sum(batch.num_rows for batch in file.iter_batches()):
                    return path, "a file without rows"
        except (pyarrow.ArrowException, OSError) as error:
            return path, root_cause(error)
    return None, ""

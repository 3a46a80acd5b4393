"""Sources of data by name; a new source is one file in `sources`, or one decorated function anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, SerializeAsAny

from wellcond.errors import UnknownChoiceError
from wellcond.lab.data.base import Data
from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.progress import Progress, telling
from wellcond.lab.settings import Settings


class SourceConfig(Settings):
    """Base of the settings of every source; a subclass fixes `source` to its own name."""

    source: str


ConfigT = TypeVar("ConfigT", bound=SourceConfig)


@dataclass(frozen=True)
class Source:
    """The settings of a source and the function that loads it."""

    config_class: type[SourceConfig]
    load: Callable[[Any, Path], Data]


SOURCES: dict[str, Source] = {}


def register_source(
    config_class: type[ConfigT],
) -> Callable[[Callable[[ConfigT, Path], Data]], Callable[[ConfigT, Path], Data]]:
    """Decorate the loader of a source with its settings, whose field `source` has the name as its default."""

    def register(load: Callable[[ConfigT, Path], Data]) -> Callable[[ConfigT, Path], Data]:
        SOURCES[config_class.model_fields["source"].default] = Source(config_class, load)
        return load

    return register


def resolve_config(raw: object) -> SourceConfig:
    """The settings of the source that `raw["source"]` names.

    Raises:
        DataError: `raw` is not a mapping with the field `source`.
        UnknownChoiceError: no such source; lists those registered.
        pydantic.ValidationError: a field of the source is wrong.

    Example:
        >>> resolve_config({"source": "digits"}).source
        'digits'
    """
    if isinstance(raw, SourceConfig):
        return raw
    if not isinstance(raw, Mapping) or "source" not in raw:
        raise DataError(
            "the data of a recipe name no source.",
            expected=f"a mapping with the field 'source', one of {listed(sorted(SOURCES))}",
            found=listed(raw) if isinstance(raw, Mapping) else repr(raw),
            todo="Add for example 'source: digits'.",
        )
    if not isinstance(raw["source"], str) or raw["source"] not in SOURCES:
        raise UnknownChoiceError("data source", raw["source"], sorted(SOURCES))
    return SOURCES[raw["source"]].config_class.model_validate(raw)


DataConfig = Annotated[SourceConfig, BeforeValidator(resolve_config), SerializeAsAny()]
"""Field type of a recipe: the union of all registered sources, told apart by `source` when a recipe is read."""


def load_data(config: DataConfig, *, base: Path | None = None, progress: Progress | None = None) -> Data:
    """Load the data that `config` describes.

    Args:
        config: Settings of one source, from `resolve_config` or a recipe.
        base: Folder that relative paths start from, usually that of the recipe; the current one by default.
        progress: Called with what is done, how much of it, and how much there is, by sources that take long.

    Returns: The splits. Rows and labels are checked here; an image is first decoded when it is asked for.

    Raises:
        DataError: the data are not as described; the message names the file and the row.
        MissingExtraError: a package that the source needs is not installed.
    """
    with telling(progress):
        return SOURCES[config.source].load(config, Path.cwd() if base is None else Path(base))

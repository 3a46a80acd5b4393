"""Data of an experiment: what a recipe names under `data`, as splits with random access."""

from wellcond.errors import needs_extra

with needs_extra("pydantic", "train"):
    import pydantic  # noqa: F401  (every file of this package needs it)

from wellcond.errors import DataError
from wellcond.lab.data.base import (
    Data,
    SourceConfig,
    TensorDataset,
    fingerprint,
    load_data,
    register_source,
    resolve_config,
)
from wellcond.lab.data.generated import GeneratorOptions, register_generator
from wellcond.lab.data.images import as_tensor_images, side_of, to_channels
from wellcond.lab.data.own import held_data, hold_again, hold_data, source_of

# These register themselves.
from wellcond.lab.data import citations, listops, one_text, own, pathfinder, tables, text  # noqa: F401  # isort: skip

__all__ = [
    "Data",
    "DataError",
    "GeneratorOptions",
    "SourceConfig",
    "TensorDataset",
    "as_tensor_images",
    "fingerprint",
    "held_data",
    "hold_again",
    "hold_data",
    "load_data",
    "register_generator",
    "register_source",
    "resolve_config",
    "side_of",
    "source_of",
    "to_channels",
]

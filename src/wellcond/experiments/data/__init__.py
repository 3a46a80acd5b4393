"""Data of an experiment: what a recipe names under `data`, as splits with random access."""

from wellcond.errors import MissingExtraError

try:
    import pydantic  # noqa: F401  (every file of this package needs it)
except ImportError as error:
    raise MissingExtraError("pydantic", "train") from error

from wellcond.experiments.data.bundle import DataBundle, Kind, Split, TensorSplit
from wellcond.experiments.data.errors import DataError
from wellcond.experiments.data.fingerprint import fingerprint
from wellcond.experiments.data.generated import Generated, GeneratorOptions, register_generator
from wellcond.experiments.data.images import TensorImages, as_tensor_images, to_channels
from wellcond.experiments.data.registry import DataConfig, SourceConfig, load_data, register_source, resolve_config

from wellcond.experiments.data import generators, sources  # noqa: F401  isort: skip  (these register themselves)

__all__ = [
    "DataBundle",
    "DataConfig",
    "DataError",
    "Generated",
    "GeneratorOptions",
    "Kind",
    "SourceConfig",
    "Split",
    "TensorImages",
    "TensorSplit",
    "as_tensor_images",
    "fingerprint",
    "load_data",
    "register_generator",
    "register_source",
    "resolve_config",
    "to_channels",
]

"""Tasks by name; importing this registers those that ship."""

from wellcond.experiments.tasks import (
    glue,
    image_classification,
    language_modelling,
    masked_language_modelling,
    pair_classification,
    sequence_classification,
)

__all__ = [
    "glue",
    "image_classification",
    "language_modelling",
    "masked_language_modelling",
    "pair_classification",
    "sequence_classification",
]

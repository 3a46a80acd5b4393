"""Tasks by name; importing this registers those that ship."""

from wellcond.lab.tasks import (
    detection,
    glue,
    image_classification,
    language_modelling,
    masked_language_modelling,
    pair_classification,
    sequence_classification,
)

__all__ = [
    "detection",
    "glue",
    "image_classification",
    "language_modelling",
    "masked_language_modelling",
    "pair_classification",
    "sequence_classification",
]

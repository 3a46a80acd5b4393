"""Tasks by name; importing this registers those that ship."""

from wellcond.experiments.tasks import image_classification, language_modelling, sequence_classification

__all__ = ["image_classification", "language_modelling", "sequence_classification"]

"""Detection: objects of an image, their augmentation, and COCO's official evaluation."""

from wellcond.experiments.detection.augment import CropSettings, DetectionAugmentation, prepare
from wellcond.experiments.detection.evaluation import evaluate, to_results
from wellcond.experiments.detection.instances import Instances

__all__ = ["CropSettings", "DetectionAugmentation", "Instances", "evaluate", "prepare", "to_results"]

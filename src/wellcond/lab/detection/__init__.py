"""Detection: objects of an image, their augmentation, and COCO's official evaluation."""

from wellcond.lab.detection.augment import CropSettings, DetectionAugmentation, prepare
from wellcond.lab.detection.evaluation import evaluate, to_results
from wellcond.lab.detection.instances import Instances

__all__ = ["CropSettings", "DetectionAugmentation", "Instances", "evaluate", "prepare", "to_results"]

"""Detection: COCO's files, their augmentation, Mask R-CNN's losses, and COCO's official evaluation."""

from wellcond.lab.tasks.detection.coco import CocoConfig, CocoDataset, Instances
from wellcond.lab.tasks.detection.evaluation import evaluate, to_results
from wellcond.lab.tasks.detection.samples import CropSettings, DetectionAugmentation, prepare
from wellcond.lab.tasks.detection.task import Detection, DetectionSettings

__all__ = [
    "CocoConfig",
    "CocoDataset",
    "CropSettings",
    "Detection",
    "DetectionAugmentation",
    "DetectionSettings",
    "Instances",
    "evaluate",
    "prepare",
    "to_results",
]

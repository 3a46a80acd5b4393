"""Detection: COCO's files, their augmentation, Mask R-CNN's losses, and COCO's official evaluation."""

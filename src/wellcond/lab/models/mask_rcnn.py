"""Mask R-CNN with a feature pyramid on a timm backbone: torchvision's detector, with XCiT or Swin below it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import nn

from wellcond.errors import MissingExtraError
from wellcond.lab.models.registry import ArchitectureOptions, register_architecture

Share = Annotated[float, Field(ge=0, le=1)]
FourTaps = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt]
FiveSizes = tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt]


class MaskRcnnOptions(ArchitectureOptions):
    """Options of `mask_rcnn`; defaults are those of torchvision, on the smallest XCiT of timm."""

    num_classes: PositiveInt
    """Classes of things; the background is not one of them."""
    backbone: str = "xcit_nano_12_p16_224"
    """Name of an XCiT or Swin of timm."""
    backbone_arguments: dict[str, Any] = Field(default_factory=dict)
    """For timm's constructor, such as embed_dim, depth and num_heads."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    taps: FourTaps | None = None
    """Blocks (XCiT) or stages (Swin), from 0, whose outputs become strides 4, 8, 16 and 32. By default the ends of the
    four stages; in a column of 12 blocks 3, 5, 7 and 11, and the same shares of the depth in others."""
    upsample: Literal["double", "single"] = "double"
    """How a column of stride 16 comes to stride 4: two transposed convolutions with a norm and GELU between, as in the
    XCiT release, or one of 4 x 4."""
    checkpointing: bool = False
    """Compute the backbone's activations again in the backward pass instead of keeping them."""
    pyramid_width: PositiveInt = 256
    anchor_sizes: FiveSizes = (32, 64, 128, 256, 512)
    """Side in pixels, of the four strides and of the extra level of stride 64."""
    aspect_ratios: tuple[PositiveFloat, ...] = (0.5, 1.0, 2.0)
    canonical_size: PositiveInt = 224
    """Side of a region that is pooled from stride 16."""
    box_resolution: PositiveInt = 7
    mask_resolution: PositiveInt = 14
    box_head: PositiveInt = 1024
    """Width of the two layers."""
    mask_head: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (256, 256, 256, 256)
    """Widths of the convolutions."""
    anchors_sampled: PositiveInt = 256
    """Anchors of an image that the loss of the proposals is computed on."""
    regions_sampled: PositiveInt = 512
    """Proposals of an image that the losses of boxes, classes and masks are computed on."""
    positive_regions: Share = 0.25
    """Share of them that may be things."""
    proposals: tuple[PositiveInt, PositiveInt] = (2000, 1000)
    """Proposals of an image, in training and in evaluation."""
    detections: PositiveInt = 100
    """Of an image, at most."""
    score_threshold: Share = 0.05
    nms_threshold: Share = 0.5

    @model_validator(mode="after")
    def _fits_together(self) -> MaskRcnnOptions:
        if self.taps is not None and sorted(set(self.taps)) != list(self.taps):
            raise ValueError(f"taps: expected four numbers that rise, found {list(self.taps)}")
        for name in ("drop_path_rate", "num_classes", "in_chans"):
            if name in self.backbone_arguments:
                instead = "drop_path" if name == "drop_path_rate" else "num_classes of the detector, and three channels"
                raise ValueError(f"backbone_arguments.{name}: leave it out; use {instead}")
        return self


@register_architecture("mask_rcnn", MaskRcnnOptions)
def mask_rcnn(options: MaskRcnnOptions) -> nn.Module:
    """Boxes, classes and masks of the things in an image."""
    try:
        import timm  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("timm and torchvision", "detection") from error
    from wellcond.lab.models.detector import Detector

    return Detector(options)

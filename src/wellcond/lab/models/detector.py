"""torchvision's Mask R-CNN for padded batches: losses in training; detections, and losses too, in evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from wellcond.lab.models.mask_rcnn import MaskRcnnOptions
from wellcond.lab.models.pyramid import LEFT_OUT, STRIDES, TimmPyramid

Target = dict[str, Tensor]
MULTIPLE = 32
"""Sides of a padded image are multiples of it."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet."""


# What the heads predict is added to coordinates, which half precision does not hold: 1,333 pixels are 8 apart in bf16.
class _ProposalHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, boxes = super().forward(x)
        return [score.float() for score in scores], [box.float() for box in boxes]


class _BoxPredictor(FastRCNNPredictor):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = super().forward(x)
        return scores.float(), boxes.float()


class _MaskPredictor(MaskRCNNPredictor):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Detector(MaskRCNN):
    """Mask R-CNN. Attention is found, initialised, conditioned and folded in it as in any model."""

    encoder_prefix = "backbone.body."
    """Where the weights of a pre-trained classifier belong."""
    encoder_left_out = LEFT_OUT

    def __init__(self, options: MaskRcnnOptions) -> None:
        """Freshly initialised, each part as its library does."""
        width, classes = options.pyramid_width, options.num_classes + 1
        backbone = TimmPyramid(
            options.backbone,
            options.backbone_arguments | {"drop_path_rate": options.drop_path},
            taps=options.taps,
            upsample=options.upsample,
            width=width,
            checkpointing=options.checkpointing,
        )
        anchors = AnchorGenerator(
            tuple((size,) for size in options.anchor_sizes), (options.aspect_ratios,) * len(options.anchor_sizes)
        )
        in_training, in_evaluation = options.proposals
        super().__init__(
            backbone,
            image_mean=list(MEAN),
            image_std=list(DEVIATION),
            rpn_anchor_generator=anchors,
            rpn_head=_ProposalHead(width, anchors.num_anchors_per_location()[0]),
            rpn_pre_nms_top_n_train=in_training,
            rpn_post_nms_top_n_train=in_training,
            rpn_pre_nms_top_n_test=in_evaluation,
            rpn_post_nms_top_n_test=in_evaluation,
            rpn_batch_size_per_image=options.anchors_sampled,
            box_roi_pool=_pool(options.box_resolution, options.canonical_size),
            box_head=TwoMLPHead(width * options.box_resolution**2, options.box_head),
            box_predictor=_BoxPredictor(options.box_head, classes),
            box_score_thresh=options.score_threshold,
            box_nms_thresh=options.nms_threshold,
            box_detections_per_img=options.detections,
            box_batch_size_per_image=options.regions_sampled,
            box_positive_fraction=options.positive_regions,
            mask_roi_pool=_pool(options.mask_resolution, options.canonical_size),
            mask_head=MaskRCNNHeads(width, options.mask_head, 1),
            mask_predictor=_MaskPredictor(options.mask_head[-1], options.mask_head[-1], classes),
        )
        self.options = options

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        sizes: Tensor | None = None,
        targets: Sequence[Target] | None = None,
        original_sizes: Tensor | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Any:
        """Losses of a batch in training; detections of every image, and its losses where targets are given, otherwise.

        In evaluation every image is computed by itself, without the padding that other images of its batch ask for,
        so that its detections and losses do not depend on the batch it is in.

        Args:
            images: (batch, 3, height, width) in 0..1, padded at the bottom and on the right to multiples of 32.
            sizes: (batch, 2), height and width of each before it was padded; None: none is padded, and without targets
                all are computed at once.
            targets: `boxes` (n, 4), `labels` (n,) from 1, and `masks` (n, height, width), of each image.
            original_sizes: (batch, 2), sizes that detections are scaled to.
            seeds: of the regions that the losses of each image are computed on, in evaluation.

        Returns: in training the losses by name, means over the batch. In evaluation a list with a dict of `boxes`,
            `labels`, `scores` and `masks` (n, 1, height, width) for each image; with targets also the list of losses.
        """
        shapes = [tuple(images.shape[-2:])] * len(images) if sizes is None else [tuple(size) for size in sizes.tolist()]
        if self.training:
            assert targets is not None, "training needs targets"
            return self._losses(self._normalised(images, shapes), shapes, list(targets))
        originals = shapes if original_sizes is None else [tuple(size) for size in original_sizes.tolist()]
        if sizes is None and targets is None:
            return self._detect(self._normalised(images, shapes), shapes, originals)
        found, losses = [], []
        for place, shape in enumerate(shapes):
            height, width = (-(-side // MULTIPLE) * MULTIPLE for side in shape)
            image = self._normalised(images[place : place + 1, :, :height, :width], [shape])
            features = self.backbone(image)
            found += self._detect(image, [shape], [originals[place]], features)
            if targets is not None:
                target = targets[place] | {"masks": targets[place]["masks"][:, :height, :width]}
                with self._as_in_training(), _seeded(0 if seeds is None else seeds[place], image.device):
                    losses.append(self._losses(image, [shape], [target], features))
        return found if targets is None else (found, losses)

    def _normalised(self, images: Tensor, shapes: list[tuple[int, ...]]) -> Tensor:
        """Mean 0 and deviation 1; padding is 0."""
        normalised = self.transform.normalize(images)
        for image, (height, width) in zip(normalised, shapes, strict=True):
            image[:, height:] = 0
            image[:, :, width:] = 0
        return normalised

    def _losses(self, images: Tensor, shapes: list, targets: list[Target], features: Any = None) -> dict[str, Tensor]:
        features = self.backbone(images) if features is None else features
        proposals, of_proposals = self.rpn(ImageList(images, shapes), features, targets)
        _, of_regions = self.roi_heads(features, proposals, shapes, targets)
        return of_proposals | of_regions

    def _detect(self, images: Tensor, shapes: list, originals: list, features: Any = None) -> list[dict[str, Tensor]]:
        features = self.backbone(images) if features is None else features
        proposals, _ = self.rpn(ImageList(images, shapes), features)
        detections, _ = self.roi_heads(features, proposals, shapes)
        return self.transform.postprocess(detections, shapes, originals)

    @contextlib.contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Let the heads compute losses; their layers do not behave otherwise then, and the backbone is not touched."""
        parts = (self.rpn, self.roi_heads)
        for part in parts:
            part.training = True
        try:
            yield
        finally:
            for part in parts:
                part.training = False


def _pool(resolution: int, canonical_size: int) -> MultiScaleRoIAlign:
    names = [str(place) for place in range(len(STRIDES))]
    pool = MultiScaleRoIAlign(names, resolution, 2, canonical_scale=canonical_size)
    # torchvision would guess them from the first image, wrongly if that is mostly padding, and keep its guess.
    pool.scales = [1 / stride for stride in STRIDES]
    pool.map_levels = initLevelMapper(2, 5, canonical_scale=canonical_size, canonical_level=4)
    return pool


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of torch by a seed, and afterwards as if none had been drawn."""
    own = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(own, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        yield

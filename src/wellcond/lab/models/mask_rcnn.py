"""torchvision's Mask R-CNN with a feature pyramid on an XCiT or Swin of timm, for padded batches."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool
from torchvision.ops.poolers import initLevelMapper

from wellcond.lab.models.build import build_model
from wellcond.lab.settings import Fraction, Settings

STRIDES = (4, 8, 16, 32)  # the sides of a padded image are multiples of the last
ASPECT_RATIOS = (0.5, 1.0, 2.0)  # of torchvision


class MaskRcnnOptions(Settings):
    """Options of `mask_rcnn`; defaults are those of torchvision, on the smallest XCiT of timm."""

    num_classes: PositiveInt
    """Without the background."""
    backbone: str = "xcit_nano_12_p16_224"
    """Name of an XCiT or Swin of timm."""
    backbone_arguments: dict[str, Any] = Field(default_factory=dict)
    """For timm's constructor, such as embed_dim, depth and num_heads."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    pyramid_width: PositiveInt = 256
    anchor_sizes: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (32, 64, 128, 256, 512)
    """Side in pixels, of the four strides and of the extra level of stride 64."""
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
    positive_regions: Fraction = 0.25
    """Share of them that may be objects."""
    proposals: tuple[PositiveInt, PositiveInt] = (2000, 1000)
    """Proposals of an image and a level before non-maximum suppression, in training and in evaluation."""
    proposals_kept: tuple[PositiveInt, PositiveInt] | None = None
    """Proposals of an image after it, in training and in evaluation; null: as many as before it, as in torchvision."""
    pooling_samples: NonNegativeInt = 2
    """Points on a side of a bin of RoIAlign; 0: as many as the bin has pixels, as in mmdetection."""
    box_loss: Literal["smooth_l1", "l1"] = "smooth_l1"
    """Of proposals and boxes: torchvision's, quadratic below 1/9, or mmdetection's."""
    upsampling: Literal["two", "single"] = "two"
    """Transposed convolutions from stride 16 to 4: two with a norm and GELU between (XCiT's release), or one."""
    detections: PositiveInt = 100
    """Of an image, at most."""


class SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over all ranks; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """The sum, a tensor of its own."""
        total = values.clone()
        torch.distributed.all_reduce(total)
        return total

    backward = forward


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch norm over the samples of all ranks, on CPUs too, where DDP refuses torch's own class."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        if not (self.training and torch.distributed.is_available() and torch.distributed.is_initialized()):
            return super().forward(input)
        values, channels = input.float(), input.shape[1]
        count = values.new_full((1,), values.numel() / channels)
        sums = [values.sum((0, 2, 3)), values.square().sum((0, 2, 3)), count]
        total, squares, number = SumOverRanks.apply(torch.cat(sums)).split([channels, channels, 1])
        mean = total / number
        variance = squares / number - mean.square()
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum or 0.0)
            self.running_var.lerp_(variance * number / (number - 1), self.momentum or 0.0)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        shift = self.bias - mean * scale
        return (values * scale[:, None, None] + shift[:, None, None]).to(input.dtype)


class TimmPyramid(nn.Module):
    """Backbone and pyramid; `body` is timm's own model without what only a classifier needs, under timm's names."""

    body: Any

    def __init__(self, options: MaskRcnnOptions) -> None:
        super().__init__()
        name, arguments = options.backbone, options.backbone_arguments | {"drop_path_rate": options.drop_path}
        # Swin then pads its windows, and does not shrink them for small maps.
        any_size = {"strict_img_size": False, "always_partition": True} if name.startswith("swin") else {}
        self.body = build_model(f"timm:{name}", any_size | arguments)
        if type(self.body).__name__ not in ("Xcit", "SwinTransformer"):
            raise ValueError(f"backbone: expected an XCiT or Swin of timm, found {name} ({type(self.body).__name__})")
        info, depth = self.body.feature_info, len(self.body.feature_info)
        # The ends of four stages or, as in the XCiT release, blocks 3, 5, 7, 11 of a column of 12.
        column = enumerate((depth // 3, depth // 2, 2 * depth // 3, depth)) if name.startswith("xcit") else ()
        self.taps = tuple(max(place, end - 1) for place, end in column) or tuple(range(depth))
        strides = [info[tap]["reduction"] for tap in self.taps if tap < depth]
        if strides != [16] * 4 and strides != list(STRIDES):
            raise ValueError(
                f"backbone: expected outputs of strides 4, 8, 16, 32, or four of stride 16, found {strides} in {name}; "
                "change backbone_arguments"
            )
        channels = [info[tap]["num_chs"] for tap in self.taps]
        # What gets no gradient is removed: with several ranks DDP would wait for it.
        self.body.prune_intermediate_layers(list(self.taps), prune_norm=True, prune_head=True)
        if hasattr(self.body, "cls_token"):
            del self.body.cls_token
        levels: list[nn.Module] = [LayerNorm2d(width) for width in channels]
        if strides != list(STRIDES):  # what brings four maps of stride 16 to those of the pyramid, as in XCiT's release
            up = functools.partial(nn.ConvTranspose2d, channels[0], channels[0], 2, stride=2)
            if options.upsampling == "two":
                first: nn.Module = nn.Sequential(up(), SharedBatchNorm(channels[0]), nn.GELU(), up())
            else:
                first = nn.ConvTranspose2d(channels[0], channels[0], 4, stride=4)
            levels = [first, up(), nn.Identity(), nn.MaxPool2d(2)]
        self.levels = nn.ModuleList(levels)
        self.pyramid = FeaturePyramidNetwork(channels, options.pyramid_width, extra_blocks=LastLevelMaxPool())
        self.out_channels = options.pyramid_width

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Maps of strides 4 to 64 of images whose sides are multiples of 32."""
        maps = self.body.forward_intermediates(images, indices=list(self.taps), intermediates_only=True)
        named = OrderedDict((str(k), level(m)) for k, (level, m) in enumerate(zip(self.levels, maps, strict=True)))
        # Anchors and regions take the number format of these maps: half precision does not hold coordinates.
        return OrderedDict((key, value.float()) for key, value in self.pyramid(named).items())


class AbsoluteBoxLoss(TorchFunctionMode):
    """Every smooth L1 loss inside is the L1 loss: torchvision has its kind of box loss written into its functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what torchvision calls, with another `beta` where it is that loss."""
        changed = {"beta": 0.0} if func is smooth_l1_loss else {}
        return func(*args, **(kwargs or {}) | changed)


class Detector(MaskRCNN):
    """Mask R-CNN. Attention is found, initialised, conditioned and folded in it as in any model."""

    encoder_prefix = "backbone.body."
    """Where the weights of a pre-trained classifier belong."""
    encoder_left_out = ("cls_token", "cls_attn_blocks.", "norm.", "head.")
    """Beginnings of the names of weights that only the classifier has."""

    def __init__(self, options: MaskRcnnOptions) -> None:
        width, classes = options.pyramid_width, options.num_classes + 1
        sizes = tuple((size,) for size in options.anchor_sizes)
        in_training, in_evaluation = options.proposals
        kept_in_training, kept_in_evaluation = options.proposals_kept or options.proposals
        super().__init__(
            TimmPyramid(options),
            rpn_anchor_generator=AnchorGenerator(sizes, (ASPECT_RATIOS,) * len(sizes)),
            rpn_head=RPNHead(width, len(ASPECT_RATIOS)),
            rpn_pre_nms_top_n_train=in_training,
            rpn_post_nms_top_n_train=kept_in_training,
            rpn_pre_nms_top_n_test=in_evaluation,
            rpn_post_nms_top_n_test=kept_in_evaluation,
            rpn_batch_size_per_image=options.anchors_sampled,
            box_roi_pool=_pool(options.box_resolution, options),
            box_head=TwoMLPHead(width * options.box_resolution**2, options.box_head),
            box_predictor=FastRCNNPredictor(options.box_head, classes),
            box_detections_per_img=options.detections,
            box_batch_size_per_image=options.regions_sampled,
            box_positive_fraction=options.positive_regions,
            mask_roi_pool=_pool(options.mask_resolution, options),
            mask_head=MaskRCNNHeads(width, options.mask_head, 1),
            mask_predictor=MaskRCNNPredictor(options.mask_head[-1], options.mask_head[-1], classes),
        )
        self.options = options
        # Half precision does not hold coordinates: 1,333 pixels are 8 apart in bf16.
        for part in (self.rpn.head, self.roi_heads.box_predictor, self.roi_heads.mask_predictor):
            part.register_forward_hook(lambda _, inputs, output: tree_map(Tensor.float, output))

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        sizes: Tensor | None = None,
        targets: Sequence[dict[str, Tensor]] | None = None,
        original_sizes: Tensor | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Any:
        """Losses by name, means over the batch, in training.

        Otherwise `boxes`, `labels`, `scores` and `masks` (n, 1, height, width) of each image, with targets also its
        losses; every image is computed by itself, without the padding that others of its batch ask for.

        Args:
            images: (batch, 3, height, width) in 0..1, padded at the bottom and on the right to multiples of 32.
            sizes: (batch, 2) before padding; None: none is padded, and all are computed at once.
            targets: `boxes` (n, 4), `labels` (n,) from 1, and `masks` (n, height, width), of each image.
            original_sizes: (batch, 2), sizes that detections are scaled to.
            seeds: of the regions that the losses of each image are computed on, in evaluation.
        """
        shapes = [tuple(images.shape[-2:])] * len(images) if sizes is None else [tuple(size) for size in sizes.tolist()]
        originals = shapes if original_sizes is None else [tuple(size) for size in original_sizes.tolist()]
        if self.training or sizes is None:
            encoded = self._encode(images, shapes)
            return self._losses(*encoded, list(targets or ())) if self.training else self._detect(*encoded, originals)
        found, losses = [], []
        for place, shape in enumerate(shapes):
            height, width = (-(-side // STRIDES[-1]) * STRIDES[-1] for side in shape)
            encoded = self._encode(images[place : place + 1, :, :height, :width], [shape])
            found += self._detect(*encoded, [originals[place]])
            if targets is not None and seeds is not None:
                target = targets[place] | {"masks": targets[place]["masks"][:, :height, :width]}
                with self._seeded(seeds[place], images.device):
                    losses.append(self._losses(*encoded, [target]))
        return (found, losses) if losses else found

    def _encode(self, images: Tensor, shapes: list) -> tuple[ImageList, Any]:
        """Images of mean 0 and deviation 1, whose padding is 0, and their maps."""
        normalised = self.transform.normalize(images)
        for image, (height, width) in zip(normalised, shapes, strict=True):
            image[:, height:] = 0
            image[:, :, width:] = 0
        return ImageList(normalised, shapes), self.backbone(normalised)

    def _losses(self, images: ImageList, features: Any, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        with AbsoluteBoxLoss() if self.options.box_loss == "l1" else contextlib.nullcontext():
            proposals, of_proposals = self.rpn(images, features, targets)
            _, of_regions = self.roi_heads(features, proposals, images.image_sizes, targets)
        return of_proposals | of_regions

    def _detect(self, images: ImageList, features: Any, originals: list) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        detections, _ = self.roi_heads(features, proposals, images.image_sizes)
        return self.transform.postprocess(detections, images.image_sizes, originals)

    @contextlib.contextmanager
    def _seeded(self, seed: int, device: torch.device) -> Iterator[None]:
        """Let the heads, whose layers know no difference, compute losses in evaluation, on regions drawn by a seed."""
        on_cpu = device.type == "cpu"
        self.rpn.training = self.roi_heads.training = True
        try:
            with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
                torch.manual_seed(seed)
                yield
        finally:
            self.rpn.training = self.roi_heads.training = False


def _pool(resolution: int, options: MaskRcnnOptions) -> MultiScaleRoIAlign:
    names, canonical_size = [str(place) for place in range(len(STRIDES))], options.canonical_size
    pool = MultiScaleRoIAlign(names, resolution, options.pooling_samples, canonical_scale=canonical_size)
    # torchvision would guess them from the first image, wrongly if that is mostly padding, and keep its guess.
    pool.scales = [1 / stride for stride in STRIDES]
    pool.map_levels = initLevelMapper(2, 5, canonical_scale=canonical_size, canonical_level=4)
    return pool

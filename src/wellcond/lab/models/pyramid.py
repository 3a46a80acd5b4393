"""A timm backbone as feature maps of strides 4, 8, 16 and 32, and the feature pyramid on top of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from wellcond.lab.models.shared_norm import SharedBatchNorm
from wellcond.models import build_model

STRIDES = (4, 8, 16, 32)
LEFT_OUT = ("cls_token", "cls_attn_blocks.", "norm.", "head.")
"""Parts of a classifier that a detector has no use for, as its weights are named."""
FAMILIES = {"Xcit": {}, "SwinTransformer": {"strict_img_size": False, "always_partition": True}}
"""What each needs to take images of any size: Swin pads its windows, and does not shrink them for small maps."""


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TimmPyramid(nn.Module):
    """Backbone and pyramid; `body` is timm's own model without what only a classifier needs, under timm's names."""

    body: Any

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        *,
        taps: tuple[int, ...] | None,
        upsample: str,
        width: int,
        checkpointing: bool = False,
    ) -> None:
        """`taps` are blocks or stages; see `MaskRcnnOptions`.

        Raises: ValueError for a model of another family, or taps that it does not have.
        """
        super().__init__()
        self.body = build_model(f"timm:{name}", _family_arguments(name) | arguments)
        if type(self.body).__name__ not in FAMILIES:
            raise ValueError(f"backbone: expected an XCiT or Swin of timm, found {name} ({type(self.body).__name__})")
        info = [dict(entry) for entry in self.body.feature_info]
        self.taps = _default_taps(info) if taps is None else taps
        if len(self.taps) != len(STRIDES) or max(self.taps) >= len(info):
            raise ValueError(f"taps: expected four of the {len(info)} outputs of {name}, found {list(self.taps)}")
        channels = [info[tap]["num_chs"] for tap in self.taps]
        strides = [info[tap]["reduction"] for tap in self.taps]
        _drop_classifier(self.body, self.taps)
        self.body.set_grad_checkpointing(checkpointing)
        self.levels = nn.ModuleList(_levels(strides, channels, upsample, name))
        self.pyramid = FeaturePyramidNetwork(channels, width, extra_blocks=LastLevelMaxPool())
        self.out_channels = width

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Maps of strides 4 to 64 of images whose sides are multiples of 32."""
        maps = self.body.forward_intermediates(images, indices=list(self.taps), intermediates_only=True)
        named = OrderedDict(
            (str(place), level(m)) for place, (level, m) in enumerate(zip(self.levels, maps, strict=True))
        )
        # Anchors and regions take the number format of these maps: half precision does not hold coordinates.
        return OrderedDict((key, value.float()) for key, value in self.pyramid(named).items())


def _family_arguments(name: str) -> dict[str, Any]:
    return next((given for family, given in FAMILIES.items() if name.startswith(family[:4].lower())), {})


def _default_taps(info: list[dict[str, Any]]) -> tuple[int, ...]:
    depth = len(info)
    if len({entry["reduction"] for entry in info}) > 1:
        return tuple(range(depth))
    # Blocks 3, 5, 7, 11 of 12; in a column of four all of them.
    return tuple(max(place, wanted - 1) for place, wanted in enumerate((depth // 3, depth // 2, 2 * depth // 3, depth)))


def _drop_classifier(body: nn.Module, taps: tuple[int, ...]) -> None:
    """Take out what gets no gradient: several processes would wait for it."""
    body.prune_intermediate_layers(list(taps), prune_norm=True, prune_head=True)  # type: ignore[operator]
    if hasattr(body, "cls_token"):
        del body.cls_token


def _levels(strides: list[int], channels: list[int], upsample: str, name: str) -> list[nn.Module]:
    if strides == list(STRIDES):
        return [ChannelNorm(width) for width in channels]
    if len(set(strides)) > 1 or strides[0] not in (8, 16):
        raise ValueError(
            f"backbone: expected outputs of strides 4, 8, 16, 32, or a column of stride 8 or 16, found {strides} in "
            f"{name}; change taps or backbone_arguments"
        )
    return [_resize(strides[0], wanted, width, upsample) for wanted, width in zip(STRIDES, channels, strict=True)]


def _resize(stride: int, wanted: int, width: int, upsample: str) -> nn.Module:
    """From the stride of a column to the one that is wanted."""
    if wanted >= stride:
        return nn.Identity() if wanted == stride else nn.MaxPool2d(wanted // stride)
    factor = stride // wanted
    if factor == 2 or upsample == "single":
        return nn.ConvTranspose2d(width, width, factor, stride=factor)
    return nn.Sequential(
        nn.ConvTranspose2d(width, width, 2, stride=2),
        SharedBatchNorm(width),
        nn.GELU(),
        nn.ConvTranspose2d(width, width, 2, stride=2),
    )

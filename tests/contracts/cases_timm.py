"""Tiny timm models, one per family of attention, and what their attention adds to the plain formula.

Sizes are such that no two arrangements coincide: at least two heads, and heads wider than one. `facts` are written by
hand from timm's source; what is not listed for a site must have the value in `USUAL`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import attention2d, attention_pool, attention_pool2d, bottleneck_attn, halo_attn, non_local_attn
from timm.models import (
    cpubone,
    efficientformer,
    fastvit,
    gcvit,
    lowformer,
    maxxvit,
    metaformer,
    nest,
    nextvit,
    visformer,
    vision_transformer,
    vision_transformer_sam,
    volo,
)
from torch import Tensor, nn

from contracts.harness import Call

USUAL = {
    "kind": "softmax",
    "causal": False,
    "cross": False,
    "relative_position_bias": False,
    "qk_norm": None,
    "rotary": False,
    "talking_heads": False,
    "modifiers": (),
    "roles": {"query": "q", "key": "k", "value": "v"},
}


def image(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def tokens(num: int, dim: int) -> Tensor:
    return torch.randn(1, num, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A model, its input, hand-written facts by site name, and the pieces that only this family has.

    bias(module, q, call): what is added to the logits; q is (leading, heads, tokens, head_dim), before scaling.
    learned_scale(module, num_tokens): the scale where a site says that none is fixed.
    rope(module, call): (table, number of tokens that are not rotated, half layout).
    regroup(module, x): tokens (..., N, D) as (leading, N, D), where the module divides them itself.
    memory(module, x): what is done to the tokens before keys and values are projected.
    reader(module): which module reads the concatenated heads, where that is not O itself.
    """

    build: Callable[[], nn.Module]
    facts: dict[str, dict[str, Any]]
    input: Callable[[], Tensor] = image
    token_dims: int = 1
    bias: Callable[[Any, Tensor, Call], Tensor] | None = None
    learned_scale: Callable[[Any, int], Tensor | float] | None = None
    rope: Callable[[Any, Call], tuple[Tensor, int, bool]] | None = None
    regroup: Callable[[Any, Tensor], Tensor] | None = None
    memory: Callable[[Any, Tensor], Tensor] | None = None
    reader: Callable[[Any], nn.Module] | None = None
    refused: tuple[str, ...] = ()

    def run(self, model: nn.Module) -> Any:
        return model(self.input())

    def chosen(self, sites: list[Any]) -> list[Any]:
        return sites


def model(name: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, num_classes=3, **options)


VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 12, "depth": 1, "num_heads": 4}
ROPE = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
SWIN = {"img_size": 32, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 4), "window_size": 4}
THIRD, QUARTER, EIGHTH = 3**-0.5, 4**-0.5, 8**-0.5
POSITION_TERM = ("query position term",)


def same(names: list[str], **facts: Any) -> dict[str, dict[str, Any]]:
    return {name: facts for name in names}


def one(build: Callable[[], nn.Module], path: str = "blocks.0.attn", *, scale: Any = THIRD, **given: Any) -> Case:
    """A model with one attention layer at a path; what is no field of a case is a fact."""
    fields = {name: given.pop(name) for name in list(given) if name in Case.__dataclass_fields__}
    return Case(build, {path: {"scale": scale} | given}, **fields)


def alone(x: Tensor, cls: Callable[..., nn.Module], width: int, **given: Any) -> Case:
    """An attention layer by itself on x; what is neither a fact nor a field of a case is an argument of its class."""
    known = {*USUAL, "scale", *Case.__dataclass_fields__}
    about = {name: given.pop(name) for name in list(given) if name in known}
    return one(partial(cls, width, **given), "", input=lambda: x, **about)


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> Callable[[], nn.Module]:
    return model(name, **VIT | options)


def eva(name: str = "eva02_tiny_patch14_224", **options: Any) -> Callable[[], nn.Module]:
    return model(name, **ROPE | options)


def window_mask(call: Call) -> Tensor | float:
    mask = call.kwargs.get("mask", call.args[1] if len(call.args) > 1 else None)
    return 0.0 if mask is None else mask[:, None]


def swin_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    return module._get_rel_pos_bias() + window_mask(call)


def swin_v2_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    area = module.window_size[0] * module.window_size[1]
    table = module.cpb_mlp(module.relative_coords_table).view(-1, module.num_heads)
    bias = table[module.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1)
    return 16 * torch.sigmoid(bias) + window_mask(call)


def beit_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    own = 0.0 if module.relative_position_bias_table is None else module._get_rel_pos_bias()
    shared = call.kwargs.get("shared_rel_pos_bias")
    return own + (0.0 if shared is None else shared)


def relpos_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    return call.kwargs["shared_rel_pos"] if module.rel_pos is None else module.rel_pos.get_bias()


def sam_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    size = tuple(call.args[0].shape[1:3])
    flat = vision_transformer_sam.get_decomposed_rel_pos_bias(
        q.flatten(0, 1), module.rel_pos_h, module.rel_pos_w, size, size
    )
    return flat.reshape(*q.shape[:2], *flat.shape[-2:])


def levit_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    return module.attention_biases[:, module.attention_bias_idxs]


def bottleneck_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    return module.pos_embed(q.flatten(0, 1)).reshape(*q.shape[:2], q.shape[2], -1)


def halo_bias(module: Any, q: Tensor, call: Call) -> Tensor:
    return module.pos_embed(q.flatten(0, 1).unsqueeze(1)).reshape(*q.shape[:2], q.shape[2], -1)


def halo_memory(module: Any, x: Tensor) -> Tensor:
    side = int(x.shape[1] ** 0.5)
    grid = x.reshape(1, side, side, -1)
    pad = module.halo_size
    # kv has no bias, so that padding its input with zeros is padding its output with zeros.
    return nn.functional.pad(grid, (0, 0, pad, pad, pad, pad)).flatten(1, 2)


def called_rope(module: Any, call: Call) -> tuple[Tensor, int, bool]:
    return call.kwargs["rope"], module.num_prefix_tokens, module.rotate_half


def pool_rope(module: Any, call: Call) -> tuple[Tensor, int, bool]:
    return module.pos_embed.get_embed(call.args[0].shape[-2:]), 1, False


def temperature(module: Any, num_tokens: int) -> Tensor:
    return module.temperature


def cosine_scale(module: Any, num_tokens: int) -> Tensor:
    return module.logit_scale.reshape(-1, 1, 1).clamp(max=torch.log(torch.tensor(100.0)).item()).exp()


def token_scale(module: Any, num_tokens: int) -> float:
    return num_tokens**-0.5


def mask_units(module: Any, x: Tensor) -> Tensor:
    if not module.use_mask_unit_attn:
        return x
    num_units = x.shape[1] // (module.q_stride * module.window_size)
    return x.reshape(x.shape[0], -1, num_units, x.shape[-1]).transpose(1, 2).flatten(0, 1)


def maxxvit_model(block: str, **transformer: Any) -> nn.Module:
    cfg = maxxvit.MaxxVitCfg(
        embed_dim=(16,),
        depths=(1,),
        block_type=(block,),
        stem_width=8,
        transformer_cfg=maxxvit.MaxxVitTransformerCfg(dim_head=4, window_size=(2, 2), **transformer),
    )
    return maxxvit.MaxxVit(cfg, img_size=16, num_classes=3)


SEPARATE_POOL = {"num_heads": 3, "qkv_separate": True, "out_features": 5, "scale": QUARTER}
MAXVIT_SITES = ["stages.0.blocks.0.attn_block.attn", "stages.0.blocks.0.attn_grid.attn"]
SWIN_SITES = ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]
CR_SITES = ["stages.0.blocks.0.attn", "stages.0.blocks.1.attn", "stages.1.blocks.0.attn"]
COSINE = {"scale": None, "qk_norm": "l2", "relative_position_bias": True}
CROSS_COVARIANCE = {"kind": "cross_covariance", "scale": None, "qk_norm": "l2"}

CASES: dict[str, Case] = {
    "vit": one(vit()),
    "vit_qk_norm": one(vit(qk_norm=True), qk_norm="layer"),
    "vit_rms_norm": one(vit(qk_norm=True, norm_layer="rmsnorm"), qk_norm="rms"),
    "vit_scale_norm": one(vit(scale_attn_norm=True), modifiers=("output norm",), reader=lambda module: module.norm),
    "vit_parallel": one(vit(block_fn=vision_transformer.ParallelScalingBlock), "blocks.0"),
    "vit_parallel_fused": one(
        vit(block_fn=partial(vision_transformer.ParallelScalingBlock, fuse_out_proj=True), qkv_bias=False), "blocks.0"
    ),
    "vit_map_pool": Case(
        vit(global_pool="map"),
        {"blocks.0.attn": {"scale": THIRD}, "attn_pool": {"scale": THIRD, "cross": True}},
    ),
    "deit": one(vit("deit_tiny_distilled_patch16_224")),
    "deit3": one(vit("deit3_small_patch16_224")),
    "beit": one(vit("beit_base_patch16_224"), relative_position_bias=True, bias=beit_bias),
    "beit_shared_bias": one(
        vit("beit_base_patch16_224", use_shared_rel_pos_bias=True, use_rel_pos_bias=False),
        relative_position_bias=True,
        bias=beit_bias,
    ),
    "beit_plain": one(vit("beit_base_patch16_224", use_rel_pos_bias=False)),
    "eva_fused": one(eva(), scale=EIGHTH, rotary=True, rope=called_rope),
    "eva_separate": one(
        eva(qkv_fused=False, scale_attn_inner=True, qk_norm=True),
        scale=EIGHTH,
        rotary=True,
        qk_norm="layer",
        modifiers=("output norm",),
        rope=called_rope,
        reader=lambda module: module.norm,
    ),
    "eva_no_rope": one(eva("eva_giant_patch14_224"), scale=EIGHTH),
    "rope_grouped": one(
        eva(attn_type="rope", qkv_fused=False, num_kv_heads=2, embed_dim=32, num_heads=4),
        scale=EIGHTH,
        rotary=True,
        rope=called_rope,
    ),
    "rope_fused": one(eva(attn_type="rope", rope_rotate_half=True), scale=EIGHTH, rotary=True, rope=called_rope),
    "relpos": one(vit("vit_relpos_small_patch16_224"), relative_position_bias=True, bias=relpos_bias),
    "relpos_shared": one(
        vit("vit_relpos_small_patch16_224", shared_rel_pos=True), relative_position_bias=True, bias=relpos_bias
    ),
    "sam": one(
        vit("samvit_base_patch16", neck_chans=8, window_size=2, img_size=64),
        relative_position_bias=True,
        modifiers=POSITION_TERM,
        bias=sam_bias,
    ),
    "swin": Case(
        model("swin_tiny_patch4_window7_224", **SWIN),
        same(SWIN_SITES, scale=QUARTER, relative_position_bias=True),
        bias=swin_bias,
    ),
    "swin_v2": Case(
        model("swinv2_tiny_window8_256", **SWIN),
        same(SWIN_SITES, **COSINE),
        bias=swin_v2_bias,
        learned_scale=cosine_scale,
    ),
    "swin_v2_cr": Case(
        model("swinv2_cr_tiny_224", **SWIN),
        same(CR_SITES, **COSINE),
        bias=lambda module, q, call: module._relative_positional_encodings() + window_mask(call),
        learned_scale=cosine_scale,
    ),
    "xcit": Case(
        model("xcit_nano_12_p16_224", **{**VIT, "embed_dim": 24, "cls_attn_layers": 1, "img_size": 48}),
        {"blocks.0.attn": CROSS_COVARIANCE, "cls_attn_blocks.0.attn": {"scale": 6**-0.5, "cross": True}},
        input=partial(image, 48),
        learned_scale=temperature,
    ),
    "edgenext": Case(
        model("edgenext_xx_small", depths=(1,) * 4, dims=(8, 12, 16, 24), heads=(2,) * 4, d2_scales=(2,) * 4),
        same([f"stages.{stage}.blocks.0.xca" for stage in (1, 2, 3)], **CROSS_COVARIANCE),
        input=partial(image, 64),
        learned_scale=temperature,
    ),
    "davit": Case(
        model("davit_tiny", depths=(1, 1), embed_dims=(8, 12), num_heads=(2, 4), window_size=2),
        {
            "stages.0.blocks.0.0.attn": {"scale": QUARTER},
            "stages.1.blocks.0.0.attn": {"scale": THIRD},
            "stages.0.blocks.0.1.attn": {
                "kind": "channel",
                "scale": QUARTER,
                "roles": {"query": "k", "key": "v", "value": "q"},
            },
            "stages.1.blocks.0.1.attn": {
                "kind": "channel",
                "scale": THIRD,
                "roles": {"query": "k", "key": "v", "value": "q"},
            },
        },
    ),
    "davit_v2": Case(
        model("davit_tiny", depths=(1,), embed_dims=(12,), num_heads=(4,), window_size=4, channel_attn_v2=True),
        {
            "stages.0.blocks.0.0.attn": {"scale": THIRD},
            "stages.0.blocks.0.1.attn": {"kind": "channel", "scale": None},
        },
        learned_scale=token_scale,
    ),
    "cait": Case(
        model("cait_xxs24_224", depth_token_only=1, **VIT),
        {
            "blocks.0.attn": {"scale": THIRD, "talking_heads": True},
            "blocks_token_only.0.attn": {"scale": THIRD, "cross": True},
        },
    ),
    "crossvit": Case(
        model(
            "crossvit_9_240", img_size=48, img_scale=(1, 1), embed_dim=(12, 24), depth=((1, 1, 0),), num_heads=(4, 4)
        ),
        {
            "blocks.0.blocks.0.0.attn": {"scale": THIRD},
            "blocks.0.blocks.1.0.attn": {"scale": 6**-0.5},
            # The branches are projected to each other's width before they meet.
            "blocks.0.fusion.0.attn": {"scale": 6**-0.5, "cross": True},
            "blocks.0.fusion.1.attn": {"scale": THIRD, "cross": True},
        },
        input=partial(image, 48),
    ),
    "volo": Case(
        lambda: volo.VOLO(
            num_classes=3, img_size=32, layers=(1, 1), embed_dims=(12, 12), num_heads=(4, 4), stem_hidden_dim=8,
            post_layers=("ca",), outlook_attention=(True, False), downsamples=(False, False),
        ),
        {"network.1.0.attn": {"scale": THIRD}, "post_network.0.attn": {"scale": THIRD, "cross": True}},
        token_dims=2,
    ),
    "pvt_v2": Case(
        model("pvt_v2_b0", depths=(1, 1), embed_dims=(8, 12), num_heads=(2, 4), sr_ratios=(2, 1), mlp_ratios=(2, 2)),
        {"stages.0.blocks.0.attn": {"scale": QUARTER, "cross": True}, "stages.1.blocks.0.attn": {"scale": THIRD}},
    ),
    "pvt_v2_linear": Case(
        model("pvt_v2_b2_li", depths=(1,), embed_dims=(12,), num_heads=(4,), sr_ratios=(2,), mlp_ratios=(2,)),
        same(["stages.0.blocks.0.attn"], scale=THIRD, cross=True),
    ),
    "twins": Case(
        model(
            "twins_svt_small", img_size=32, depths=(2,), embed_dims=(12,), num_heads=(4,), mlp_ratios=(2,),
            sr_ratios=(2,), wss=(8,),
        ),
        {"blocks.0.0.attn": {"scale": THIRD}, "blocks.0.1.attn": {"scale": THIRD, "cross": True}},
        regroup=lambda module, x: x.reshape(1, -1, x.shape[-1]),
    ),
    "maxvit_head_first": Case(
        partial(maxxvit_model, "M"),
        same(MAXVIT_SITES, scale=QUARTER, relative_position_bias=True),
        input=partial(image, 16),
        token_dims=2,
        bias=relpos_bias,
    ),
    "maxvit_blocks": Case(
        partial(maxxvit_model, "M", head_first=False, rel_pos_type=""),
        same(MAXVIT_SITES, scale=QUARTER),
        input=partial(image, 16),
        token_dims=2,
    ),
    "maxvit_2d": Case(
        partial(maxxvit_model, "M", use_nchw_attn=True),
        same(MAXVIT_SITES, scale=QUARTER, relative_position_bias=True),
        input=partial(image, 16),
        bias=relpos_bias,
    ),
    "coatnet_2d_blocks": Case(
        partial(maxxvit_model, "T", head_first=False, rel_pos_type=""),
        same(["stages.0.blocks.0.attn"], scale=QUARTER),
        input=partial(image, 16),
    ),
    "nest": Case(
        lambda: nest.Nest(
            num_classes=3, img_size=32, num_levels=2, embed_dims=(8, 12), num_heads=(2, 4), depths=(1, 1)
        ),
        {
            "levels.0.transformer_encoder.0.attn": {"scale": QUARTER},
            "levels.1.transformer_encoder.0.attn": {"scale": THIRD},
        },
    ),
    "gcvit": Case(
        lambda: gcvit.GlobalContextVit(
            num_classes=3, img_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4
        ),
        same(
            ["stages.0.blocks.0.attn", "stages.1.blocks.0.attn"], scale=QUARTER, relative_position_bias=True
        ),
        bias=lambda module, q, call: module.rel_pos.get_bias(),
        refused=("stages.0.blocks.1.attn", "stages.1.blocks.1.attn"),
    ),
    "hiera": Case(
        model(
            "hiera_tiny_224", img_size=(32, 32), embed_dim=8, num_heads=2, stages=(1, 2, 1), q_pool=1,
            mask_unit_size=(2, 2), mask_unit_attn=(True, True, False),
        ),
        # The first block of a stage still divides its tokens as the stage before.
        same(["blocks.0.attn", "blocks.2.attn", "blocks.3.attn"], scale=QUARTER),
        regroup=mask_units,
        refused=("blocks.1.attn",),
    ),
    "sam2": Case(
        model(
            "sam2_hiera_tiny", embed_dim=8, num_heads=2, stages=(1, 2), q_pool=1, window_spec=(4, 2),
            global_att_blocks=(2,), global_pos_size=(4, 4),
        ),
        {"blocks.0.attn": {"scale": QUARTER}, "blocks.2.attn": {"scale": QUARTER}},
        token_dims=2,
        refused=("blocks.1.attn",),
    ),
    "tiny_vit": one(
        model("tiny_vit_5m_224", embed_dims=(8, 12), depths=(1, 1), num_heads=(2, 4), window_sizes=(4, 4)),
        "stages.1.blocks.0.attn",
        relative_position_bias=True,
        bias=levit_bias,
    ),
    "efficientformer": one(
        # Its train() returns nothing, so that it cannot stand alone.
        lambda: nn.Sequential(efficientformer.Attention(dim=12, key_dim=3, num_heads=2, attn_ratio=2, resolution=3)),
        "0",
        relative_position_bias=True,
        input=partial(tokens, 9, 12),
        bias=levit_bias,
    ),
    "tnt": Case(
        model(
            "tnt_s_patch16_224", img_size=32, embed_dim=24, inner_dim=8, depth=1, num_heads_inner=2, num_heads_outer=4
        ),
        {"blocks.0.attn_in": {"scale": QUARTER}, "blocks.0.attn_out": {"scale": 6**-0.5}},
    ),
    "convit": one(
        vit("convit_tiny", local_up_to_layer=1, depth=2),
        "blocks.1.attn",
        scale=12**-0.5,  # its embed_dim is the width of a head
        refused=("blocks.0.attn",),
    ),
    "visformer": alone(image(3, 12), visformer.Attention, 12, num_heads=4, head_dim_ratio=2, scale=6**-0.5),
    "fastvit": alone(image(3, 12), fastvit.Attention, 12, head_dim=3),
    "metaformer": alone(tokens(5, 12), metaformer.Attention, 12, head_dim=3, proj_bias=True),
    "nextvit": alone(tokens(8, 12), nextvit.EfficientAttention, 12, head_dim=3, sr_ratio=2, cross=True),
    "multi_query": alone(
        image(4, 8),
        partial(attention2d.MultiQueryAttention2d, num_heads=3, key_dim=4, value_dim=5, kv_stride=2),
        8,
        scale=QUARTER,
        cross=True,
    ),
    "attention_2d": alone(image(3, 12), attention2d.Attention2d, 12, num_heads=4),
    "attention_2d_head_first": alone(image(3, 12), attention2d.Attention2d, 12, num_heads=4, head_first=True),
    "lowformer": alone(
        image(4, 64), lowformer.ConvAttention, 64, head_dim_mul=1.0, att_stride=2, att_kernel=3, scale=32**-0.5
    ),
    "cpubone": alone(
        image(3, 64),
        partial(cpubone.ConvAttention, att_stride=1, att_kernel=3, fuse_out_proj=True),
        64,
        scale=32**-0.5,
        reader=lambda module: module.upsampling,
    ),
    "bottleneck": alone(
        image(3, 8),
        partial(bottleneck_attn.BottleneckAttn, dim_out=12, feat_size=(3, 3), num_heads=2, dim_head=4, qkv_bias=True),
        8,
        scale=QUARTER,
        relative_position_bias=True,
        modifiers=POSITION_TERM,
        bias=bottleneck_bias,
    ),
    "halo": alone(
        image(2, 8),
        partial(halo_attn.HaloAttn, dim_out=12, num_heads=2, dim_head=4, block_size=2, halo_size=1),
        8,
        scale=QUARTER,
        relative_position_bias=True,
        cross=True,
        modifiers=POSITION_TERM,
        bias=halo_bias,
        memory=halo_memory,
    ),
    "non_local": alone(image(3, 8), non_local_attn.NonLocalAttn, 8, rd_channels=4, scale=EIGHTH),
    "pool_2d": alone(image(3, 12), attention_pool2d.AttentionPool2d, 12, feat_size=3, num_heads=4, out_features=5),
    "pool_2d_separate": alone(image(3, 12), attention_pool2d.AttentionPool2d, 12, feat_size=3, **SEPARATE_POOL),
    "pool_2d_rotary": alone(
        image(3, 12), attention_pool2d.RotAttentionPool2d, 12, ref_feat_size=3, rotary=True, rope=pool_rope,
        **SEPARATE_POOL,
    ),
    "pool_latent": alone(
        tokens(5, 12),
        partial(attention_pool.AttentionPoolLatent, latent_len=2, latent_dim=8, out_features=0),
        12,
        num_heads=4,
        cross=True,
        reader=lambda module: module.proj,
    ),
}  # fmt: skip

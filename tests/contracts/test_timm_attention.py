"""timm: what a site says of an attention is enough to recompute it, inside the model's own forward pass.

`recompute` is the whole of attention, written from the facts of a site. A wrong row, role, scale, norm, rotation or
column of O changes its result.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import AttentionPoolLatent, apply_rot_embed_cat
from torch import Tensor, nn
from torch.nn.functional import normalize

from contracts.cases_timm import CASES, USUAL, Case, tokens
from contracts.harness import Seen, columns, randomise_
from wellcond.attention.find import find_attention, scan_attention
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.cli.zoo.walk import inspect_model
from wellcond.errors import UnsupportedLayoutError


def project(slot: Slot, x_LND: Tensor, repeats: int) -> Tensor:
    heads = torch.einsum("lnc,hdc->lhnd", x_LND, slot.read())
    bias = slot.read_bias()
    if bias is not None:
        heads = heads + bias[None, :, None, :]
    return heads.repeat_interleave(repeats, dim=1)


def recompute(case: Case, site: AttentionSite, seen: Seen) -> Tensor:
    """Output of every head (leading, heads, tokens, width), from the site's facts alone."""
    module: Any = site.module
    by_role = {}
    for role in ("query", "key", "value"):
        slot = site.by_role(role)
        x = seen.read_by(slot)
        if role != "query" and case.memory is not None:
            x = case.memory(module, x)
        by_role[role] = project(slot, x, site.num_heads // slot.num_heads)
    q, k, v = by_role["query"], by_role["key"], by_role["value"]
    unscaled = q
    if site.qk_norm in ("layer", "rms"):
        q, k = module.q_norm(q), module.k_norm(k)
    if site.kind != "softmax":  # channels attend to channels
        q, k, v = q.mT, k.mT, v.mT
    if site.qk_norm == "l2":
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    if site.rotary:
        table, start, half = case.rope(module, seen.call)
        q, k = (
            torch.cat([x[:, :, :start], apply_rot_embed_cat(x[:, :, start:], table, half=half)], dim=2) for x in (q, k)
        )
    num_tokens = by_role["query"].shape[2]
    scale = case.learned_scale(module, num_tokens) if site.scale is None else site.scale
    logits = scale * (q @ k.mT)
    if site.relative_position_bias:
        logits = logits + case.bias(module, unscaled, seen.call)
    if site.talking_heads:
        logits = module.proj_l(logits.movedim(1, -1)).movedim(-1, 1)
    weights = logits.softmax(dim=-1)
    if site.talking_heads:
        weights = module.proj_w(weights.movedim(1, -1)).movedim(-1, 1)
    out = weights @ v
    return out if site.kind == "softmax" else out.mT


@cache
def built(name: str) -> tuple[Case, nn.Module]:
    return CASES[name], randomise_(CASES[name].build())


@pytest.mark.parametrize("name", CASES)
def test_every_attention_is_found_with_the_facts_of_the_source_or_refused(name):
    case, model = built(name)
    scan = scan_attention(model)
    assert sorted(site.name for site in scan.sites) == sorted(case.facts)
    assert sorted(refusal.name for refusal in scan.refusals) == sorted(case.refused)
    if case.refused:
        with pytest.raises(UnsupportedLayoutError):
            find_attention(model)
    for site in scan.sites:
        expected = USUAL | case.facts[site.name]
        found = {key: getattr(site, key) for key in expected}
        assert found == expected | {"scale": expected["scale"] and pytest.approx(expected["scale"])}, site.name
        assert site.head_dim > 1 and (site.num_heads > 1 or name == "non_local")


@pytest.mark.parametrize("name", CASES)
def test_heads_are_recomputed_from_the_site(name):
    case, model = built(name)
    for site in scan_attention(model).sites:
        seen = Seen(case, model, site)
        with torch.no_grad():
            expected = recompute(case, site, seen)
        found = seen.concatenated_heads()[..., columns(site)].transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, msg=lambda m, s=site: f"{s.name}: {m}")


REFUSED = {
    "levit_128s": "batch norm",
    "coat_lite_tiny": "softmax acts on the keys alone",
    "efficientvit_b0": "linear attention",
    "efficientvit_m0": "previous head",
    "efficientformerv2_s0": "batch norm",
    "mobilevitv2_050": "separable attention",
    "mvitv2_tiny": "depthwise convolution",
    "shvit_s1": "batch norm",
    "swiftformer_xs": "additive attention",
    "iformer_s": "sigmoid",
    "gemma4_vit_167m": "values are normalised",
    "lambda_resnet26t": "lambda layer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_linear_heads_is_refused_with_its_reason(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    scan = scan_attention(model)
    assert not scan.sites
    assert all(REFUSED[name] in refusal.problem for refusal in scan.refusals)
    with pytest.raises(UnsupportedLayoutError, match=REFUSED[name]):
        find_attention(model)


def test_difference_of_softmaxes_is_refused():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, attn_layer="diff"
    )
    with pytest.raises(UnsupportedLayoutError, match="subtracts two softmax"):
        find_attention(model)


def test_pool_without_query_projection_is_refused():
    with pytest.raises(UnsupportedLayoutError, match="no query projection"):
        find_attention(AttentionPoolLatent(12, num_heads=4, q_proj=False))


def test_scale_is_the_one_that_is_used():
    module = timm.layers.Attention(12, num_heads=4).double().eval()
    module.scale = 5.0
    x = tokens(5, 12)
    q, k, v = module.qkv(x).reshape(1, 5, 3, 4, 3).permute(2, 0, 3, 1, 4)
    for fused in (True, False):
        module.fused_attn = fused
        [site] = find_attention(module)
        heads = (site.scale * q @ k.mT).softmax(dim=-1) @ v
        torch.testing.assert_close(module(x), module.proj(heads.transpose(1, 2).reshape(1, 5, 12)))


def test_gate_after_the_heads_leaves_them_as_they_are():
    module = randomise_(timm.layers.Attention(12, num_heads=4, gated=True))
    case = Case(lambda: module, {}, input=lambda: tokens(5, 12))
    [site] = find_attention(module)
    seen = Seen(case, module, site)
    with torch.no_grad():
        heads = recompute(case, site, seen).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(seen.inputs[module.proj], heads * module.gate(tokens(5, 12)).sigmoid())


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("test_resnet", "no attention", ""),
        ("test_vit", "found", ""),
        ("volo_d1_224", "partly", "OutlookAttention"),
        ("levit_128s", "refused", "batch norm"),
        ("no_such_model", "not built", "Unknown model"),
    ],
)
def test_zoo_says_what_became_of_a_model(name, status, detail):
    row = inspect_model("family", name, partial(timm.create_model, name))
    assert (row.model, row.status) == (name, status)
    assert detail in row.detail
    assert (row.num_sites > 0) == (status in ("found", "partly"))


def test_zoo_does_not_overlook_an_attention_nobody_knows():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Conv2d(4, 4, 3)

    class ChannelAttn(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Conv2d(4, 2, 1)

    assert inspect_model("family", "odd", lambda: nn.Sequential(OddAttention())).status == "refused"
    assert inspect_model("family", "gate", lambda: nn.Sequential(ChannelAttn())).status == "no attention"

"""timm: what a site says of an attention is enough to recompute it, inside the model's own forward pass.

`recompute` is the whole of attention, written from the facts of a site. A wrong row, role, scale, norm, rotation or
column of O changes its result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import AttentionPoolLatent, apply_rot_embed_cat
from torch import Tensor, nn
from torch.nn.functional import normalize

from contracts.cases_timm import CASES, USUAL, Call, Case, tokens
from contracts.harness import randomise_
from wellcond.attention.find import find_attention, scan_attention
from wellcond.attention.layout import head_rows
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.cli.zoo.walk import inspect_model
from wellcond.errors import UnsupportedLayoutError


class Seen:
    """One forward pass: how a site's module was called, and what went through its projections."""

    def __init__(self, case: Case, model: nn.Module, site: AttentionSite) -> None:
        self.case, self.site = case, site
        self.call = Call((), {})
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        hooks = [site.module.register_forward_pre_hook(self._keep_call, with_kwargs=True)]
        watched = {site.module, self.head_reader, *(slot.owner for slot in site.slots.values())} - {None}
        hooks += [module.register_forward_hook(self._keep) for module in watched]
        try:
            with torch.no_grad():
                model(case.input())
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def head_reader(self) -> nn.Module | None:
        """The module that reads the concatenated heads; None where the attention returns them."""
        if self.case.reader is not None:
            return self.case.reader(self.site.module)
        return None if self.site.o is None else self.site.o.owner

    def _keep_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.call = Call(args, kwargs)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor):
            self.inputs[module] = args[0]
        self.outputs[module] = output

    def as_tokens(self, x: Tensor, *, is_map: bool) -> Tensor:
        """Anything that a projection reads or writes, as (leading, tokens, width)."""
        if is_map:
            return x.flatten(2).transpose(1, 2)
        if self.case.regroup is not None:
            return self.case.regroup(self.site.module, x)
        if x.dim() == 2:  # a class token alone
            return x[:, None]
        token_dims = min(self.case.token_dims, x.dim() - 2)
        return x.flatten(-1 - token_dims, -2).reshape(-1, x.shape[-1 - token_dims :][:-1].numel(), x.shape[-1])

    def read_by(self, slot: Slot) -> Tensor:
        """Tokens that this slot's projection read. BEiT uses its weight without calling the module."""
        x = self.inputs.get(slot.owner, self.call.args[0] if self.call.args else None)
        return self.as_tokens(x, is_map=isinstance(slot.owner, (nn.Conv2d, nn.Conv1d)))

    def concatenated_heads(self) -> Tensor:
        """What the model itself hands to O, or returns where there is no O: (leading, tokens, width)."""
        x = self.outputs[self.site.module] if self.head_reader is None else self.inputs[self.head_reader]
        owners = (nn.Conv2d, nn.ConvTranspose2d, type(None))
        return self.as_tokens(x, is_map=x.dim() == 4 and isinstance(self.head_reader, owners))


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


def columns(site: AttentionSite) -> Tensor:
    """Columns of the concatenated heads that belong to each head."""
    if site.o is not None:
        return site.o.rows
    return head_rows(site.num_heads, site.by_role("value").head_dim)


def build(name: str) -> tuple[Case, nn.Module, list[AttentionSite]]:
    case = CASES[name]
    model = randomise_(case.build())
    return case, model, scan_attention(model).sites


@pytest.mark.parametrize("name", CASES)
def test_every_attention_is_found_or_refused(name):
    case, model, _ = build(name)
    scan = scan_attention(model)
    assert sorted(site.name for site in scan.sites) == sorted(case.facts)
    assert sorted(refusal.name for refusal in scan.refusals) == sorted(case.refused)
    if case.refused:
        with pytest.raises(UnsupportedLayoutError):
            find_attention(model)


@pytest.mark.parametrize("name", CASES)
def test_facts_are_those_of_the_source(name):
    case, _, sites = build(name)
    for site in sites:
        expected = USUAL | case.facts[site.name]
        found = {key: getattr(site, key) for key in expected}
        assert found.pop("scale") == (expected["scale"] and pytest.approx(expected["scale"])), site.name
        assert found == {key: value for key, value in expected.items() if key != "scale"}, site.name
        assert site.head_dim > 1
        assert site.num_heads > 1 or name == "non_local"


@pytest.mark.parametrize("name", CASES)
def test_heads_are_recomputed_from_the_site(name):
    case, model, sites = build(name)
    for site in sites:
        seen = Seen(case, model, site)
        with torch.no_grad():
            expected = recompute(case, site, seen)
        found = seen.concatenated_heads()[..., columns(site)].transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, msg=lambda m, s=site: f"{s.name}: {m}")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("cpubone", "bottleneck", "halo")])
def test_output_projection_is_a_sum_over_heads(name):
    case, model, sites = build(name)
    for site in sites:
        if site.o is None:
            assert name == "pool_latent"
            continue
        seen = Seen(case, model, site)
        x = seen.inputs[site.o.owner]
        is_map = isinstance(site.o.owner, nn.Conv2d)
        heads = seen.as_tokens(x, is_map=is_map)[..., site.o.rows].transpose(1, 2)
        with torch.no_grad():
            expected = torch.einsum("lhnd,hod->lno", heads, site.o.read())
            if site.o.read_bias() is not None:
                expected = expected + site.o.read_bias()
            if name == "vit_parallel_fused":  # the MLP's columns of the same projection
                rest = x[..., site.o.rows.numel() :]
                expected = expected + rest @ site.o.parameter[:, site.o.rows.numel() :].T
        found = seen.as_tokens(seen.outputs[site.o.owner], is_map=is_map)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_zeroed_value_head_takes_away_its_columns_only(name):
    case, model, sites = build(name)
    for site in sites:
        before = Seen(case, model, site).concatenated_heads()
        value = site.by_role("value")
        kept_weight, kept_bias = value.read_raw().clone(), value.read_bias()
        kept_bias = None if kept_bias is None else kept_bias.clone()
        victim = 0  # not the last: its rows end every fused weight, whatever the arrangement
        _zero_head(value, victim)
        after = Seen(case, model, site).concatenated_heads()

        users = torch.arange(site.num_heads) // (site.num_heads // value.num_heads) == victim
        gone, left = columns(site)[users].flatten(), columns(site)[~users].flatten()
        assert before[..., gone].abs().max() > 1e-6
        assert torch.equal(after[..., gone], torch.zeros_like(after[..., gone])), site.name
        torch.testing.assert_close(after[..., left], before[..., left], rtol=1e-10, atol=1e-12)

        value.write_(kept_weight)
        if kept_bias is not None:
            value.write_bias_(kept_bias)


def _zero_head(slot: Slot, head: int) -> None:
    weight = slot.read_raw().clone()
    weight[head] = 0
    slot.write_(weight)
    bias = slot.read_bias()
    if bias is not None:
        bias = bias.detach().clone()
        bias[head] = 0
        slot.write_bias_(bias)


@pytest.mark.parametrize("name", CASES)
def test_writing_back_what_was_read_changes_nothing(name):
    _, model, sites = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for site in sites:
        for slot in site.slots.values():
            assert isinstance(slot.parameter, nn.Parameter)
            heads, bias = slot.read().clone(), slot.read_bias()
            with torch.no_grad():
                slot.parameter[slot.parameter != 0] = torch.nan
            others = slot.parameter.isnan().sum() - heads.numel()
            slot.write_(heads)
            # Only the rows of this slot are written; the rest of a fused weight stays as it was made.
            assert slot.parameter.isnan().sum() == others
            model.load_state_dict(before)
            slot.write_(heads)
            if bias is not None:
                slot.write_bias_(bias.clone())
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


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

"""The monitor changes nothing, waits for nothing, and its numbers are those of the definitions."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import wellcond as wc
from wellcond.attention.record import by_head, logit_spread, record
from wellcond.linalg.circuits import NUMBERS


def vit(fused=True, **sizes):
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 4} | sizes
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def gpt2(kernel="sdpa", dropout=0.0):
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, attn_implementation=kernel))


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))


class Encoder(nn.Module):
    """Two layers of torch.nn, whose attention is eager products where weights are asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, images):
        x = images.flatten(1)[:, : 20 * 12].unflatten(1, (20, 12))
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)[:, :4]


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(32, (4, 40), generator=torch.Generator().manual_seed(0))
BUILDERS = {
    "vit": vit,
    "vit-eager": lambda: vit(fused=False),
    "vit-dropout": lambda: vit(attn_drop_rate=0.1, proj_drop_rate=0.1),
    "encoder": Encoder,
    "gpt2": gpt2,
    "gpt2-dropout": lambda: gpt2(dropout=0.1),
    "gpt2-eager": lambda: gpt2("eager", 0.1),
    "llama": llama,
}


def loss_of(model, part=slice(None)):
    if hasattr(model, "config"):
        return model(input_ids=WORDS[part], labels=WORDS[part]).loss
    return F.cross_entropy(model(IMAGES[part]), torch.arange(4)[part])


def trained(name, monitored, steps=3):
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = wc.AttentionMonitor(model, every=2) if monitored else None
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if monitor is not None:
            monitor.step()
    return model, torch.stack(losses), torch.get_rng_state(), monitor


@pytest.mark.parametrize("name", BUILDERS)
def test_training_is_the_same_bit_for_bit(name):
    plain, losses, state, _ = trained(name, monitored=False)
    watched, same, after, monitor = trained(name, monitored=True)
    assert torch.equal(losses, same) and torch.equal(state, after)
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)
    frame = monitor.to_frame()
    assert set(frame["step"]) == {1, 2} and monitor.not_seen == {}
    assert frame[["max_logit", "entropy", "logit_std", "q_norm", "attention_share"]].notna().all().all()


def read_once(model, forward, **options):
    monitor = wc.AttentionMonitor(model.train(), every=1, **options)
    forward(model)
    monitor.step()
    return monitor.to_frame(), monitor


@pytest.mark.parametrize("name", ["vit", "vit-eager", "encoder", "gpt2", "gpt2-eager", "llama"])
def test_numbers_are_those_of_the_logits(name):
    torch.manual_seed(0)
    model = BUILDERS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("attn_dropout", "dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    wc.init_(model, "gaussian", std=0.6)
    frame, monitor = read_once(model, loss_of)
    batch = dict(input_ids=WORDS) if hasattr(model, "config") else IMAGES
    for one in record(model, batch, wc.find_attention(model)).sites:
        mine = frame[frame["site"] == one.site.name]
        heads = one.site.num_heads
        logits, p = by_head(one.logits, heads).double(), by_head(one.probabilities, heads).double()
        largest = logits.amax((0, 2, 3))
        assert (torch.tensor(mine["max_logit"].to_numpy()) >= largest - 1e-4).all()
        assert (torch.tensor(mine["max_logit_low"].to_numpy()) <= largest + 1e-4).all()
        if monitor.exact()[one.site.name]:
            torch.testing.assert_close(torch.tensor(mine["max_logit"].to_numpy()), largest, rtol=1e-4, atol=1e-4)
        expected = {
            "entropy": torch.special.entr(p).sum(-1).mean((0, 2)),
            "first_share": p[..., 0].mean((0, 2)),
            "self_share": p.diagonal(dim1=-2, dim2=-1).mean((0, 2)),
        }
        for column, value in expected.items():
            found = torch.tensor(mine[column].to_numpy())
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4, msg=lambda text, c=column: f"{c}: {text}")
        rows = torch.arange(16) * (logits.shape[-2] - 1) // 15
        visible = None if name.endswith(("eager", "encoder")) else (logits > -torch.inf)[:, :, rows]
        spread = logit_spread(logits[:, :, rows], heads, visible)
        torch.testing.assert_close(torch.tensor(mine["logit_std"].to_numpy()).float(), spread, rtol=1e-3, atol=1e-4)
        if "value" in one.inputs:
            v = torch.einsum("bnc,hdc->bhnd", one.inputs["value"], one.site.v.read())
            bias = one.site.v.read_bias()
            norm = (v if bias is None else v + bias[:, None]).square().sum(-1).mean((0, 2)).sqrt()
            norm = norm.repeat_interleave(heads // len(norm))
            torch.testing.assert_close(torch.tensor(mine["v_norm"].to_numpy()).float(), norm, rtol=1e-4, atol=1e-5)


class Masked(nn.Module):
    """One attention layer that calls SDPA with the mask it is given, and grouped queries."""

    def __init__(self, mask):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 6
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(24, 24), nn.Linear(24, 12), nn.Linear(24, 12)
        self.o_proj, self.mask = nn.Linear(24, 24), mask

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 6)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        mask = self.mask[: x.shape[-2], : x.shape[-2]]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["boolean", "numbers"])
def test_masks_count(kind):
    torch.manual_seed(0)
    hidden = torch.rand(12, 12) > 0.5
    hidden.fill_diagonal_(False)
    mask = ~hidden if kind == "boolean" else torch.randn(12, 12).masked_fill(hidden, -torch.inf)
    layer, x = Masked(mask), 3 * torch.randn(2, 12, 24)
    frame, _ = read_once(layer, lambda model: model(x).sum().backward())
    q, k = (part(x).unflatten(-1, (-1, 6)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj))
    logits = q @ k.repeat_interleave(2, 1).mT / 6**0.5
    logits = logits.masked_fill(hidden, -torch.inf) if kind == "boolean" else logits + mask
    p = logits.softmax(-1)
    for column, value in {
        "entropy": torch.special.entr(p).sum(-1).mean((0, 2)),
        "first_share": p[..., 0].mean((0, 2)),
        "self_share": p.diagonal(dim1=-2, dim2=-1).mean((0, 2)),
    }.items():
        torch.testing.assert_close(torch.tensor(frame[column].to_numpy()).float(), value, rtol=1e-4, atol=1e-5)
    assert (torch.tensor(frame["max_logit"].to_numpy()) >= logits.amax((0, 2, 3)) - 1e-5).all()


def test_the_largest_logits_are_there_before_the_step():
    """What acts on the weights asks between the backward pass and the step of the monitor."""
    model = gpt2("eager")
    monitor = wc.AttentionMonitor(model.train(), every=1, columns=["max_logit"], weights=False)
    assert all(one.isnan().all() for one in monitor.max_logits().values())
    loss_of(model).backward()
    largest = monitor.max_logits()
    assert set(largest) == {site.name for site in monitor.sites} and set(monitor.exact().values()) == {True}
    monitor.step()
    frame = monitor.to_frame()
    assert list(frame.columns) == ["step", "site", "head", "max_logit"]
    assert torch.equal(torch.cat(list(largest.values())), torch.tensor(frame["max_logit"].to_numpy()).float())
    model.transformer.h[0].attn.c_attn.weight.data.fill_(math.nan)
    loss_of(model)
    assert torch.isinf(monitor.max_logits()["transformer.h.0.attn"]).all()


def test_microbatches_accumulate_and_evaluation_does_not_count():
    torch.manual_seed(0)
    model = vit()
    once, _ = read_once(copy.deepcopy(model), loss_of)

    def in_parts(model):
        for part in (slice(0, 1), slice(1, 4)):
            loss_of(model, part).backward()
            with torch.no_grad():
                model.eval()(100 * IMAGES)
            model.train()

    parts, _ = read_once(model, in_parts)
    torch.testing.assert_close(torch.tensor(parts.iloc[:, 3:].to_numpy()), torch.tensor(once.iloc[:, 3:].to_numpy()),
                               rtol=1e-4, atol=1e-5, equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_that_moves_after_the_monitor_was_made(every):
    """Weights may be elsewhere later, or compute elsewhere than they are kept: buffers follow the passes."""
    torch.manual_seed(0)
    model = vit()
    with torch.device("meta"):
        later = vit()
    monitor = wc.AttentionMonitor(later.train(), every=every)
    later.to_empty(device="cpu").load_state_dict(model.state_dict())
    expected = wc.AttentionMonitor(model.train(), every=every)
    for _ in range(2):
        for one, its in ((later, monitor), (model, expected)):
            loss_of(one).backward()
            its.step()
    for its in (monitor, expected):
        its.close()
    torch.testing.assert_close(monitor.series.values, expected.series.values, rtol=0, atol=0, equal_nan=True)
    assert monitor.not_seen == {}


def _selective():
    return create_selective_checkpoint_contexts(
        lambda context, operator, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE
            if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


@pytest.mark.parametrize("how", [{"use_reentrant": True}, {"use_reentrant": False}, "selective"])
def test_what_checkpointing_runs_again_counts_once(how):
    options = {"use_reentrant": False, "context_fn": _selective} if how == "selective" else how
    torch.manual_seed(0)
    model = vit(fused=False)
    counts = []

    def forward(model, again):
        monitor = wc.AttentionMonitor(model.train(), every=1)
        x = model.patch_embed(IMAGES).requires_grad_()
        for number, block in enumerate(model.blocks):
            x = checkpoint(block, x, **options) if again and number else block(x)
        x.square().sum().backward()
        counts.append(torch.cat([layer.weights for layer in monitor._layers]))
        monitor.step()
        gradient = [p.grad.clone() for p in model.blocks.parameters()]
        model.zero_grad()
        return torch.tensor(monitor.to_frame().iloc[:, 3:].to_numpy()), gradient

    plain, gradient = forward(model, again=False)
    repeated, same = forward(model, again=True)
    torch.testing.assert_close(plain, repeated, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*counts)
    assert all(torch.equal(a, b) for a, b in zip(gradient, same, strict=True))


def events_of(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return profile.events()


WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")


@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_waits_for_the_device_within_a_step(name):
    """Numbers are read where a step ends, and nowhere else: on a GPU each of these would stop the host."""
    torch.manual_seed(0)
    model = BUILDERS[name]().train()

    def waits():
        return sum(event.name in WAITS for event in events_of(lambda: loss_of(model).backward()))

    before = waits()
    monitor = wc.AttentionMonitor(model, every=1)
    assert waits() == before
    monitor.max_logits()
    flush = events_of(monitor.step)
    assert sum(event.name in WAITS for event in flush) == 0, "the host reads one step later"
    assert monitor.to_frame()["max_logit"].notna().all()


@pytest.mark.parametrize("fused", [True, False])
def test_no_attention_map_is_allocated(fused):
    torch.manual_seed(0)
    model = vit(fused, img_size=96).train()  # 577 tokens
    images = torch.randn(1, 3, 96, 96)
    size = 3 * 577 * 577 * 4

    def maps():
        events = events_of(lambda: model(images).sum().backward())
        return sum(event.self_cpu_memory_usage >= size // 3 for event in events)

    before = maps()
    monitor = wc.AttentionMonitor(model, every=1)
    assert maps() == before and (before > 0) == (not fused)
    monitor.close()


def test_steps_that_are_not_due_have_no_hooks():
    model = vit().train()

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    none = hooks()
    monitor = wc.AttentionMonitor(model, every=3)
    seen = []
    for _ in range(6):
        seen.append(hooks() > none)
        loss_of(model).backward()
        monitor.step()
    assert seen == [True, False, True, False, False, True]
    monitor.close()
    assert hooks() == none and set(monitor.to_frame()["step"]) == {1, 3, 6}


def test_an_error_in_the_forward_pass_leaves_no_mode_behind():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model = vit().train()
    monitor = wc.AttentionMonitor(model, every=1)
    model.blocks[0].attn.proj = nn.Linear(7, 7)
    with pytest.raises(RuntimeError):
        loss_of(model)
    assert not _get_current_dispatch_mode_stack()
    monitor.close()


def test_several_monitors_see_the_same():
    torch.manual_seed(0)
    model = vit().train()
    first = wc.AttentionMonitor(model, every=1, weights=False)
    second = wc.AttentionMonitor(model, every=2, weights=False)
    for _ in range(2):  # the first one takes its hooks off and puts them on again
        loss_of(model).backward()
        first.step()
        second.step()
    for monitor in (first, second):
        monitor.close()
    assert first.series.steps == second.series.steps == [1, 2]
    assert torch.equal(torch.tensor(first.series.values), torch.tensor(second.series.values))


def test_circuit_numbers_are_those_of_the_products():
    torch.manual_seed(0)
    frame, monitor = read_once(llama(), loss_of)
    for site in monitor.sites:
        mine = frame[frame["site"] == site.name].reset_index()
        q, k, v, o = (slot.read().detach().double() for slot in site.slots.values())
        for head in range(4):
            for circuit, product in {"qk": q[head].mT @ k[head // 2], "ov": o[head] @ v[head // 2]}.items():
                sigma = torch.linalg.svdvals(product)[:8]
                assert mine[f"sigma_max_{circuit}"][head] == pytest.approx(float(sigma[0]), rel=1e-6)
                assert mine[f"sigma_min_{circuit}"][head] == pytest.approx(float(sigma[-1]), rel=1e-4)
                assert mine[f"sec_{circuit}"][head] == pytest.approx(float(sigma[0] ** 2 / (sigma**2).sum()), rel=1e-6)
            sigma = torch.linalg.svdvals(o[head])
            assert mine["kappa_o"][head] == pytest.approx(float(sigma[0] / sigma[-1]), rel=1e-5)
    assert set(NUMBERS) <= set(frame.columns)


def test_a_model_in_float64():
    model, images = vit(fused=False).double().train(), IMAGES.double()
    frame, monitor = read_once(model, lambda model: model(images).sum().backward())
    assert monitor.not_seen == {} and frame["attention_share"].notna().all()

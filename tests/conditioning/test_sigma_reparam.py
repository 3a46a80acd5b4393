"""Sigma-Reparam against its formula in plain torch, and what every correction must be able to do."""

import copy
import pickle

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import wellcond as wc
from conditioning.test_corrections import effective, every_storage, vit

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def sizes(model, role="q"):
    return torch.linalg.matrix_norm(effective(model, role), 2)


@pytest.mark.parametrize("layout", ["per_head", "joint"])
def test_the_function_is_unchanged_at_first_and_gamma_is_the_largest_singular_value(layout):
    for name, model in every_storage().items():
        before = {role: effective(model, role) for role in "qkv"}
        wc.condition_(model, "sigma_reparam", layout=layout)
        gains = [parameter for key, parameter in model.named_parameters() if key.endswith("_wellcond_gamma")]
        for role in "qkv":
            torch.testing.assert_close(effective(model, role), before[role], msg=f"{name} {role}")
        with torch.no_grad():
            for gain in gains:
                gain.fill_(0.75)
        used = effective(model)
        whole = used.reshape(1, 24, 24) if layout == "joint" else used
        torch.testing.assert_close(torch.linalg.matrix_norm(whole, 2), torch.full((len(whole),), 0.75), msg=name)
        raw = wc.find_attention(model)[0].q.read_raw()
        raw = raw.reshape(1, 24, 24) if layout == "joint" else raw
        torch.testing.assert_close(whole, 0.75 * raw / torch.linalg.matrix_norm(raw, 2)[:, None, None], msg=name)


class ByHand(nn.Module):
    """A layer x -> x W_hat^T whose heads have a gain and one step of power iteration each."""

    def __init__(self, weight, num_heads):
        super().__init__()
        self.weight, self.num_heads = nn.Parameter(weight.clone()), num_heads
        heads = weight.reshape(num_heads, -1, weight.shape[1])
        self.v = [torch.linalg.svd(head)[2][0] for head in heads]
        self.gamma = nn.Parameter(torch.linalg.matrix_norm(heads, 2))

    def read(self):
        used = []
        for h, head in enumerate(self.weight.reshape(self.num_heads, -1, self.weight.shape[1])):
            with torch.no_grad():
                v = nn.functional.normalize(head.T @ (head @ self.v[h]), dim=0)
                u = nn.functional.normalize(head @ v, dim=0)
                self.v[h] = v
            used.append(self.gamma[h] * head / (u @ head @ v))
        return torch.cat(used)


def test_training_is_that_of_the_formula_with_one_power_iteration_a_step():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    hand, tokens, aim = ByHand(model.in_proj_weight.detach(), 9), torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    output = model.out_proj.weight.detach().clone()
    model.out_proj.weight.requires_grad_(False)
    wc.condition_(model, "sigma_reparam")
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    theirs = torch.optim.SGD(hand.parameters(), lr=0.5)
    for _ in range(4):
        q, k, v = ((tokens @ w.T).unflatten(-1, (3, 4)).transpose(1, 2) for w in hand.read().chunk(3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ output.T
        for optimizer, made in ((theirs, mixed), (ours, model(tokens, tokens, tokens)[0])):
            optimizer.zero_grad()
            (made - aim).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.in_proj_weight, hand.weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.in_proj_weight_wellcond_gamma, hand.gamma, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.in_proj_weight_wellcond_direction.abs(), torch.stack(hand.v).abs())
    assert (hand.gamma - ByHand(model.in_proj_weight.detach(), 9).gamma).abs().max() > 1e-3


def test_only_a_pass_of_training_moves_the_direction():
    model = wc.condition_(vit(), "sigma_reparam")
    layer = model.blocks[0].attn.qkv
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn_like(layer.weight))
    first = layer.weight_wellcond_direction.clone()
    with torch.no_grad():
        model(X)
    model.eval()(X)
    model.train()
    wc.find_attention(model)[0].q.read()
    assert torch.equal(layer.weight_wellcond_direction, first)
    moved = []
    for _ in range(60):
        model(X)
        moved.append(sizes(model).clone())
    assert not torch.equal(layer.weight_wellcond_direction, first)
    torch.testing.assert_close(moved[-1], layer.weight_wellcond_gamma[:3].detach(), rtol=1e-3, atol=0)


def test_a_pass_that_is_computed_again_in_the_backward_gives_the_same_gradients():
    torch.manual_seed(0)
    model = wc.condition_(vit(), "sigma_reparam")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    twin = copy.deepcopy(model)
    model(X).square().sum().backward()
    x = twin.patch_embed(X)
    x = twin._pos_embed(x)
    for block in twin.blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    twin.forward_head(twin.norm(x)).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for (name, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("layout", ["per_head", "joint"])
def test_copies_checkpoints_and_folding(layout):
    torch.manual_seed(0)
    model = vit()
    keys, plain = list(model.state_dict()), copy.deepcopy(model)
    wc.condition_(model, "sigma_reparam", layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(X).square().sum().backward()
        optimizer.step()
    output, state = model.eval()(X), model.state_dict()
    gain = model.blocks[0].attn.qkv.weight_wellcond_gamma
    assert gain.shape == ((9,) if layout == "per_head" else (3,)) and gain.grad.abs().min() > 0
    twin = wc.recondition_(vit().eval(), state)
    twin.load_state_dict(state)
    for other in (twin, pickle.loads(pickle.dumps(model)), wc.fold_(copy.deepcopy(model))):
        torch.testing.assert_close(other(X), output, rtol=0, atol=1e-6)
    twin.train()(X)  # a copy that was pickled or loaded trains on
    with wc.folded(model):
        assert list(model.state_dict()) == keys
    assert model.blocks[0].attn.qkv.weight_wellcond_gamma is gain
    with pytest.warns(wc.CheckpointWarning):
        model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(X), plain.eval()(X), rtol=1e-4, atol=1e-5)


def test_zeros_stay_zero_and_16_bit_weights_are_rounded_once():
    model = nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        model.in_proj_weight[4:8] = 0.0  # the second query head
    wc.condition_(model, "sigma_reparam")
    x = torch.randn(3, 1, 8)
    model(x, x, x)[0].square().sum().backward()
    assert model.in_proj_weight.grad.isfinite().all() and not effective(model)[1].any()
    half = vit(depth=1).bfloat16()
    raw = wc.find_attention(half)[0].q.read_raw()
    wc.condition_(half, "sigma_reparam")
    torch.testing.assert_close(effective(half), raw, rtol=2e-2, atol=0)


def test_what_cannot_be_is_refused():
    model = wc.condition_(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), "sigma_reparam")
    with pytest.raises(wc.ConditioningError, match="scale"):  # clipping W leaves W_hat as it is
        wc.QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(wc.UnknownChoiceError, match="'joint', 'per_head'"):
        wc.condition_(vit(), "sigma_reparam", layout="stored")

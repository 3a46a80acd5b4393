"""Whoever writes to a conditioned weight writes to the parameter, and the next forward pass knows."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import wellcond as wc
from conditioning.test_corrections import vit
from models import NanoGPTAttention, XTransformersAttention, stack
from wellcond.attention.slot import effective_weight

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
METHODS = [("identity", {"lam": 0.5}), ("polar", {}), ("balanced", {})]


def qkv_of(model):
    return model.blocks[0].attn.qkv


WRITES = {
    "data, every other column negated": lambda w: w.data[:, 1::2].neg_(),
    "data, doubled": lambda w: w.data.mul_(2),
    "data, negated": lambda w: w.data.neg_(),
    "data, replaced": lambda w: setattr(w, "data", torch.randn_like(w)),
    "data, rows exchanged": lambda w: w.data.copy_(w.data.flip(0).clone()),
    "one number": lambda w: w.data[0, :5].add_(0.5),
    "in place": lambda w: w.mul_(3),
    "initialised": lambda w: nn.init.normal_(w, std=0.3),
    "indexed": lambda w: w.__setitem__(slice(10), 0.0),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
}


def cases_of_writes():
    """Every write under one correction, and one write under each of the others; the whole table is slow."""
    for write in WRITES:
        for method, options in METHODS:
            for dtype in (torch.float32, torch.float64):
                one = method == "balanced" if dtype == torch.float32 else write == "data, doubled"
                yield pytest.param(write, method, options, dtype, marks=() if one else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")
@pytest.mark.parametrize("write, method, options, dtype", list(cases_of_writes()))
def test_every_write_is_seen_by_the_next_forward_and_by_fold(write, method, options, dtype):
    model = wc.condition_(vit().eval(), method, **options).to(dtype)
    x = X.to(dtype)
    before = model(x)
    with torch.no_grad():
        WRITES[write](qkv_of(model).weight)
    after = model(x)
    assert not torch.allclose(after, before)
    twin = vit().eval().to(dtype)
    twin.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(after, wc.condition_(twin, method, **options)(x))
    torch.testing.assert_close(wc.fold_(model)(x), after, rtol=1e-4, atol=1e-5)


def test_outside_a_forward_the_weight_is_the_parameter():
    model = wc.condition_(vit(), "balanced")
    layer, name = qkv_of(model), "blocks.0.attn.qkv.weight"
    parameter = dict(model.named_parameters())[name]
    assert layer.weight is parameter is model.get_parameter(name)
    assert isinstance(layer.weight, nn.Parameter)
    model(X).sum().backward()
    assert layer.weight.grad is parameter.grad is not None
    layer.weight.requires_grad_(False)
    assert not parameter.requires_grad
    layer.weight = nn.Parameter(torch.zeros(72, 24))
    assert model.get_parameter(name) is layer.weight is not parameter
    assert torch.equal(effective_weight(layer, "weight"), torch.zeros(72, 24))


@pytest.mark.parametrize(
    "reparametrise",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal, nn.utils.spectral_norm],
)
def test_reparametrising_a_conditioned_weight_is_refused_and_changes_nothing(reparametrise):
    model = wc.condition_(vit().eval(), "balanced")
    output, keys, dicts = model(X), list(model.state_dict()), [sorted(vars(m)) for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(wc.ConditioningError, match="fold_"):
        reparametrise(qkv_of(model))
    assert torch.equal(model(X), output) and list(model.state_dict()) == keys
    assert [sorted(vars(m)) for m in model.modules()] == dicts
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    reparametrise(wc.fold_(model).blocks[0].attn.qkv)  # a plain layer takes it


@pytest.mark.parametrize("take", [nn.utils.weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.5)])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_what_takes_the_parameter_away_before_it_asks_is_an_error(take):
    model = wc.condition_(vit().eval(), "balanced")
    with pytest.raises(wc.ConditioningError, match="fold_.*build the model"):
        take(qkv_of(model))
    take(wc.fold_(wc.condition_(vit(), "balanced")).blocks[0].attn.qkv)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_hook_reads_the_parameter(create_graph):
    model, seen = wc.condition_(vit().eval(), "balanced"), []
    layer = qkv_of(model)
    layer.weight.register_hook(lambda gradient: seen.append(layer.weight is layer._parameters["weight"]))
    torch.autograd.grad(model(X).square().sum(), layer.weight, create_graph=create_graph)
    assert seen == [not create_graph]  # with a graph, a hook cannot be told from a forward that is run again


def test_a_parent_that_reads_the_weight_of_its_child_uses_the_effective_one():
    class Reads(NanoGPTAttention):
        def forward(self, x):
            return super().forward(x) + nn.functional.linear(x, self.c_attn.weight)[..., : x.shape[-1]]

    model = wc.condition_(Reads(12, 2), "identity", lam=0.5)
    x = torch.randn(1, 4, 12)
    conditioned = model(x)
    torch.testing.assert_close(wc.fold_(model)(x), conditioned)


def test_a_checkpointed_part_that_reads_the_weight_again_in_the_backward_reads_the_same():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = XTransformersAttention(12)

        def project(self, x):
            return nn.functional.linear(x, self.attn.to_q.weight).square()

        def forward(self, x, again):
            return checkpoint(self.project, x, use_reentrant=False) if again else self.project(x)

    model = wc.condition_(Parts(), "balanced")
    x = torch.randn(3, 12, requires_grad=True)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        model(x, again).sum().backward()
        gradients.append(model.attn.to_q.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_an_interrupted_forward_leaves_nothing_running():
    model = wc.condition_(vit(), "balanced")

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert qkv_of(model).weight is qkv_of(model)._parameters["weight"]


def test_threads_do_not_see_each_others_passes():
    model = wc.condition_(vit().eval(), "balanced")
    inside, checked = threading.Event(), threading.Event()
    seen = {}

    def wait(*_):
        inside.set()
        assert checked.wait(600)

    model.blocks[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: seen.update(output=model(X)))
    thread.start()
    assert inside.wait(600)
    seen["weight"] = qkv_of(model).weight
    checked.set()
    thread.join()
    assert seen["weight"] is qkv_of(model)._parameters["weight"]
    assert torch.equal(seen["output"], model(X))


def test_weights_that_change_inside_an_outer_forward_are_followed():
    class Outer(nn.Module):
        """Updates its network between two calls, as meta-learning does."""

        def __init__(self):
            super().__init__()
            self.net = vit().eval()

        def forward(self, x):
            first = self.net(x)
            self.net.blocks[0].attn.qkv.weight.data.mul_(-1.5)
            return first, self.net(x)

    model = wc.condition_(Outer(), "polar")
    first, second = model(X)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(model.net(X), second)


def test_conditioning_under_inference_mode_and_training_afterwards():
    for method, options in (METHODS[0], METHODS[2], ("polar", {"frozen": True})):
        model = vit()
        with torch.inference_mode():
            wc.condition_(model, method, **options)
            model(X)
        loss = model(X).square().sum()
        loss.backward()
        assert qkv_of(model).weight.grad.abs().max() > 0
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        wc.fold_(model)(X).sum().backward()


def test_a_weight_that_is_tied_after_conditioning_keeps_its_own_meaning_and_folding_is_refused():
    model = stack(XTransformersAttention, depth=2)
    wc.condition_(model, "identity", lam=0.5, sites=wc.find_attention(model)[:1])
    model.extra = nn.Linear(12, model[0].attn.to_q.weight.shape[0], bias=False)
    model.extra.weight = model[0].attn.to_q.weight
    x = torch.randn(1, 4, 12)
    assert not torch.allclose(model.extra(x), model[0].attn.to_q(x))  # raw here, effective there
    raw = model.extra.weight.detach().clone()
    with pytest.raises(wc.WeightError, match="extra.weight"):
        wc.fold_(model)
    assert torch.equal(model.extra.weight, raw) and wc.conditioning_of(model)
    model.extra.weight = nn.Parameter(raw)
    wc.fold_(model)


def test_parameters_that_share_memory_are_refused():
    model = stack(XTransformersAttention, depth=1)
    attention = model[0].attn
    attention.to_k.weight = nn.Parameter(attention.to_q.weight.data.view_as(attention.to_q.weight))
    with pytest.raises(wc.WeightError, match="0.attn.to_k.weight"):
        wc.condition_(model, "balanced", projections="q")
    # One buffer for all parameters, as some optimisers make it, is no overlap.
    flat = torch.randn(2 * attention.to_q.weight.numel())
    for number, layer in enumerate((attention.to_q, attention.to_k)):
        size = layer.weight.numel()
        layer.weight = nn.Parameter(flat[number * size : (number + 1) * size].view_as(layer.weight))
    wc.condition_(model, "balanced")

"""What records a forward pass as a graph (torch.fx, torch.jit, torch.export, make_fx) keeps the gradients."""

import copy
import functools
import itertools
import pickle

import pytest
import timm
import torch
import torchvision.models.feature_extraction as torchvision_features
from timm.models import _features_fx as timm_features
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import wellcond as wc

METHODS = [("identity", {"lam": 0.5}), ("balanced", {}), ("polar", {"frozen": True})]
each_method = pytest.mark.parametrize(
    "method, options",
    [METHODS[0], METHODS[1], pytest.param(*METHODS[2], marks=pytest.mark.slow)],
    ids=["identity", "balanced", "frozen"],
)
FIXED = [METHODS[0], METHODS[2]]
TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))


class ReadsWeight(nn.Module):
    """Gives the weight of its projection to F.linear, as BEiT and EVA do."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = 2, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        qkv = nn.functional.linear(x, self.qkv.weight, self.qkv.bias).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.proj(mixed.transpose(1, 2).flatten(2))


def attention(method, options, depth=2):
    torch.manual_seed(0)
    return wc.condition_(nn.Sequential(*(ReadsWeight() for _ in range(depth))), method, **options)


def eva(method, options):
    torch.manual_seed(0)
    model = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=2, embed_dim=48, num_heads=2, num_classes=5)
    return wc.condition_(model.eval(), method, **options)


def gradients(call, parameters, x):
    for parameter in parameters.values():
        parameter.grad = None
    output = call(x)
    output.square().sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in parameters.items()}


def assert_trains_like(call, parameters, model, x):
    """Output and gradients of `call` are those of the model, at every call, also after the weights have changed."""
    everything = {id(parameter): parameter for parameter in (*parameters.values(), *model.parameters())}
    for scale in (1.0, 1.5):
        with torch.no_grad():
            for parameter in everything.values():
                parameter.mul_(scale)
        expected, wanted = gradients(model, dict(model.named_parameters()), x)
        output, got = gradients(call, parameters, x)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        assert got.keys() == wanted.keys()
        for name, gradient in got.items():
            assert gradient is not None, f"{name} got no gradient"
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


@each_method
def test_a_symbolic_trace_trains(method, options):
    model = attention(method, options)
    names = [sorted(vars(module)) for module in model.modules()]
    traced = torch.fx.symbolic_trace(model)
    assert [sorted(vars(module)) for module in model.modules()] == names, "tracing leaves constants in the model"
    graphs = [copy.deepcopy(traced), pickle.loads(pickle.dumps(traced)), torch.fx.symbolic_trace(traced)]
    for graph in graphs:
        own = copy.deepcopy(model)
        for name, parameter in graph.named_parameters():
            assert torch.equal(parameter, own.get_parameter(name))
        assert_trains_like(graph, dict(graph.named_parameters()), own, TOKENS)


def test_a_graph_that_is_run_again_in_the_backward_pass_is_corrected_once():
    model = attention("balanced", {})
    traced = torch.fx.symbolic_trace(model)
    again = functools.partial(checkpoint, traced, use_reentrant=False)
    assert_trains_like(again, dict(traced.named_parameters()), model, TOKENS)


@each_method
def test_a_module_that_reads_the_weight_of_its_child_may_be_the_root(method, options):
    model = attention(method, options, depth=1)
    traced = torch.fx.symbolic_trace(model[0])
    assert_trains_like(traced, dict(model.named_parameters()), model, TOKENS)


@pytest.mark.parametrize(
    "extract, method, options",
    [
        pytest.param(extract, *one, marks=pytest.mark.slow if number % 3 else ())
        for number, (extract, one) in enumerate(itertools.product((timm_features, torchvision_features), METHODS))
    ],
)
def test_feature_extractors_train_the_raw_weights(extract, method, options):
    model = eva(method, options)
    extractor = extract.create_feature_extractor(model, {"head": "out"})
    named = dict(extractor.named_parameters())
    assert named.keys() == dict(model.named_parameters()).keys()
    assert_trains_like(lambda x: extractor(x)["out"], {n: named[n] for n, _ in model.named_parameters()}, model, IMAGE)


def test_a_graph_that_is_traced_within_folded_is_plain():
    model = attention("balanced", {})
    expected = model(TOKENS)
    with wc.folded(model):
        traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(TOKENS), expected)
    assert "wellcond" not in traced.code


def test_a_weight_that_the_graph_cannot_refer_to_is_refused():
    model = attention("balanced", {})
    before = model(TOKENS)
    with pytest.raises(wc.ConditioningError, match="constant without gradient.*fold_"):
        torch.fx.symbolic_trace(lambda x: nn.functional.linear(x, model[0].qkv.weight))
    with pytest.raises(wc.ConditioningError, match="Trace a module that contains this one"):
        torch.fx.symbolic_trace(model[0].qkv)
    assert torch.equal(model(TOKENS), before)
    assert model[0].qkv.weight is model[0].qkv._parameters["weight"]


@pytest.mark.parametrize(
    "method, options", [FIXED[0], pytest.param(*FIXED[1], marks=pytest.mark.slow)], ids=["identity", "frozen"]
)
def test_an_exported_program_trains(method, options):
    model = attention(method, options)
    program = torch.export.export(copy.deepcopy(model), (TOKENS,)).module()
    assert_trains_like(program, dict(program.named_parameters()), model, TOKENS)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("method, options", FIXED, ids=["identity", "frozen"])
def test_a_trace_of_torch_jit_trains(method, options):
    model = attention(method, options)
    traced = torch.jit.trace(copy.deepcopy(model), (TOKENS,))
    assert_trains_like(traced, dict(traced.named_parameters()), model, TOKENS)


@each_method
def test_what_make_fx_recorded_trains(method, options):
    model = attention(method, options)
    parameters = dict(copy.deepcopy(model).named_parameters())

    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    plain = {name: parameter.detach() for name, parameter in parameters.items()}
    recorded = make_fx(call)(plain, TOKENS)
    assert_trains_like(lambda x: recorded(parameters, x), parameters, model, TOKENS)
    # The derivative inside of what is recorded, as in functorch.
    derivative = make_fx(torch.func.grad(lambda p, x: call(p, x).square().sum()))(plain, TOKENS)
    wanted = gradients(lambda x: call(parameters, x), parameters, TOKENS)[1]
    for name, gradient in derivative({n: p.detach() for n, p in parameters.items()}, TOKENS).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4, msg=name)

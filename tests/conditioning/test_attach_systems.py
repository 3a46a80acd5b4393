"""torch.compile and mixed precision, each in the real thing; for several processes see tests/distributed."""

import pytest
import torch
from torch import nn

import wellcond as wc
from conditioning.test_corrections import vit
from models import NanoGPTAttention

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3])
CASES = [("identity", {"lam": 0.5}), ("polar", {}), ("balanced", {}), ("polar", {"frozen": True})]


def train(model, steps, data=(X, Y)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twins(method, options):
    torch.manual_seed(0)
    model = vit()
    other = vit()
    other.load_state_dict(model.state_dict())
    return wc.condition_(model, method, **options), wc.condition_(other, method, **options)


@pytest.mark.slow
def test_conditioning_a_model_that_is_compiled_already():
    torch.manual_seed(0)
    model = vit().eval()
    keys = list(model.state_dict())
    compiled = torch.compile(model, backend="aot_eager")
    plain = compiled(X)
    assert wc.condition_(compiled, "balanced") is compiled
    # The wrapper is looked through: names and marker are those of the model inside.
    assert wc.conditioning_of(compiled)["sites"][0] == "blocks.0.attn" == wc.conditioning_of(model)["sites"][0]
    assert not torch.allclose(compiled(X), plain)
    torch.testing.assert_close(compiled(X), model(X))
    wc.fold_(compiled)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(compiled(X), model(X))


@pytest.mark.parametrize("method, options", [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow), CASES[2]])
def test_autocast_and_half_precision(method, options):
    full, mixed = twins(method, options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(mixed(X).float(), Y)
    loss.backward()
    reference = nn.functional.cross_entropy(full(X), Y)
    reference.backward()
    assert abs(loss.item() - reference.item()) < 0.02
    for (name, a), b in zip(mixed.named_parameters(), full.parameters(), strict=True):
        assert a.dtype == a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() <= 0.1 * b.grad.norm() + 1e-4, name
    # the correction itself is computed in float32, not in the autocast dtype
    site, plain = wc.find_attention(mixed)[0], wc.find_attention(full)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(site.q.read(), plain.q.read())
    for dtype in (torch.bfloat16, torch.float16):
        half = twins(method, options)[0].to(dtype)
        assert half(X.to(dtype)).dtype == dtype
        assert wc.fold_(half)(X.to(dtype)).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method, options", CASES)
def test_gpu(method, options):
    on_cpu, on_gpu = twins(method, options)
    on_gpu.cuda()
    torch.testing.assert_close(on_gpu(X.cuda()).cpu(), on_cpu(X), rtol=1e-3, atol=1e-4)
    wc.fold_(on_gpu)
    torch.testing.assert_close(on_gpu(X.cuda()).cpu(), on_cpu(X), rtol=1e-3, atol=1e-4)


def test_replicas_of_data_parallel_are_refused_with_what_to_use_instead():
    model = wc.condition_(nn.MultiheadAttention(8, 2), "balanced")
    replica = model._replicate_for_data_parallel()  # the next two lines are what nn.DataParallel does on GPUs
    with pytest.raises(wc.ConditioningError, match="DistributedDataParallel"):
        replica.in_proj_weight = model.in_proj_weight.detach()


class WithBreaks(NanoGPTAttention):
    """Parts of its forward cannot be compiled: one reads the weight itself, one calls the projection."""

    @torch.compiler.disable
    def by_hand(self, x):
        return nn.functional.linear(x, self.c_attn.weight, self.c_attn.bias)

    @torch.compiler.disable
    def by_module(self, x):
        return self.c_attn(x)

    def forward(self, x):
        out = super().forward(x) + self.by_hand(x)[..., : x.shape[-1]]
        torch._dynamo.graph_break()
        return out - self.by_module(x)[..., : x.shape[-1]] + nn.functional.linear(out, self.c_attn.weight)[..., :12]


@pytest.mark.filterwarnings("ignore")  # the compiler's own, about what it hands from graph to graph
@pytest.mark.parametrize(
    "method, options", [("balanced", {}), pytest.param("identity", {"lam": 0.5}, marks=pytest.mark.slow)]
)
def test_graph_breaks_inside_an_attention(method, options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wc.condition_(nn.Sequential(WithBreaks(12, 2)), method, **options)
    x = torch.randn(2, 3, 12)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for ours, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad)
    assert model[0].c_attn.weight is model[0].c_attn._parameters["weight"]

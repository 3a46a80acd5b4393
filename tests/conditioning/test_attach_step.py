"""What a training step with a correction costs, counted, and how well conditioned the weights are that it uses."""

import contextlib
from collections import Counter

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

import wellcond as wc
from wellcond.linalg.spectrum import spectra

WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}
DECOMPOSITIONS = ("eigh", "svd", "qr", "cholesky", "linalg_inv", "linalg_solve", "lu_factor")
METHODS = [("identity", {"lam": 0.5}), ("polar", {}), ("balanced", {}), ("polar", {"frozen": True})]


class Count(TorchDispatchMode):
    """Every operation that torch runs, views included."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def vit(depth=12):
    torch.manual_seed(0)
    return timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=48, depth=depth, num_heads=3, num_classes=5
    )


def images(count=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 16, 16, generator=generator), torch.randint(5, (count,), generator=generator)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()


def count_step(model):
    # A capturable optimiser: torch's own reads the number of its step on the host.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(model, optimizer, images())
    with Count() as counted:
        step(model, optimizer, images())
    return counted.names


def assert_never_waits(names):
    assert not WAITS & set(names), names
    assert not [name for name in names if any(part in name for part in DECOMPOSITIONS)]


@pytest.mark.parametrize("method, options", METHODS)
def test_a_step_costs_at_most_eight_operations_a_layer_and_never_waits(method, options):
    plain = count_step(vit())
    names = count_step(wc.condition_(vit(), method, **options))
    assert_never_waits(names)
    assert names.total() - plain.total() <= 8 * 12


def test_layers_of_one_shape_are_one_batch():
    def extra(depth):
        return count_step(wc.condition_(vit(depth), "balanced")).total() - count_step(vit(depth)).total()

    # One more layer costs the link between its parameter and the effective weight.
    assert extra(12) - extra(6) <= 2 * 6


@pytest.mark.parametrize(
    "method, options", [pytest.param(*one, marks=() if one[0] == "balanced" else pytest.mark.slow) for one in METHODS]
)
def test_a_compiled_step_is_one_graph_that_never_waits_and_trains_like_an_eager_one(method, options):
    graphs = []

    def look(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    eager, model = (wc.condition_(vit(depth=1), method, **options) for _ in range(2))
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
    for one, called in ((eager, eager), (model, compiled)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            step(called, optimizer, images())
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert len(graphs) == 2, "one forward and one backward graph, compiled once"
    names = sum(graphs, Counter())
    assert not [name for name in names if "wellcond" in name or any(part in name for part in DECOMPOSITIONS)]
    assert not [name for name in names if set(name.split(".")) & WAITS]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method, options", METHODS)
def test_no_synchronisation_on_a_gpu(method, options):
    model = wc.condition_(vit().cuda(), method, **options)
    batch = tuple(tensor.cuda() for tensor in images())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    step(model, optimizer, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, optimizer, batch)
        with torch.no_grad():
            model(batch[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def weights_of_a_pass(model):
    """The weights that the projections are given by torch, whatever the modules say."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is nn.functional.linear:
                seen.append(args[1].detach())
            return func(*args, **(kwargs or {}))

    with Watch():
        yield seen


def used_heads(model):
    """Q, K, V of every block as the forward pass used them."""
    model.eval()
    with torch.no_grad(), weights_of_a_pass(model) as seen:
        model(images(1)[0])
    model.train()
    width = model.embed_dim
    return [w.reshape(-1, width // 3, width) for w in seen if w.shape == (3 * width, width)]


def worst(model):
    return max(s.condition_number for heads in used_heads(model) for s in spectra(heads))


def test_weights_that_are_replaced_outright_are_conditioned_at_once():
    model = wc.condition_(vit(depth=2), "balanced")
    model(images()[0])
    for kappa in (1e2, 1e4, 1e6):
        with torch.no_grad():
            for block in model.blocks:
                values = torch.logspace(0, -torch.tensor(kappa).log10().item(), 16)
                u, v = (torch.linalg.qr(torch.randn(9, size, 16))[0] for size in (16, 48))
                block.attn.qkv.weight.copy_(((u * values) @ v.mT).reshape(144, 48))
        assert worst(model) <= 2 * (1.001 if kappa <= 1e4 else 1.05)
    state = wc.condition_(vit(depth=2), "balanced").state_dict()
    model.load_state_dict(state)
    assert worst(model) <= 2.002
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:16] = 0  # a dead head keeps C = 0
        model.blocks[1].attn.qkv.weight[:16, 1:] = 0  # rank one
    heads = used_heads(model)
    assert torch.equal(heads[0][0], torch.zeros(16, 48))
    assert max(s.condition_number for s in spectra(torch.cat([heads[0][1:], heads[1]]))) <= 2.1

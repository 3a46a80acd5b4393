"""Effective weights of projections that are cut in any way, also through the middle of a head."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import wellcond as wc
from attention.modern import PerHead, Stack
from distributed.processes import on_two
from wellcond.attention.slot import corrections_of

pytestmark = pytest.mark.processes

METHODS = [("balanced", {}), ("polar", {"layout": "joint"}), ("identity", {"lam": 0.5}), ("polar", {"frozen": True})]
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
CASES = [(placement, heads, method) for placement in PLACEMENTS for heads in (2, 3) for method in range(len(METHODS))]
SOME = [
    ("rows", 2, 0),
    ("rows", 3, 0),
    ("rows", 2, 1),
    ("rows", 3, 2),
    ("columns", 3, 2),
    ("columns", 2, 3),
    ("copies", 3, 0),
]


class Attention(nn.Module):
    """Separate projections, of which two processes hold one and a half heads each if there are three."""

    def __init__(self, num_heads):
        super().__init__()
        self.num_heads, width = num_heads, 4 * num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def effective_weights(placement, heads, method):
    """Effective weights and gradients before and after an update, then the folded ones."""
    torch.manual_seed(0)
    model = Attention(heads)
    name, options = METHODS[method]
    if placement:
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model.q_proj, model.k_proj, model.v_proj):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [PLACEMENTS[placement]]))
    wc.condition_(model, name, **options)
    seen = []
    for _ in range(2):
        for layer in (model.q_proj, model.k_proj, model.v_proj):
            stored = layer.weight
            weight = corrections_of(layer)["weight"].effective(layer, stored)
            (weight**2).sum().backward()
            seen += [whole(weight), whole(stored.grad)]
            with torch.no_grad():
                stored -= 0.1 * stored.grad
            stored.grad = None
    sites = wc.find_attention(model)
    seen += [sites[0].q.read(), sites[0].q.read_raw()]
    wc.fold_(model)
    seen += [whole(layer.weight) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    return [tensor.detach().clone() for tensor in seen]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize(
    "placement, heads, method",
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.slow) for case in CASES],
)
def test_a_projection_that_two_processes_hold(placement, heads, method, tmp_path):
    two = on_two(tmp_path, effective_weights, placement, heads, method)
    assert not isinstance(two, str), two
    for ours, theirs in zip(two, effective_weights("", heads, method), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


STACKS = {"stack": Stack, "one matrix per head": PerHead}


def written_stack(name, axis):
    """What new heads make of a stack that is sharded along an axis, or of one that is not."""
    torch.manual_seed(0)
    module = STACKS[name]()
    sites = wc.find_attention(module)
    if axis is not None:
        mesh = init_device_mesh("cpu", (2,))
        for stored in {slot.weight_name for slot in sites[0].slots.values()}:
            full = getattr(module, stored).data
            setattr(module, stored, nn.Parameter(distribute_tensor(full, mesh, [Shard(axis)])))
    generator = torch.Generator().manual_seed(1)
    for slot in sites[0].slots.values():
        slot.write_(torch.randn(slot.heads_shape, generator=generator))
    return [whole(parameter).detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", STACKS)
def test_stacks_that_two_processes_hold(name, axis, tmp_path):
    two = on_two(tmp_path, written_stack, name, axis)
    assert not isinstance(two, str), two
    for ours, theirs in zip(two, written_stack(name, None), strict=True):
        assert torch.equal(ours, theirs)

"""Per-head Muon equals torch's on each head by itself, whatever the layout; fused it is torch's own."""

import copy

import pytest
import torch
from torch import nn

import wellcond as wc
from attention.modern import Grouped, NormInside, PerHead, Stack
from distributed.models import WRAPPERS, gather, loss_of
from distributed.models import build as build_distributed
from distributed.processes import run_on_two
from lab.helpers import tiny_gpt2, tiny_vit
from wellcond.errors import RecipeError
from wellcond.lab.optimizers import InSingle, Muon
from wellcond.training.muon import divide, orthogonalised

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


class Blocks(nn.Module):
    """An attention layer in a list of blocks."""

    def __init__(self, attention):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": attention, "mlp": nn.Linear(5, 7)})])


LAYOUTS = {
    "grouped queries": lambda: Blocks(Grouped()),
    "fused": lambda: Blocks(NormInside()),
    "interleaved": lambda: Blocks(NormInside(arrangement="heads")),
    "stack": lambda: Blocks(Stack()),
    "stack of four in one": lambda: Blocks(Stack(shape=(128, 32))),
    "one matrix per head": lambda: Blocks(PerHead()),
    "vit": tiny_vit,
    "gpt2": tiny_gpt2,
}


def with_gradients(model, steps=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def stepped_by_torch(matrices, gradients, **options):
    """What torch.optim.Muon makes of matrices that are parameters of their own."""
    parameters = [nn.Parameter(matrix.clone()) for matrix in matrices]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer = torch.optim.Muon(parameters, **(OPTIONS | options))
    with InSingle():
        for _ in range(2):
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def heads_of(site, tensor_of):
    """{role: heads (count, out, in)} of the stored tensors, or of their gradients."""
    return {role: slot.take_heads(tensor_of(slot.parameter)).detach().clone() for role, slot in site.slots.items()}


@pytest.mark.parametrize("kind", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_each_head_is_stepped_as_if_it_were_a_parameter(layout, kind):
    model = with_gradients(LAYOUTS[layout]())
    site = wc.find_attention(model)[0]
    before, gradients = heads_of(site, lambda p: p), heads_of(site, lambda p: p.grad)
    muon = wc.HeadMuon(wc.muon_groups(model), **(OPTIONS | {"adjust_lr_fn": kind}))
    for _ in range(2):
        muon.step()
    for role, heads in heads_of(site, lambda p: p).items():
        expected = stepped_by_torch(before[role], gradients[role], adjust_lr_fn=kind)
        torch.testing.assert_close(heads, torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_pairs_of_heads_are_matrices(layout):
    model = with_gradients(LAYOUTS[layout]())
    site = wc.find_attention(model)[0]
    before, gradients = heads_of(site, lambda p: p), heads_of(site, lambda p: p.grad)
    muon = wc.HeadMuon(wc.muon_groups(model, "pairs"), **OPTIONS)
    for _ in range(2):
        muon.step()
    for role, heads in heads_of(site, lambda p: p).items():
        axis = 1 if role == "o" else 0
        for first in range(0, len(heads), 2):
            old, gradient = (torch.cat(list(one[role][first : first + 2]), axis) for one in (before, gradients))
            [expected] = stepped_by_torch([old], [gradient])
            got = torch.cat(list(heads[first : first + 2]), axis)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_vit, tiny_gpt2])
def test_fused_is_torch_s_muon(make):
    ours = with_gradients(make())
    theirs = with_gradients(copy.deepcopy(ours))
    groups = wc.muon_groups(theirs, "fused")
    muon = wc.HeadMuon(wc.muon_groups(ours, "fused"), **OPTIONS)
    reference = torch.optim.Muon(groups.matrices, **OPTIONS)
    for _ in range(3):
        muon.step()
        with InSingle():
            reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    reference.load_state_dict(muon.state_dict())
    both = [id(one) for one in (*groups.others, *groups.matrices)]
    assert sorted(both) == sorted(id(one) for one in theirs.parameters())


def test_what_no_projection_holds_is_a_matrix_of_its_own():
    """Rows of a fused weight that belong to no head, and a matrix of a stack that is none of q, k, v, o."""
    fused = wc.find_attention(NormInside())[0]
    wider = nn.Module()
    wider.weight = nn.Parameter(torch.randn(80, 24))
    slots = [copy.copy(slot) for slot in (fused.q, fused.k, fused.v)]
    for slot in slots:
        object.__setattr__(slot, "owner", wider)
    matrices = divide(slots, "each")
    batches = matrices.split(wider.weight.detach())
    assert [tuple(batch.shape) for batch in batches] == [(3, 8, 24)] * 3 + [(1, 8, 24)]
    written = torch.zeros(80, 24)
    matrices.join_(written, batches)
    assert torch.equal(written, wider.weight)


def test_singular_values_of_a_batch():
    sigma = torch.linalg.svdvals(orthogonalised(torch.randn(3, 16, 4)))
    assert float(sigma.min()) > 0.5 and float(sigma.max()) < 1.5


def test_the_recipe_s_muon():
    vit = tiny_vit()
    fused, each = (Muon(lr=1e-2, heads=heads).build(vit) for heads in ("fused", "each"))
    assert type(fused._muon) is torch.optim.Muon and type(each._muon) is wc.HeadMuon
    assert [len(g["params"]) for g in fused.param_groups] == [len(g["params"]) for g in each.param_groups]
    with pytest.raises(RecipeError, match="muon"):
        Muon(lr=1e-2, heads="each").build(nn.Linear(2, 2))


def test_errors():
    model = tiny_vit()
    with pytest.raises(wc.UnknownChoiceError, match="'each', 'pairs', 'fused'"):
        wc.muon_groups(model, "both")
    with pytest.raises(TypeError, match="muon_groups"):
        wc.HeadMuon(model.parameters())
    groups = wc.muon_groups(model)
    with pytest.raises(wc.OptionError, match="at least 0"):
        wc.HeadMuon(groups, lr=-1.0)
    with pytest.raises(wc.OptionError, match="AdamW"):
        wc.HeadMuon(groups, params=list(model.parameters()))


# Several processes

CASES = [("llama", "ddp"), ("llama", "fsdp"), ("llama", "tp"), ("gpt2", "fsdp")]


def trained_on_processes(name, wrapper):
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](build_distributed(name))
    groups = wc.muon_groups(model)
    muon = wc.HeadMuon(groups, **OPTIONS)
    for _ in range(2):
        loss_of(model).backward()
        muon.step()
        model.zero_grad()
    return gather(model)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_on_two(tmp_path_factory.mktemp("two"), trained_on_processes, CASES)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_processes_step_as_one_does(case, two):
    assert not isinstance(two[case], str), two[case]
    for name, value in trained_on_processes(case[0], "alone").items():
        torch.testing.assert_close(two[case][name], value, rtol=1e-3, atol=1e-4)

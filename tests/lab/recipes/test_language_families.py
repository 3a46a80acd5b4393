"""Each family of language models with its real classes at a reduced size, through every method of the library."""

import copy
import functools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from wellcond import conditioning_of, find_attention, fold_
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.optimizers import AdamW
from wellcond.lab.tasks.base import logits_of

pytest.importorskip("transformers")

VOCABULARY, LENGTH = 23, 12
FAMILIES = {
    # name: (model, arguments, class that puts a head on it)
    "crammed": (
        "wellcond:crammed_bert",
        {"layers": 2, "width": 16, "heads": 4, "feed_forward": 32, "length": LENGTH},
        None,
    ),
    "bert": (
        "hf:bert",
        {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32},
        "AutoModelForMaskedLM",
    ),
    "gpt2": ("hf:gpt2", {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": LENGTH}, "AutoModelForCausalLM"),
}
CONDITIONS = ["identity(lam=1)", "identity(lam=10)", "polar", "balanced", "conditioned+balanced"]
METHODS = ["default", "gaussian", "mimetic", "conditioned", "orthogonal", *CONDITIONS]


def tokens():
    return torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))


@functools.cache
def built(family):
    name, arguments, auto_class = FAMILIES[family]
    torch.manual_seed(0)
    return build_model(name, {"vocab_size": VOCABULARY} | arguments, auto_class=auto_class)


def prepared(family, method):
    return MethodSettings.model_validate(method).apply_(copy.deepcopy(built(family)), seed=0)


def logits(model):
    return logits_of(model(input_ids=tokens()))


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


@pytest.mark.parametrize("method", METHODS)
def test_a_step_trains_q_k_and_v_of_every_head(family, method):
    model = prepared(family, method).train()
    sites = find_attention(model)
    assert len(sites) == 2
    # lam = 10 can saturate the softmax, and then queries and keys have no gradient.
    roles = "v" if method == "identity(lam=10)" else "qkv"
    slots = [site.slots[role] for site in sites for role in roles]
    before = [slot.read_raw().detach().clone() for slot in slots]
    optimizer = AdamW(lr=1e-2).build(model)
    loss = cross_entropy(logits(model).flatten(0, 1), tokens().flatten())
    loss.backward()
    optimizer.step()
    assert math.isfinite(loss.item())
    for slot, old in zip(slots, before, strict=True):
        new = slot.read_raw()
        assert new.isfinite().all() and ((new - old).abs().amax((1, 2)) > 0).all()
    with torch.no_grad():
        assert logits(model.eval()).isfinite().all()


@pytest.mark.parametrize("method", METHODS[1:5])
def test_initialisations_leave_everything_but_attention_as_it_was(family, method):
    plain, model = built(family).state_dict(), prepared(family, method).state_dict()
    changed = {name for name, value in model.items() if not torch.equal(value, plain[name])}
    assert changed and all("attn" in name or "attention" in name for name in changed)


@pytest.mark.parametrize("method", CONDITIONS)
def test_folding_keeps_the_outputs_and_gives_plain_classes(family, method):
    plain, model = built(family), prepared(family, method).eval()
    assert conditioning_of(model) is not None
    with torch.no_grad():
        conditioned = logits(model)
        assert not torch.allclose(conditioned, logits(copy.deepcopy(plain).eval()), rtol=1e-4, atol=1e-5)
        fold_(model)
        torch.testing.assert_close(logits(model), conditioned, rtol=1e-4, atol=1e-5)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict()) and conditioning_of(model) is None

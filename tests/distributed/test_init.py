"""`init_` on weights that two processes hold together, or each for itself."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import wellcond as wc
from distributed.models import IMAGES, TOKENS, WRAPPERS, build, gather, gpt2, loss_of
from distributed.processes import assert_same_everywhere, is_first, on_two, rank
from wellcond.attention.sharding import unwrap

pytestmark = pytest.mark.processes

METHODS = {
    "conditioned": {"output": True},
    "conditioned, same norm": {"match_norm": True},
    "conditioned, tied keys": {"keys": "tied", "own_token": 0.2, "tokens": 16},
    "orthogonal": {"heads": "joint"},
    "gaussian": {},
    "mimetic": {"position": "sincos2d"},
    "default": {},
    "default, bare": {"rule": "torch"},
    "weight_selection": {},
    "calibrated": {},
}
CASES = [("vit", "fsdp", method) for method in ("conditioned", "mimetic", "default", "weight_selection", "calibrated")]
CASES += [
    ("gpt2", "fsdp", "conditioned, tied keys"),
    ("llama", "tp", "conditioned"),
    ("llama", "fsdp over tp", "gaussian"),
]
CASES += [("vit", "ddp", "conditioned"), ("llama", "tp elsewhere", "conditioned"), ("vit", "ddp", "calibrated")]
REST = [("vit", "fsdp", method) for method in ("conditioned, same norm", "orthogonal", "gaussian", "default, bare")]
REST += [
    ("gpt2", "fsdp", "default"),
    ("torch", "fsdp", "default"),
    ("llama", "tp", "default"),
    ("vit", "ddp", "default"),
]
REST += [("vit", "compiled ddp", "conditioned"), ("gpt2", "fsdp", "calibrated")]


def initialise(name, wrapper, method):
    model = WRAPPERS[wrapper](build(name))
    torch.manual_seed(7 + 100 * rank())  # processes often have seeds of their own: the first one's counts
    options = dict(METHODS[method])
    if method == "weight_selection":
        options["teacher"] = teacher()
    if method == "calibrated":  # on the first process's data
        options["batch"] = data_of(name) if is_first() else other_data_of(name)
    wc.init_(model, method.partition(",")[0], **options)
    assert_same_everywhere(model)
    return gather(unwrap(model) if wrapper == "compiled ddp" else model)


def data_of(name):
    return IMAGES if name == "vit" else TOKENS


def other_data_of(name):
    return 3 * IMAGES if name == "vit" else torch.zeros_like(TOKENS)


def teacher():
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 6, "num_classes": 4}
        return timm.create_model("vit_tiny_patch16_224", **sizes)


def refusal(what):
    """What must raise, on both processes alike, and leave the weights alone."""
    model = WRAPPERS["tp"](build("llama")) if what == "tensor parallel" else WRAPPERS["fsdp"](build("vit"))
    if what == "conditioned":
        wc.condition_(model, "balanced")
    before = gather(model)
    method, options = "gaussian", {"std": float("nan")} if what == "not finite" else {}
    if what == "tensor parallel":
        method, options = "calibrated", {"batch": TOKENS}
    try:
        wc.init_(model, method, **options)
    except wc.WellcondError as error:
        after = gather(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return f"{type(error).__name__}: {error}"


def from_meta(name):
    """Built without memory, sharded, given memory, initialised by the model's own code, then by ours."""
    with torch.device("meta"):
        model = gpt2() if name == "gpt2" else build(name)
    for block in model.transformer.h if name == "gpt2" else model.blocks:
        fully_shard(block)
    fully_shard(model)
    try:
        wc.init_(model, "conditioned")
        raise AssertionError("weights without memory were accepted")
    except wc.WeightError as error:
        refused = str(error)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    if name == "gpt2":
        model.apply(model._init_weights)
    else:
        model.init_weights()
    wc.init_(model, "conditioned", generator=torch.Generator().manual_seed(5))
    wc.condition_(model, "balanced")
    loss = loss_of(model)
    loss.backward()
    wc.fold_(model)
    state = gather(model)
    return {"refused": refused, "loss": loss.item(), "state": state if is_first() else {}}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in REST)], ids=", ".join)
def test_two_processes_get_the_weights_of_one(case, tmp_path):
    two, one = on_two(tmp_path, initialise, *case), initialise(case[0], "alone", case[2])
    untouched = {name: value.clone() for name, value in build(case[0]).state_dict().items()}
    assert not isinstance(two, str), two
    assert list(two) == list(one)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-6, atol=1e-6, msg=name)
    assert any(not torch.equal(one[name], untouched[name]) for name in one)


@pytest.mark.parametrize(
    "what, said",
    [
        ("conditioned", "already conditioned"),
        ("not finite", "not finite"),
        ("tensor parallel", "before the model is parallelised"),
    ],
)
def test_what_is_refused_changes_nothing_on_any_process(what, said, tmp_path):
    assert said in on_two(tmp_path, refusal, what)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("vit", marks=pytest.mark.slow)])
def test_a_model_built_on_the_meta_device(name, tmp_path):
    found = on_two(tmp_path, from_meta, name)
    assert not isinstance(found, str), found
    assert "meta device" in found["refused"]
    plain = build(name)
    plain.load_state_dict(found["state"])
    assert loss_of(plain).item() == pytest.approx(found["loss"], rel=1e-5)
    for site in wc.find_attention(plain):
        assert torch.linalg.cond(site.q.read()).max() < 1.001

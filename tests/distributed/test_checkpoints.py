"""torch's distributed checkpoints of conditioned models: to plain keys, into plain models, and to go on with."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import wellcond as wc
from distributed.models import WRAPPERS, build, gather, loss_of
from distributed.processes import on_two

pytestmark = [pytest.mark.slow, pytest.mark.processes]  # test_training gathers to plain keys by default
CASES = [("vit", "fsdp"), ("gpt2", "fsdp"), ("llama", "tp"), ("llama", "fsdp over tp")]


def make(name, wrapper, method, **options):
    return wc.condition_(WRAPPERS[wrapper](build(name)), method, **options)


def step(model):
    loss_of(model).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def save_and_go_on(name, wrapper, folder):
    """Train, save in parts, go on in a new model; export in parts; load into another conditioning."""
    model = make(name, wrapper, "balanced")
    step(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{name}-{wrapper}-raw")
    with wc.folded(model):
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{name}-{wrapper}-plain")

    other = make(name, wrapper, "balanced")
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=f"{folder}/{name}-{wrapper}-raw")
    set_model_state_dict(other, state)
    assert wc.conditioning_of(other) == wc.conditioning_of(model)
    step(model)
    step(other)
    ours, theirs = gather(model), gather(other)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    different = make(name, wrapper, "polar")
    try:
        set_model_state_dict(different, get_model_state_dict(model))
        refused = ""
    except wc.CheckpointMismatchError as error:
        refused = str(error)
    return {"loss": loss_of(model).item(), "refused": refused}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_checkpoint_in_parts_becomes_a_plain_model(case, tmp_path):
    folder, found = tmp_path, on_two(tmp_path, save_and_go_on, *case, str(tmp_path))
    assert not isinstance(found, str), found
    assert "raw weights of another conditioning" in found["refused"]

    alone = make(case[0], "alone", "balanced")
    step(alone)
    loss = loss_of(alone).item()
    dcp_to_torch_save(folder / f"{case[0]}-{case[1]}-plain", tmp_path / "plain.pt")
    plain = build(case[0])
    state = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert set(state) == set(plain.state_dict())
    plain.load_state_dict(state)
    assert loss_of(plain).item() == pytest.approx(loss, rel=1e-4)

    dcp_to_torch_save(folder / f"{case[0]}-{case[1]}-raw", tmp_path / "raw.pt")
    again = make(case[0], "alone", "balanced")
    again.load_state_dict(torch.load(tmp_path / "raw.pt", weights_only=True)["model"])
    step(again)
    assert loss_of(again).item() == pytest.approx(found["loss"], rel=1e-4)

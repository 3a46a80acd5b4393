"""What a recipe changes about how a model is computed, and not about what it computes."""

import copy

import pytest
import torch
from torch import nn

from lab.helpers import tiny_gpt2, tiny_vit
from lab.small import assert_same_run, record, small_job, small_recipe, stop_after
from wellcond import condition_
from wellcond.errors import RecipeError
from wellcond.lab.recipe import config_hash
from wellcond.lab.train.prepare import blocks_of, make_accelerator, recompute_
from wellcond.lab.train.run import run_job


def gradients(model, batch):
    """Gradients of a loss, and how many bytes were kept for the backward pass."""
    kept = []

    def note(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.train()(batch)
    getattr(output, "logits", output).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()], sum(kept)


@pytest.mark.parametrize("method", ["conditioned", None])
@pytest.mark.parametrize("make", [tiny_vit, tiny_gpt2])
def test_activations_that_are_computed_again_give_the_same_gradients_from_less_memory(make, method):
    model = make() if method is None else condition_(make(), "balanced")
    images = make is tiny_vit
    batch = torch.randn(8, 1, 8, 8) if images else torch.randint(0, 20, (8, 8))
    again = copy.deepcopy(model)
    recompute_(again)
    (ours, kept), (theirs, less) = gradients(model, batch), gradients(again, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert less < (0.7 if images else 0.9) * kept


def test_a_model_that_cannot_compute_again_is_refused():
    with pytest.raises(RecipeError, match=r"training\.recompute"):
        recompute_(nn.Linear(2, 2))


@pytest.mark.parametrize(("make", "name"), [(tiny_vit, "Block"), (tiny_gpt2, "GPT2Block")])
def test_blocks_are_the_layers_around_attention(make, name):
    model = make()
    found = blocks_of(model)
    assert {type(block).__name__ for block in found} == {name} and found


def test_a_fused_step_resumes_bit_for_bit(tmp_path):
    job, stopped = (small_job(tmp_path / name, "default", "optimizer.fused=true") for name in ("a", "b"))
    run_job(job)
    stop_after(stopped, 8)
    run_job(stopped)
    assert len(record(stopped.folder)["sessions"]) == 2
    assert_same_run(job.folder, stopped.folder)


def test_how_a_run_is_computed_is_not_part_of_what_it_is():
    job = small_job("a", "default")
    same = small_job("a", "default", "training.recompute=true", "training.shard=true")
    assert config_hash(same.config) == config_hash(job.config)
    older = copy.deepcopy(job.config)  # of records from before these settings
    assert older["precision"].pop("tf32") is older["precision"].pop("channels_last") is False
    assert older["optimizer"].pop("fused") is False and config_hash(older) == config_hash(job.config)


def test_channels_last_computes_the_same(tmp_path):
    losses = []
    for changes in ((), ("precision.channels_last=true",)):
        folder = tmp_path / str(len(changes))
        run_job(small_job(folder, "default", "training.length={steps: 3}", "training.log_every=1", *changes))
        losses.append(record(folder)["final"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_is_as_the_recipe_says_whatever_ran_before(tmp_path, wanted):
    torch.backends.cuda.matmul.allow_tf32 = not wanted
    make_accelerator(small_recipe(f"precision.tf32={wanted}"), tmp_path, cpu=True)
    assert torch.backends.cuda.matmul.allow_tf32 is wanted

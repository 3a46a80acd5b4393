"""Memory of a run, counted without any."""

import pytest
import torch

from wellcond.lab.recipe import load_recipe
from wellcond.lab.reproduce.memory import choose_gpus, count_memory
from wellcond.lab.settings import shipped_recipes


def test_what_is_kept_for_the_backward_pass_is_counted_without_memory():
    """Against a real forward pass of the same model, on samples with content."""
    recipe, _ = load_recipe("vit-tiny-pets", scale="paper", overrides=["precision.mixed=no", "model.arguments.depth=2"])
    needs = count_memory(recipe, None)
    import timm

    model = timm.create_model(recipe.model.name.removeprefix("timm:"), **recipe.model.arguments).train()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held = {}

    def note(tensor):
        if tensor.untyped_storage()._cdata not in own:
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.zeros(4, 3, 224, 224)).log_softmax(-1)
    assert needs.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 4 * needs.per_sample + needs.casts == pytest.approx(sum(held.values()), rel=0.02)
    del output


@pytest.mark.parametrize(
    ("name", "sequence"), [("lra-retrieval", 2 * 4096), ("crammed-bert", 128), ("bert-12", 128), ("lra-image", 1024)]
)
def test_sequences_are_counted_too(name, sequence):
    overrides = {"crammed-bert": ["model.arguments.layers=2"], "bert-12": ["model.arguments.num_hidden_layers=2"]}
    recipe, _ = load_recipe(name, scale="paper", overrides=overrides.get(name, []))
    needs = count_memory(recipe, None)
    assert needs.per_sample > 64 * sequence and choose_gpus(needs, recipe) == 1


def test_a_detector_has_no_count_of_its_activations():
    recipe, _ = load_recipe("coco-xcit-s12", scale="paper")
    needs = count_memory(recipe, 44.0)
    assert needs.per_sample is None and needs.fixed == 16 * 44e6


@pytest.mark.slow
@pytest.mark.parametrize("name", [name.removeprefix("paper/") for name in shipped_recipes() if "paper/vit" in name])
def test_a_recipe_fits_on_the_gpus_that_are_named(name):
    recipe, _ = load_recipe(name, scale="paper")
    needs = count_memory(recipe, None)
    gpus = choose_gpus(needs, recipe)
    assert gpus is not None and needs.on_each(gpus, recipe) <= 72e9
    assert gpus == 1 or needs.on_each(gpus // 2, recipe) > 72e9

"""`model.layer_scale`: learned factors on what attention and MLP add."""

import pytest
import torch

from lab.helpers import tiny_bert, tiny_gpt2, tiny_vit
from wellcond.errors import RecipeError
from wellcond.lab.models.changes import add_layer_scale_

TOKENS = {"input_ids": torch.randint(0, 20, (2, 8))}


def runner(model):
    images = hasattr(model, "patch_embed")
    size = model.patch_embed.img_size[0] if images else None
    return (
        (lambda: model(torch.randn(2, model.patch_embed.proj.in_channels, size, size)))
        if images
        else lambda: model(**TOKENS)
    )


@pytest.mark.parametrize("make", [tiny_vit, tiny_bert, tiny_gpt2])
def test_factors_scale_what_blocks_add(make):
    model = make().eval()
    run = runner(model)
    plain = sum(1 for _ in model.parameters())
    add_layer_scale_(model, 0.25, run)
    factors = {name: value for name, value in model.named_parameters() if name.endswith("layer_scale")}
    assert sum(1 for _ in model.parameters()) == plain + len(factors)
    assert len(factors) and all(bool((value == 0.25).all()) for value in factors.values())
    seen = {}
    for name in factors:
        module = model.get_submodule(name.rpartition(".")[0])

        def keep(module, args, output, name=name):
            seen[name] = (output, args[0], module)

        module.register_forward_hook(keep)
    run()
    for output, given, module in seen.values():
        transposed = type(module).__name__ == "Conv1D"
        weight = module.weight if transposed else module.weight.T
        torch.testing.assert_close(output, 0.25 * (given @ weight + module.bias), rtol=1e-4, atol=1e-5)
    assert set(seen) == set(factors)


def test_scales_are_not_added_twice():
    model = tiny_vit().eval()
    add_layer_scale_(model, 0.1, runner(model))
    with pytest.raises(RecipeError, match="without scales of their own"):
        add_layer_scale_(model, 0.1, runner(model))

"""A small model starts at the sigma sqrt(fan_in) of the model that it stands in for."""

import math

import pytest
import timm
import torch
import transformers

from lab.helpers import make_recipe
from lab.small import small_job
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.models.changes import scale_true_
from wellcond.lab.train.prepare import prepare_model, prepare_task


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def vit(**arguments):
    return timm.create_model("vit_base_patch16_224", **{"img_size": 32, "depth": 2} | arguments)


def gpt2(width, layers=2):
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=4, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def bert(width):
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * width, vocab_size=64
    )
    return transformers.BertForMaskedLM(config)


def crammed(width):
    return build_model(
        "wellcond:crammed_bert", {"layers": 2, "width": width, "heads": 4, "feed_forward": 4 * width, "vocab_size": 64}
    )


def swin(width):
    return timm.create_model(
        "swin_base_patch4_window7_224", img_size=32, window_size=4, embed_dim=width, depths=(1, 1), num_heads=(2, 4)
    )


def xcit(width):
    return timm.create_model(
        "xcit_medium_24_p16_224", img_size=32, embed_dim=width, depth=1, num_heads=4, cls_attn_layers=1
    )


def long_range(width):
    return build_model(
        "wellcond:long_range",
        {"length": 16, "landmarks": 4, "vocab_size": 8, "num_labels": 2, "width": width, "feed_forward": 2 * width},
    )


def scale(weight, fan_in):
    return float(weight.detach().square().mean().sqrt()) * math.sqrt(fan_in)


def scales(model):
    """sigma sqrt(fan_in) of every weight that is a matrix by shape; of Conv1D, fan_in is the first axis."""
    found = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() >= 2:
                conv1d = type(module).__name__ == "Conv1D"
                found[f"{path}.{name}"] = scale(weight, weight.shape[0] if conv1d else weight[0].numel())
    return found


@pytest.mark.parametrize(
    ("build", "small", "large", "blocks"),
    [
        (lambda width: vit(embed_dim=width, num_heads=4), 64, 768, "blocks."),
        (gpt2, 64, 768, "transformer.h."),
        (bert, 64, 768, "bert.encoder.layer."),
        (crammed, 64, 768, "encoder.layers."),
        (swin, 32, 128, "layers."),
        (xcit, 64, 512, ("blocks.", "cls_attn_blocks.")),
        (long_range, 32, 64, "blocks."),
    ],
    ids=["vit", "gpt2", "bert", "crammed_bert", "swin", "xcit", "long_range"],
)
def test_every_matrix_of_the_blocks_has_the_scale_of_the_large_model(build, small, large, blocks):
    there, here = scales(build(large)), build(small)
    untouched = {name: value.clone() for name, value in here.state_dict().items()}
    rescaled = set(scale_true_(here, large))
    assert rescaled and all(name.startswith(blocks) for name in rescaled)
    found = scales(here)
    for name in rescaled:
        assert found[name] == pytest.approx(there[name], rel=0.08), name
    for name, value in here.state_dict().items():
        assert name in rescaled or torch.equal(value, untouched[name]), name


def test_the_rule_of_depth_stays_the_small_models_own():
    model = gpt2(64, layers=2)
    factors = scale_true_(model, 768)
    assert set(factors.values()) == {math.sqrt(12)}
    assert scale(model.transformer.h[0].mlp.c_proj.weight, 256) == pytest.approx(
        0.02 / math.sqrt(4) * math.sqrt(3072), rel=0.03
    )


@pytest.mark.parametrize("weight_init", ["jax", "moco", "skip"])
def test_weights_drawn_by_fan_stay(weight_init):
    model = vit(embed_dim=64, num_heads=4, weight_init=weight_init)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert set(scale_true_(model, 768).values()) == {1.0}
    # what timm skips is memory as it was found, and may hold NaN
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0, equal_nan=True)


def test_weights_of_no_known_rule_are_refused_and_nothing_changes():
    model = vit(embed_dim=64, num_heads=4)
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight.mul_(1.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RecipeError, match=r"blocks\.1\.mlp\.fc2\.weight"):
        scale_true_(model, 768)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_trained_weights_are_refused():
    for field in ("weights", "encoder"):
        with pytest.raises(ValueError, match=rf"model\.{field}"):
            make_recipe(proxy={"width": 768}, model={"name": "timm:vit_tiny_patch16_224", field: "a.safetensors"})


def prepared(method, proxy="{width: 768}"):
    job = small_job("unused", method, f"proxy={proxy}")
    task = prepare_task(job.recipe, seed=0, base=None)
    return prepare_model(job.recipe, job.method, task, seed=0, base=None).state_dict()


def test_default_is_scale_true_and_the_library_is_available_by_name():
    true, library, without = prepared("default"), prepared("default(library=true)"), prepared("default", "null")
    factor = math.sqrt(768 / 16)
    for name, value in without.items():
        in_block = name.startswith("blocks.") and value.dim() == 2
        torch.testing.assert_close(true[name], factor * value if in_block else value)
        assert torch.equal(library[name], value)


def test_a_default_that_draws_again_is_refused_unless_it_draws_by_fan():
    with pytest.raises(RecipeError, match=r"default\(output=false\)"):
        prepared("default(output=false)")
    deviation = prepared("default(rule=torch)")["blocks.0.attn.qkv.weight"].std()
    assert float(deviation) == pytest.approx(1 / math.sqrt(3 * 16), rel=0.1)


@pytest.mark.parametrize(
    "text", ["default(library=false)", "default(library=true, rule=torch)", "gaussian(library=true)"]
)
def test_library_is_an_option_of_the_plain_default_alone(text):
    with pytest.raises(ValueError, match="library"):
        MethodSettings.model_validate(text)

"""The models of the language recipes at full size, on the meta device: parameters, and where their attention is."""

import pytest
import torch

from wellcond import find_attention
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.models.build import build_model

pytest.importorskip("transformers")

SIZES = {
    # (scale, name): (parameters in millions, attentions, width, heads)
    ("paper", "crammed-bert"): (119.59, 16, 768, 12),
    ("paper", "bert-12"): (110.95, 12, 768, 12),  # 110 M in paper S
    ("paper", "gpt2-tinystories"): (124.44, 12, 768, 12),
    ("paper", "gpt2-tinystories-472m"): (473.52, 26, 1152, 18),
    ("paper", "gpt2-tinystories-1.7b"): (1716.49, 32, 2048, 32),
    ("paper", "gpt2-wikitext103"): (124.44, 12, 768, 12),
    ("paper", "gpt2-wikitext103-472m"): (473.52, 26, 1152, 18),
    ("paper", "gpt2-wikitext103-1.7b"): (1716.49, 32, 2048, 32),
    ("small", "crammed-bert"): (11.02, 4, 256, 4),
    ("small", "gpt2-tinystories"): (30.14, 6, 384, 6),
    ("small", "gpt2-wikitext103"): (30.34, 6, 384, 6),
}


def full_size(scale, name):
    """The model with what the task would tell it, on no device."""
    recipe, _ = load_recipe(name, scale=scale)
    if recipe.task.name == "language_modelling":
        told = {"vocab_size": 50257, "max_position_embeddings": recipe.task.context}
        auto_class = "AutoModelForCausalLM"
    else:
        length = "length" if recipe.model.name.startswith("wellcond:") else "max_position_embeddings"
        told = {"vocab_size": recipe.task.tokenizer.vocabulary, length: recipe.task.length, "pad_token_id": 0}
        auto_class = "AutoModelForMaskedLM"
    with torch.device("meta"):
        return build_model(recipe.model.name, told | recipe.model.arguments, auto_class=auto_class)


@pytest.mark.parametrize(("scale", "name"), SIZES, ids=["-".join(key) for key in SIZES])
def test_full_size_models_have_the_parameters_and_attention_layers_of_the_papers(scale, name):
    millions, layers, width, heads = SIZES[scale, name]
    model = full_size(scale, name)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)
    found = find_attention(model)
    assert len(found) == layers and all(site.evidence == "adapter" for site in found)
    assert {(site.in_features, site.num_heads, site.head_dim) for site in found} == {(width, heads, 64)}


def test_crammed_bert_has_the_parts_of_the_release():
    model = full_size("paper", "crammed-bert")
    options = model.options
    assert (options.vocab_size, options.length, options.dropout) == (32768, 128, 0.0)
    layer = model.encoder.layers[0]
    assert layer.norm1.eps == 1e-12
    assert (layer.ffn.dense_in.out_features, layer.ffn.dense_out.in_features) == (3072, 1536)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias") and "norm" not in name]


def test_bert_12_normalises_behind_each_part_and_has_no_dropout():
    model = full_size("paper", "bert-12")
    config = model.config
    assert (config.vocab_size, config.intermediate_size, config.hidden_act) == (32768, 3072, "gelu")
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    assert isinstance(model.bert.encoder.layer[0].attention.output.LayerNorm, torch.nn.LayerNorm)


@pytest.mark.parametrize(("name", "rate"), [("gpt2-tinystories", 0.0), ("gpt2-wikitext103", 0.1)])
@pytest.mark.parametrize("size", ["", "-472m", "-1.7b"])
def test_gpt2_has_the_dropout_of_its_text(name, size, rate):
    model = full_size("paper", name + size)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {rate}
    assert model.config.n_positions == 1024

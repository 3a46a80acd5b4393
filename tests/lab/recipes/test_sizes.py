"""The models of the papers' recipes at full size, on no device: as many parameters and attentions as the papers say."""

import pytest
import torch

from wellcond import find_attention
from wellcond.lab.models.build import build_model
from wellcond.lab.recipe import load_recipe

SIZES = {
    # (scale, name): (parameters in millions, attentions)
    ("paper", "vit"): (86.57, 12),
    ("paper", "vit-large"): (304.33, 24),
    ("paper", "vit-giant"): (1012.61, 40),
    ("paper", "deit"): (86.57, 12),
    ("paper", "deit-large"): (304.37, 24),
    ("paper", "swin"): (87.77, 24),
    ("paper", "swin-large"): (196.53, 24),
    ("paper", "xcit"): (84.40, 26),
    ("paper", "xcit-large"): (189.10, 26),
    ("paper", "davit"): (87.95, 24),
    ("paper", "davit-large"): (196.81, 24),
    ("paper", "davit-giant"): (1406.47, 34),
    ("paper", "crammed-bert"): (119.59, 16),
    ("paper", "bert-12"): (110.95, 12),  # 110 M in paper S
    ("paper", "gpt2-tinystories"): (124.44, 12),
    ("paper", "gpt2-tinystories-472m"): (473.52, 26),
    ("paper", "gpt2-tinystories-1.7b"): (1716.49, 32),
    ("paper", "gpt2-wikitext103"): (124.44, 12),
    ("small", "crammed-bert"): (11.02, 4),
    ("small", "gpt2-tinystories"): (30.14, 6),
}


@pytest.mark.parametrize(("scale", "name"), SIZES, ids=["-".join(key) for key in SIZES])
def test_a_model_of_a_recipe_has_the_size_of_the_paper(scale, name):
    recipe, _ = load_recipe(name, scale=scale)
    told, auto_class = {}, None  # what the task would tell it
    if recipe.task.name == "language_modelling":
        told = {"vocab_size": 50257, "max_position_embeddings": recipe.task.context}
        auto_class = "AutoModelForCausalLM"
    elif recipe.task.name == "masked_language_modelling":
        length = "length" if recipe.model.name.startswith("wellcond:") else "max_position_embeddings"
        told = {"vocab_size": recipe.task.tokenizer.vocabulary, length: recipe.task.length, "pad_token_id": 0}
        auto_class = "AutoModelForMaskedLM"
    with torch.device("meta"):
        model = build_model(recipe.model.name, told | recipe.model.arguments, auto_class=auto_class)
    millions, attentions = SIZES[scale, name]
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    found = find_attention(model)
    assert len(found) == attentions and all(site.evidence == "adapter" for site in found)

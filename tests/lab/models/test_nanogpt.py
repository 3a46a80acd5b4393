"""nanoGPT's model against GPT-2 of transformers with the same weights, and as every method finds it."""

import math

import pytest
import torch

import wellcond as wc
import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)
from wellcond.errors import ModelSpecError
from wellcond.lab.models.build import build_model
from wellcond.lab.models.changes import scale_tokens_

SMALL = {"vocab_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Conv1D of transformers


def build(**options):
    torch.manual_seed(0)
    return build_model("wellcond:nanogpt", SMALL | options)


def test_it_computes_what_gpt2_does_but_for_the_form_of_gelu():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 11}
    config = transformers.GPT2Config(**sizes, activation_function="gelu", bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = build(bias=True).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    stored = theirs.state_dict()
    stored.pop("lm_head.weight")
    ours.load_state_dict(
        {
            name: value.T if name.endswith(TRANSPOSED) else value
            for name, value in stored.items()
            if name in dict(ours.named_parameters())
        }
    )
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_weights_are_drawn_as_nanogpt_does():
    model = build_model("wellcond:nanogpt", {"vocab_size": 65})
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            wanted = 0.02 / math.sqrt(8) if name.endswith("c_proj.weight") else 0.02
            assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.05)


def test_attention_embeddings_and_positions_are_found():
    model = build()
    assert [(site.name, site.num_heads, site.o is not None) for site in wc.find_attention(model)] == [
        ("transformer.h.0.attn", 2, True),
        ("transformer.h.1.attn", 2, True),
    ]
    names = scale_tokens_(model, {"embeddings": 2.0, "positions": 3.0})
    assert names == ["transformer.wte.weight", "transformer.wpe.weight"]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ModelSpecError):
        build(heads=3)
    with pytest.raises(ValueError, match="at most 8"):
        build()(torch.zeros(1, 9, dtype=torch.long))

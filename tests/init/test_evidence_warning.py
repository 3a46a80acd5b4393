"""`init_` warns where our records say that a start hurts: W_V at scale 1 under a causal mask."""

import warnings

import pytest
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from wellcond.lab.methods import MethodSettings


def gpt2():
    return GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("method", ["conditioned", "gaussian", "orthogonal"])
def test_values_at_scale_one_in_a_causal_model(method):
    with pytest.warns(wc.EvidenceWarning, match="projections='qk'") as said:
        wc.init_(gpt2(), method)
    assert len(said) == 1 and said[0].filename == __file__
    assert ("value_scale='default'" in str(said[0].message)) == (method == "conditioned")


@pytest.mark.parametrize(
    "method, options",
    [
        ("conditioned", {"projections": "qk"}),
        ("conditioned", {"value_scale": "default"}),
        ("conditioned", {"value_scale": 0.2}),
        ("conditioned", {"match_norm": True}),
        ("conditioned", {"keys": "tied", "tokens": 16}),
        ("gaussian", {"projections": "qk"}),
        ("gaussian", {"std": 0.02}),
        ("nanochat", {}),
        ("mimetic", {}),
        ("default", {}),
    ],
    ids=str,
)
def test_starts_that_avoid_it(method, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wc.init_(gpt2(), method, **options)


def test_other_models_and_comparisons_are_not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wc.init_(nn.MultiheadAttention(16, 2), "conditioned")  # the caller's mask decides
        MethodSettings(init="conditioned").apply_(gpt2(), seed=0)


def test_a_failure_comes_before_the_warning():
    model = gpt2()
    model.h[0].attn.c_attn.weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(wc.WeightError):
            wc.init_(model, "conditioned")

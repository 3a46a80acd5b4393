"""Corrections of tokens against their formulas by SVD, and what they must leave alone."""

import copy
import pickle

import pytest
import torch
from scipy.fft import dct
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from conditioning.test_corrections import vit
from wellcond.conditioning.tokens import make_correct
from wellcond.linalg.powers import dct_basis, with_power

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def ill_conditioned(count=2, tokens=9, width=24, lowest=-3):
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(count, n, 9, generator=generator))[0] for n in (tokens, width))
    return u @ torch.diag(3 * torch.logspace(0, lowest, 9)) @ v.mT


def gpt2(tied=True):
    sizes = {"vocab_size": 13, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied)).eval()


@pytest.mark.parametrize("shape", [(9, 24), (24, 9), (9, 9)])
def test_conditioned_tokens_have_a_condition_number_of_at_most_two(shape):
    x = ill_conditioned(lowest=-1)
    x = x if shape == (9, 24) else x.mT if shape == (24, 9) else x[..., :9] @ x[..., :9].mT
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    found = make_correct("conditioned", {})(x)
    assert torch.linalg.cond(found).max() <= 2.001
    if shape != (9, 9):  # square, whose small singular values are lifted less exactly
        torch.testing.assert_close(found, u * (s + s[:, :1])[:, None] @ vh, rtol=0, atol=5e-3)
        halved = make_correct("conditioned", {"keep_scale": True})(x)
        torch.testing.assert_close(torch.linalg.matrix_norm(halved, 2), s[:, 0])


@pytest.mark.parametrize("eps", [0.95, 0.5, 0.0, 1.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_graying_is_a_power_of_the_singular_values(eps, transposed):
    x = ill_conditioned().double()
    x = x.mT if transposed else x
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    expected = u * (s[:, :1] * (s / s[:, :1]) ** eps)[:, None] @ vh
    torch.testing.assert_close(make_correct("grayed", {"eps": eps})(x), expected, rtol=5e-3, atol=1e-3)
    assert not with_power(torch.zeros(1, 4, 6), eps).any()


def test_graying_by_the_cosine_transform_scales_its_frequencies():
    x = ill_conditioned().double()
    frequencies = torch.tensor(dct(x.numpy(), axis=1, norm="ortho"))
    torch.testing.assert_close(dct_basis(9, torch.float64, torch.device("cpu")) @ x, frequencies)
    norms = frequencies.norm(dim=-1, keepdim=True)
    largest = norms.amax(1, keepdim=True)
    expected = largest * (norms / largest) ** 0.8 * frequencies / norms
    found = make_correct("grayed", {"eps": 0.8, "by": "dct"})(x)
    torch.testing.assert_close(torch.tensor(dct(found.numpy(), axis=1, norm="ortho")), expected)


@pytest.mark.parametrize("method, options", [("conditioned", {}), ("grayed", {"eps": 0.5}), ("grayed", {"by": "dct"})])
def test_the_first_block_reads_corrected_tokens_and_gradients_are_those_of_a_constant(method, options):
    torch.manual_seed(0)
    model, seen = vit(depth=1).eval(), []
    plain = copy.deepcopy(model)
    wc.condition_tokens_(model, method, **options)
    model.blocks[0].register_forward_pre_hook(lambda _block, args: seen.append(args[0]))
    out = model(X)
    x = plain._pos_embed(plain.patch_embed(X))
    correction = make_correct(method, options)(x.detach()) - x.detach()
    torch.testing.assert_close(seen[0], x + correction)
    expected = plain.forward_head(plain.norm(plain.blocks[0](x + correction)))
    torch.testing.assert_close(out, expected)
    for loss in (out.square().sum(), expected.square().sum()):
        loss.backward()
    torch.testing.assert_close(model.patch_embed.proj.weight.grad, plain.patch_embed.proj.weight.grad)


def test_a_causal_model_does_not_see_what_comes_after():
    model = gpt2()
    with pytest.raises(wc.ConditioningError, match="of='table'"):
        wc.condition_tokens_(model, of="samples")
    wc.condition_tokens_(model)
    words = torch.arange(8)[None]
    other = words.clone()
    other[0, 5:] = 12
    torch.testing.assert_close(model(words).logits[:, :5], model(other).logits[:, :5])
    weight = model.transformer.wte.weight.detach()
    torch.testing.assert_close(model.transformer.wte(words)[0], make_correct("conditioned", {})(weight[None])[0, :8])


def test_a_table_is_folded_where_nothing_else_reads_it():
    words, untied = torch.arange(8)[None], gpt2(tied=False)
    keys = list(untied.state_dict())
    wc.condition_tokens_(untied, "grayed", eps=0.5)
    before = untied(words).logits
    assert list(wc.fold_tokens_(untied, words).state_dict()) == keys
    torch.testing.assert_close(untied(words).logits, before)
    tied = wc.condition_tokens_(gpt2())
    raw = tied.transformer.wte.weight.clone()
    before = tied(words).logits
    with pytest.raises(wc.ConditioningError, match="tied"):
        wc.fold_tokens_(tied, words)
    assert torch.equal(tied.transformer.wte.weight, raw) and torch.equal(tied(words).logits, before)
    with pytest.raises(wc.ConditioningError, match="sample"):
        wc.fold_tokens_(wc.condition_tokens_(vit(depth=1)), X)


def test_checkpoints_fit_the_same_correction_only():
    model = wc.condition_tokens_(vit(depth=1), "grayed", eps=0.9)
    state = model.state_dict()
    twin = wc.condition_tokens_(vit(depth=1), "grayed", eps=0.9)
    twin.load_state_dict(state)
    copied = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        output = model.eval()(X)
        for other in (twin, copied, copy.deepcopy(model)):
            assert torch.equal(other.eval()(X), output)
    with pytest.raises(wc.CheckpointMismatchError):
        wc.condition_tokens_(vit(depth=1), "grayed", eps=0.8).load_state_dict(state)
    with pytest.raises(RuntimeError, match="wellcond_tokens"):
        vit(depth=1).load_state_dict(state)


def test_sequence_first_encoders_and_wrong_options():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)  # (tokens, samples, width)
    model = wc.condition_tokens_(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    x = torch.randn(5, 2, 16)
    alone = torch.cat([model(x[:, one : one + 1]) for one in range(2)], dim=1)
    torch.testing.assert_close(model(x), alone)  # each sample by itself
    with pytest.raises(wc.ConditioningError, match="already"):
        wc.condition_tokens_(model)
    with pytest.raises(wc.OptionError, match="at most 1"):
        wc.condition_tokens_(vit(depth=1), "grayed", eps=1.5)
    with pytest.raises(wc.UnknownChoiceError, match="'conditioned', 'grayed'"):
        wc.condition_tokens_(vit(depth=1), "bleached")
    with pytest.raises(wc.ConditioningError, match="table"):
        wc.condition_tokens_(vit(depth=1), of="table")

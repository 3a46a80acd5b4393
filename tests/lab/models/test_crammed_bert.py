"""Crammed BERT against its release's formulas, written once more in NumPy, and under every method of the library."""

import numpy as np
import pytest
import torch
from scipy.special import erf, softmax
from torch.nn.functional import cross_entropy

import wellcond as wc
import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)  # noqa: F401  (adds the models wellcond:NAME)
from wellcond.attention.layout import build_site
from wellcond.attention.site import ModuleContext
from wellcond.errors import ModelSpecError
from wellcond.lab.models.build import build_model

SMALL = {"vocab_size": 40, "length": 12, "layers": 2, "width": 16, "heads": 2, "feed_forward": 24}
HEADS = {"crammed_bert": {}, "crammed_bert_classifier": {"num_labels": 3}}


def build(name="crammed_bert", **options):
    torch.manual_seed(0)
    return build_model(f"wellcond:{name}", SMALL | HEADS[name] | options).eval()


def tokens(rows=3, length=12, seed=1):
    """Sequences of different lengths, ended by padding."""
    ids = torch.randint(1, 40, (rows, length), generator=torch.Generator().manual_seed(seed))
    for row in range(rows):
        ids[row, length - 3 * row :] = 0
    return ids, (ids != 0).long()


def stronger_(model):
    """Attention maps far from uniform."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data *= 20
    return model


class Reference:
    """What the release computes, from a state dict."""

    def __init__(self, model):
        self.options = model.options
        self.state = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def linear(self, name, x):
        return x @ self.state[f"{name}.weight"].T + self.state.get(f"{name}.bias", 0.0)

    def attention(self, name, x, mask):
        (batch, length, width), heads = x.shape, self.options.heads
        # [h, 3, d]: for each head its query, its key and its value
        mixed = self.linear(f"{name}.self_attention.query_key_value", x).reshape(batch, length, heads, -1)
        query, key, value = np.split(mixed.transpose(0, 2, 1, 3), 3, axis=-1)
        logits = query @ np.swapaxes(key, -1, -2) / np.sqrt(width // heads) - 1e9 * (1 - mask)[:, None, None, :]
        out = (softmax(logits, axis=-1) @ value).transpose(0, 2, 1, 3).reshape(batch, length, width)
        return self.linear(f"{name}.dense", out)

    def encode(self, ids, mask):
        width, length = self.options.width, ids.shape[1]
        angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
        positions = np.zeros((length, width))
        positions[:, 0::2], positions[:, 1::2] = np.sin(angles), np.cos(angles)
        scale = self.state["encoder.embedding.pos_embedding.scale_factor"]
        x = self.state["encoder.embedding.word_embedding.weight"][ids] + scale * positions
        x = self.norm("encoder.embedding.norm", x)
        for number in range(self.options.layers):
            layer = f"encoder.layers.{number}"
            x = x + self.attention(f"{layer}.attn", self.norm(f"{layer}.norm1", x), mask)
            inner = self.linear(f"{layer}.ffn.dense_in", self.norm(f"{layer}.norm2", x))
            values, gate = np.split(inner, 2, axis=-1)
            x = x + self.linear(f"{layer}.ffn.dense_out", values * gate * (1 + erf(gate / np.sqrt(2))) / 2)
        return self.norm("encoder.final_norm", x)


@pytest.mark.parametrize("length", [12, 7])
def test_masked_language_model_computes_the_published_function(length):
    model = stronger_(build().double())
    ids, mask = tokens(length=length)
    expected = Reference(model).encode(ids.numpy(), mask.numpy())
    expected = expected @ model.encoder.embedding.word_embedding.weight.detach().numpy().T
    # float32 sines in the table
    np.testing.assert_allclose(model(ids, mask).detach().numpy(), expected, atol=2e-6)


def test_classifier_reads_the_first_token():
    model = stronger_(build("crammed_bert_classifier").double())
    ids, mask = tokens()
    reference = Reference(model)
    pooled = np.tanh(reference.linear("pooler.dense", reference.encode(ids.numpy(), mask.numpy())[:, 0]))
    np.testing.assert_allclose(model(ids, mask).detach().numpy(), reference.linear("head", pooled), atol=1e-5)


def test_sparse_prediction_gives_the_same_logits_and_gradients():
    ids, mask = tokens()
    positions = torch.tensor([0, 5, 13, 30])
    whole, sparse = build().double(), build().double()
    logits = whole(ids, mask).flatten(0, 1)[positions]
    torch.testing.assert_close(sparse(ids, mask, positions=positions), logits)
    cross_entropy(logits, ids.flatten()[positions]).backward()
    cross_entropy(sparse(ids, mask, positions), ids.flatten()[positions]).backward()
    for a, b in zip(whole.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", HEADS)
def test_what_stands_in_padding_does_not_matter(name):
    model = stronger_(build(name))
    ids, mask = tokens()
    other = torch.where(mask.bool(), ids, 7)
    seen = mask.bool() if name == "crammed_bert" else slice(None)
    torch.testing.assert_close(model(ids, mask)[seen], model(other, mask)[seen])
    assert not torch.allclose(model(ids)[seen], model(other)[seen])


@pytest.mark.parametrize("name", HEADS)
def test_a_sequence_of_padding_alone_gives_numbers(name):
    model = build(name).train()
    ids = torch.zeros(2, 12, dtype=torch.long)
    logits = model(ids, torch.zeros_like(ids))
    assert torch.isfinite(logits).all()
    logits.square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("layers", "expected", "millions"), [(16, 119_589_889, 119.6), (12, 95_984_641, 96.0)])
def test_published_number_of_parameters(layers, expected, millions):
    with torch.device("meta"):
        model = build_model("wellcond:crammed_bert", {"vocab_size": 32_768, "layers": layers})
    assert count(model) == expected and round(expected / 1e6, 1) == millions
    sites = wc.find_attention(model)
    assert [(site.num_heads, site.head_dim, site.o.in_features) for site in sites] == [(12, 64, 768)] * layers


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_initial_values_are_those_of_the_release(name):
    model = build(name, width=64, feed_forward=128, vocab_size=400, pad_token_id=3)
    embedding = model.encoder.embedding
    table = embedding.word_embedding.weight
    assert float(embedding.pos_embedding.scale_factor) == pytest.approx(1 / 8)
    assert table[3].abs().max() == 0 and table[:3].std() == pytest.approx(0.02, rel=0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.std() == pytest.approx(0.02, rel=0.15)
            assert module.bias is None or module.bias.abs().max() == 0


def test_dropout_acts_in_training_of_the_classifier_only():
    ids, mask = tokens()
    for name, acts in (("crammed_bert", False), ("crammed_bert_classifier", True)):
        model = build(name).train()
        assert torch.equal(model(ids, mask), model(ids, mask)) != acts
        model.eval()
        assert torch.equal(model(ids, mask), model(ids, mask))


# Conditioning


@pytest.mark.parametrize(
    ("init", "condition"),
    [
        ("default", None),
        ("conditioned", "balanced"),
        ("gaussian", "polar"),
        ("orthogonal", "identity"),
        ("mimetic", None),
    ],
)
def test_methods_apply_train_and_fold(init, condition):
    model = build()
    ids, mask = tokens()
    positions = mask.flatten().nonzero().flatten()
    wc.init_(model, init, generator=torch.Generator().manual_seed(0))
    if condition is not None:
        wc.condition_(model, condition, **({"lam": 1.0} if condition == "identity" else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = cross_entropy(model(ids, mask, positions), ids.flatten()[positions])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    names = list(build().state_dict())
    corrected = model(ids, mask)
    if condition is not None:
        wc.fold_(model)
    torch.testing.assert_close(model(ids, mask), corrected)
    assert list(model.state_dict()) == names


BAD = {
    "heads": ({"heads": 3}, "16 cannot be shared by 3 heads"),
    "gate": ({"feed_forward": 7}, "feed_forward: Input should be a multiple of 2 .found 7."),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_impossible_options(options, message):
    with pytest.raises(ModelSpecError, match=message):
        build(**options)


def multiplied_heads(model, ids, mask):
    """Query, key and value of every head of the first layer, as the attention multiplies them."""
    seen = []
    function = "wellcond.lab.models.crammed_bert.scaled_dot_product_attention"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, lambda q, k, v, *_: seen.append((q, k, v)) or v)
        model(ids, mask)
    return seen[0]


def test_site_describes_the_heads_that_are_multiplied():
    model = build().double()
    ids, mask = tokens()
    site = wc.find_attention(model)[0]
    assert (site.name, site.scale) == ("encoder.layers.0.attn.self_attention", 8**-0.5)
    x = model.encoder.layers[0].norm1(model.encoder.embedding(ids))
    for slot, heads in zip((site.q, site.k, site.v), multiplied_heads(model, ids, mask), strict=True):
        torch.testing.assert_close(torch.einsum("bnc,hdc->bhnd", x, slot.read()), heads)
    blocks = build_site(ModuleContext("", site.module, site.module), {"qkv": site.module.query_key_value}, num_heads=2)
    assert not torch.equal(blocks.k.read(), site.k.read())

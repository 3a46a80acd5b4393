"""The Long Range Arena model against the formulas of its publication, written once more in NumPy."""

import numpy as np
import pytest
import torch
from scipy.special import erf, softmax

import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)
from wellcond import condition_, fold_, init_
from wellcond.errors import ModelSpecError
from wellcond.lab.models.build import build_model

NystromformerSelfAttention = pytest.importorskip(
    "transformers.models.nystromformer.modeling_nystromformer"
).NystromformerSelfAttention
SMALL = {"vocab_size": 12, "num_labels": 3, "length": 24, "width": 16, "heads": 2, "feed_forward": 20, "landmarks": 4}


def build(**options):
    torch.manual_seed(0)
    return build_model("wellcond:long_range", SMALL | {"convolution": 5} | options).eval()


def tokens(seed, length=24, rows=3):
    """Sequences of different lengths, ended by padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 12, (rows, length), generator=generator)
    for row in range(rows):
        ids[row, length - 3 * row :] = 0
    return ids, (ids != 0).long()


class Reference:
    """What the release computes, from a state dict."""

    def __init__(self, model):
        self.options = model.options
        self.state = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def linear(self, name, x):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def pseudo_inverse(self, matrices):
        # Scaled by the largest column sum of the whole batch: a prediction depends a little on its batch.
        guess = np.swapaxes(matrices, -1, -2) / matrices.sum(-2).max()
        identity = np.eye(matrices.shape[-1])
        for _ in range(6):
            product = matrices @ guess
            guess = guess / 4 @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
        return guess

    def attention(self, name, x, mask):
        options, (batch, length, width) = self.options, x.shape
        head = width // options.heads

        def heads(projection):
            projected = self.linear(f"{name}.self.{projection}", x)
            return projected.reshape(batch, length, options.heads, head).transpose(0, 2, 1, 3)

        rows = mask[:, None, :, None]
        query, key, value = heads("query"), heads("key"), heads("value")
        query, key = query * rows / head**0.25, key * rows / head**0.25
        hidden = -1e9 * (1 - mask)[:, None, None, :]
        segments = (batch, options.heads, options.landmarks, length // options.landmarks, head)
        few_queries, few_keys = query.reshape(segments).mean(3), key.reshape(segments).mean(3)
        first = softmax(query @ np.swapaxes(few_keys, -1, -2), axis=-1)
        second = softmax(few_queries @ np.swapaxes(few_keys, -1, -2), axis=-1)
        third = softmax(few_queries @ np.swapaxes(key, -1, -2) + hidden, axis=-1)
        mixed = first @ self.pseudo_inverse(second) @ (third @ value)
        kernels = self.state[f"{name}.self.conv.weight"]
        half = options.convolution // 2
        padded = np.pad(value * rows, ((0, 0), (0, 0), (half, half), (0, 0)))
        for number in range(options.heads):
            for offset in range(options.convolution):
                window = padded[:, number, offset : offset + length]
                mixed[:, number] += kernels[number, 0, offset, 0] * window
        return self.linear(f"{name}.output.dense", mixed.transpose(0, 2, 1, 3).reshape(batch, length, width))

    def encode(self, ids, mask):
        x = self.state["word_embeddings.weight"][ids] + self.state["position_embeddings.weight"]
        for layer in range(self.options.layers):
            block = f"blocks.{layer}"
            x = x + self.attention(f"{block}.attention", self.norm(f"{block}.norm1", x), mask)
            inner = self.linear(f"{block}.mlp.0", self.norm(f"{block}.norm2", x))
            x = x + self.linear(f"{block}.mlp.3", inner * (1 + erf(inner / np.sqrt(2))) / 2)
        return (self.norm("norm", x) * mask[..., None]).mean(1)

    def head(self, x):
        return self.linear("head.2", np.maximum(self.linear("head.0", x), 0))


CASES = {
    "published": {},
    "one head, many landmarks": {"heads": 1, "landmarks": 12},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_the_reference_formula(options):
    model = build(**options).double()
    for linear in (module for module in model.modules() if isinstance(module, torch.nn.Linear)):
        linear.weight.data *= 3  # attention maps far from uniform
    ids, mask = tokens(1)
    reference = Reference(model)
    expected = reference.head(reference.encode(ids.numpy(), mask.numpy().astype(float)))
    np.testing.assert_allclose(model(ids, mask).detach().numpy(), expected, atol=1e-11)


def test_pairs_are_joined_as_in_the_release():
    model = build(pairs=True).double()
    (a, mask_a), (b, mask_b) = tokens(1), tokens(2)
    reference = Reference(model)
    x, y = (reference.encode(i.numpy(), m.numpy().astype(float)) for i, m in ((a, mask_a), (b, mask_b)))
    expected = reference.head(np.concatenate([x, y, x * y, x - y], axis=-1))
    found = model(a, mask_a, pair_input_ids=b, pair_attention_mask=mask_b)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-11)
    with pytest.raises(ValueError, match="pair_input_ids"):
        model(a, mask_a)


def test_without_padding_it_is_hugging_faces_function():
    ours = build().blocks[0].attention.self
    hidden = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(3))
    [expected] = NystromformerSelfAttention.forward(ours, hidden)
    torch.testing.assert_close(ours(hidden, torch.ones(2, 24))[0], expected)
    torch.testing.assert_close(ours(hidden)[0], expected)


@pytest.mark.parametrize(("options", "words"), [({}, 0.02), ({"word_deviation": 1.0}, 1.0)])
def test_release_initialisation(options, words):
    model = build(width=64, feed_forward=128, **options)
    assert model.word_embeddings.weight.detach().std() == pytest.approx(words, rel=0.1)
    assert model.position_embeddings.weight.detach().std() == pytest.approx(0.02, rel=0.1)
    query = model.blocks[0].attention.self.query.weight.detach()
    assert query.abs().max() <= 1 / 8 and query.std() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


@pytest.mark.parametrize("method", ["conditioned", "gaussian", "mimetic"])
def test_methods_apply_and_fold(method):
    model = build()
    init_(model, method, generator=torch.Generator().manual_seed(0))
    ids, mask = tokens(1)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    condition_(model, "identity", lam=1.0)
    corrected = model(ids, mask)
    fold_(model)
    torch.testing.assert_close(model(ids, mask), corrected)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, plain[name])}
    assert changed == {
        f"blocks.{layer}.attention.self.{name}.weight" for layer in (0, 1) for name in ("query", "key", "value")
    }


BAD = {
    "landmarks do not divide": ({"landmarks": 5}, "divide the length 24"),
    "even convolution": ({"convolution": 4}, "odd"),
    "heads": ({"heads": 3}, r"\(16\) is not a multiple of the number of attention heads \(3\)"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_impossible_options(options, message):
    with pytest.raises(ModelSpecError, match=message):
        build(**options)


@pytest.mark.parametrize("length", [23, 25])
def test_other_lengths_are_refused(length):
    with pytest.raises(ValueError, match=f"24 tokens, found {length}"):
        build()(torch.ones(1, length, dtype=torch.long))


def test_attention_stays_in_float32_under_mixed_precision():
    attention = build().blocks[0].attention.self
    hidden, mask = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(4)), torch.ones(2, 24)
    with torch.autocast("cpu", torch.bfloat16):
        (mixed,) = attention(hidden.bfloat16(), mask)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, attention(hidden.bfloat16().float(), mask)[0])

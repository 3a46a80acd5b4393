import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wellcond as wc
from lab.helpers import bundle, make_recipe, texts
from wellcond.lab.methods import MethodSettings
from wellcond.lab.tasks.base import EVALUATION, TASKS, TaskContext
from wellcond.lab.tasks.language_modelling import MaskedBlocks
from wellcond.lab.train.prepare import prepare_model

WORDS = "the cat sat on a mat and saw that no dog was near so it ran home".split()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def document(seed, words=40):
    chosen = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return " ".join(WORDS[number] for number in chosen)


def make_task(seed=0, train=None, **fields):
    train = train or texts(*(document(number) for number in range(12)))
    data = bundle("text", train, texts(document(90), document(91)), classes=None, others={"test": texts(document(99))})
    settings, make = TASKS["masked_language_modelling"]
    return make(settings(**{"length": 32} | fields), TaskContext(data, seed))


def keys(count, draw=0):
    return [(index, draw) for index in range(count)]


def masking(seed=0, vocabulary=1000):
    return MaskedBlocks(None, 128, mask=4, special=[0, 1, 2, 3], vocabulary=vocabulary, seed=seed)


def ordinary(rows, length=128, vocabulary=1000, seed=0):
    return np.random.default_rng(seed).integers(5, vocabulary, (rows, length))


def restored(batch):
    """Tokens with what stood at the masked places."""
    tokens, known = batch["input_ids"].clone(), batch["label"] != -100
    rows = torch.arange(len(tokens))[:, None].expand_as(known)
    tokens[rows[known], batch["positions"][known]] = batch["label"][known]
    return tokens.numpy()


# Which tokens


def test_a_quarter_of_every_sequence_is_masked_and_can_be_told():
    tokens = ordinary(50)
    batch = masking().hide(tokens, keys(50))
    assert batch["positions"].shape == batch["label"].shape == (50, 32)
    assert all(len(set(row)) == 32 for row in batch["positions"].tolist())
    np.testing.assert_array_equal(restored(batch), tokens)
    np.testing.assert_array_equal(tokens, ordinary(50))  # the caller's tokens are left alone


def test_of_32_masked_tokens_26_are_hidden_3_random_and_3_as_they_were():
    tokens = ordinary(400)
    batch = masking().hide(tokens, keys(400))
    seen = batch["input_ids"].gather(1, batch["positions"])
    hidden, kept = seen == 4, seen == batch["label"]
    assert (hidden.sum(1) == 26).all()
    # A random token is the one that stood there once in a thousand times.
    assert (kept.sum(1) >= 3).all() and kept.sum() <= 3 * 400 + 12
    drawn = seen[~hidden & ~kept]
    assert drawn.min() >= 5 and drawn.max() < 1000 and len(drawn.unique()) > 500


def test_all_places_and_all_tokens_are_equally_likely():
    rows, length = 4000, 16
    tokens = np.tile(np.arange(5, 5 + length), (rows, 1))
    batch = masking(vocabulary=25).hide(tokens, keys(rows))
    # 4 of 16 places, in an order of its own: the first place of the order is [MASK], so is the third.
    for column in range(4):
        counts = np.bincount(batch["positions"][:, column], minlength=length)
        expected = rows / length
        assert (((counts - expected) ** 2 / expected).sum()) < 40  # chi squared of 15 degrees: p = 0.0005
    seen = batch["input_ids"].gather(1, batch["positions"])
    drawn = np.bincount(seen[:, 3], minlength=25)[5:]
    assert (((drawn - rows / 20) ** 2 / (rows / 20)).sum()) < 46  # 19 degrees: p = 0.0005


def test_special_tokens_are_neither_masked_nor_counted():
    tokens = ordinary(4, 40)
    tokens[0, ::2] = 0  # 20 ordinary tokens
    tokens[1, :38] = 2  # 2
    tokens[2] = 3  # none
    batch = masking().hide(tokens, keys(4))
    masked = batch["label"] != -100
    assert masked.sum(1).tolist() == [5, 1, 0, 10]
    assert not set(batch["label"][masked].tolist()) & {0, 1, 2, 3, 4, -100}
    np.testing.assert_array_equal(restored(batch), tokens)


# When they change


def test_masks_depend_on_seed_sample_and_draw_alone():
    tokens = ordinary(9)
    whole = masking().hide(tokens, keys(9))
    part = masking().hide(tokens[6:3:-1], keys(9)[6:3:-1])
    for name in whole:
        torch.testing.assert_close(whole[name][[6, 5, 4]], part[name])
    same = [masking(seed=1).hide(tokens, keys(9)), masking().hide(tokens, keys(9, draw=1))]
    same.append(masking().hide(tokens, [(index + 9, 0) for index in range(9)]))
    for other in same:
        assert (other["positions"] != whole["positions"]).float().mean() > 0.9


def test_evaluation_is_the_same_for_every_seed_and_epoch():
    tokens = ordinary(5)
    one, other = (masking(seed=seed).hide(tokens, keys(5, EVALUATION)) for seed in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["positions"], masking().hide(tokens, keys(5))["positions"])


# The task


@pytest.mark.parametrize(
    ("tokenizer", "added"), [("bytes", 1), ({"train": "wordpiece", "vocabulary": 50}, 0)], ids=["bytes", "wordpiece"]
)
def test_sequences_are_the_documents_one_after_the_other(tokenizer, added):
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers")
    task = make_task(tokenizer=tokenizer)
    assert task.vocabulary == task.tokenizer.vocabulary_size + added
    stream = restored(task.train.fetch(keys(len(task.train)))).flatten()
    text = task.tokenizer.decode(stream.tolist())
    expected = "".join(document(number) for number in range(12))
    assert text.replace(" ", "") == expected.replace(" ", "")[: len(text.replace(" ", ""))] and len(text) > 500
    assert len(task.test) > 0 and len(task.evaluation) > len(task.test)


class Fixed(nn.Module):
    """Logits that follow from the token seen."""

    def __init__(self, vocabulary):
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, input_ids):
        return self.table(input_ids)


@torch.no_grad()
def test_loss_and_score_are_about_masked_tokens_alone():
    task, torch_model = make_task(), Fixed(258)
    batch = task.evaluation.fetch(keys(len(task.evaluation), EVALUATION))
    logits, labels = torch_model(batch["input_ids"]), torch.full_like(batch["input_ids"], -100)
    labels.scatter_(1, batch["positions"], batch["label"])
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    terms = int(task.num_terms(batch))
    assert terms == int((labels != -100).sum()) > 0
    assert float(task.loss(torch_model, batch)) / terms == pytest.approx(float(expected), rel=1e-5)
    sums = {name: float(value) for name, value in task.score(torch_model, batch).items()}
    scored = task.metrics(sums, task.evaluation)
    right = ((logits.argmax(-1) == labels) & (labels != -100)).sum()
    assert scored["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert scored["masked_accuracy"] == pytest.approx(int(right) / terms)
    assert scored["perplexity"] == pytest.approx(math.exp(scored["loss"]))


SMALL = {
    "wellcond:crammed_bert": {"layers": 2, "width": 16, "heads": 2, "feed_forward": 16},
    "hf:bert": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
}


def recipe(model, **changes):
    return make_recipe(
        task={"name": "masked_language_modelling", "length": 32},
        data={"source": "files", "train": "train.txt", "evaluation": "evaluation.txt"},
        model={"name": model, "arguments": SMALL[model]},
        **changes,
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", ["default", "conditioned+balanced"])
def test_models_are_built_for_the_task_and_measured(name, method):
    task = make_task()
    task_recipe = recipe(name)
    model = prepare_model(task_recipe, MethodSettings.model_validate(method), task, seed=0, base=None)
    report = wc.measure(model.eval(), task.probe(1), jacobian=False)
    assert len(report.layers) == 2 and not any(layer.problem for layer in report.layers)
    batch = task.train.fetch(keys(4))
    task.loss(model.train(), batch).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

"""Language modelling on tokens: blocks, windows, perplexities; training and writing a sample."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lab.helpers import bundle, make_recipe, texts
from lab.tasks.test_base import evaluation_batch, make_task
from wellcond.errors import DataError, RecipeError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.tasks.language_modelling import IGNORED
from wellcond.lab.train.prepare import prepare_model

pytest.importorskip("tokenizers")
STORY = "Once there was a little girl. She had a red ball and a dog, and the dog had the ball."
BPE = {"train": "bpe", "vocabulary": 270}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))


def prose(*documents, **others):
    return bundle("text", texts(*documents), classes=None, **others)


@torch.no_grad()
def score_all(task, model, samples=None, size=3):
    """Metrics over a set, in batches."""
    samples, totals = samples or task.evaluation, {}
    for first in range(0, len(samples), size):
        batch = samples.fetch([(index, -1) for index in range(first, min(first + size, len(samples)))])
        for name, value in task.score(model, batch).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return task.metrics(totals, samples), totals


def test_blocks_predict_every_token_but_the_first_of_the_stream():
    task = make_task("language_modelling", prose("ab cd", "efgh"), context=3, tokenizer=BPE | {"vocabulary": 257})
    stream = task.train.stream.tokens.astype(np.int64)
    assert len(stream) == 11 and len(task.train) == 3
    batch = task.train.fetch([(2, 0), (0, 5)])
    assert batch["input_ids"].tolist() == [stream[6:9].tolist(), stream[0:3].tolist()]
    assert batch["label"].tolist() == [stream[7:10].tolist(), stream[1:4].tolist()]
    assert int(task.num_terms(batch)) == 6 and batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(("length", "stride", "starts"), [(9, 1, 6), (9, 2, 3), (10, 2, 4), (3, 1, 0), (9, None, 2)])
def test_training_windows_begin_at_every_multiple_of_the_stride(length, stride, starts):
    letters = "".join(chr(ord("a") + number) for number in range(length))
    data = bundle("text", texts(letters, "abcdefghijk"), texts("abcd"), classes=None)
    settings = {"context": 3, "tokenizer": "characters", "limit_tokens": length, "stride": stride}
    if not starts:
        with pytest.raises(RecipeError):
            make_task("language_modelling", data, **settings)
        return
    task = make_task("language_modelling", data, **settings)
    assert len(task.train.stream) == length and len(task.train) == starts
    last = task.train.fetch([(starts - 1, 0)])
    first = (starts - 1) * (stride or 3)
    assert last["input_ids"].tolist() == [[first, first + 1, first + 2]]
    assert last["label"].tolist() == [[first + 1, first + 2, first + 3]]
    assert len(task.evaluation) == 1  # whatever the stride of training


def test_text_of_characters_has_no_ends_and_is_judged_by_the_metric_that_is_asked_for():
    data = prose("abc", "bca")
    task = make_task("language_modelling", data, context=2, tokenizer="characters", metric="loss")
    assert task.train.stream.tokens.tolist() == [0, 1, 2, 1, 2, 0]
    assert task.metric.name == "loss" and not task.metric.higher_is_better
    assert make_task("language_modelling", data, context=2).metric.name == "perplexity"


class Counter(nn.Module):
    """Finds all tokens equally likely: its loss counts those that are scored."""

    def forward(self, input_ids, use_cache):
        return torch.zeros(*input_ids.shape, 257)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 23])
@pytest.mark.parametrize("context", [4, 7, 30])
def test_every_token_is_scored_exactly_once(length, context):
    letters = "".join(chr(ord("a") + number) for number in range(length))
    data = bundle("text", texts("x" * 40), texts(letters), classes=None)  # every letter is another token
    task = make_task("language_modelling", data, context=context)
    batch = evaluation_batch(task)
    targets = batch["label"]
    assert sorted(targets[targets != IGNORED].tolist()) == [0, *range(99, 98 + length)]
    found, totals = score_all(task, Counter())
    assert totals["count"] == length and found["loss"] == pytest.approx(math.log(257), rel=1e-6)
    # Each is scored from the tokens before it in its window.
    for row, column in (targets != IGNORED).nonzero().tolist():
        before = ord("a") + 1 + torch.arange(length)
        target = int(targets[row, column])
        place = length if target == 0 else target - 98
        seen = batch["input_ids"][row, : column + 1]
        assert torch.equal(seen, before[place - len(seen) : place])


def test_perplexity_per_word_and_bits_per_byte():
    data = prose("née went", "", "home early today")
    task = make_task("language_modelling", data, context=4)
    found, totals = score_all(task, Counter())
    words, size = 5, len("née wenthome early today".encode())
    tokens = size + 2 - 1  # with two ends, without the first
    assert totals["words"] == pytest.approx(words) and totals["bytes"] == pytest.approx(size)
    assert found["perplexity"] == pytest.approx(257, rel=1e-6)
    assert found["perplexity_per_word"] == pytest.approx(257 ** (tokens / words), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(math.log2(257) * tokens / size, rel=1e-6)
    assert not task.metric.is_better(3.0, 2.0)


def test_a_model_gets_the_vocabulary_of_the_tokeniser():
    task = make_task("language_modelling", prose(STORY), context=4, tokenizer=BPE)
    needed = {"vocab_size": 270, "max_position_embeddings": 4, "bos_token_id": 0, "eos_token_id": 0}
    assert task.model_arguments("hf") == needed and set(task.probe(2)) == {"input_ids"}

    def prepare(**arguments):
        fields = {"n_embd": 8, "n_layer": 1, "n_head": 2, **arguments}
        recipe = make_recipe(
            task={"name": "language_modelling", "context": 4, "tokenizer": BPE},
            model={"name": "hf:gpt2", "arguments": fields},
        )
        return prepare_model(recipe, MethodSettings.model_validate("default"), task, seed=0, base=None)

    assert prepare().config.vocab_size == 270 and prepare(vocab_size=512).config.vocab_size == 512
    with pytest.raises(RecipeError, match="vocab_size"):
        prepare(vocab_size=257)
    with pytest.raises(RecipeError, match="task.tokenizer"):
        task.score(Counter(), evaluation_batch(task))


@pytest.mark.parametrize(
    ("documents", "fields", "message"),
    [
        (["", " \n"], {"tokenizer": BPE}, "the text does not give a bpe tokeniser"),
        (["", " \n"], {}, "some, training split: there is no text"),
        (["ab"], {}, "at least one block of 4 tokens and what is predicted from it, found 3"),
        (["ab"], {"tokenizer": {"name": "no/where/x"}}, "no such file or folder: no/where/x"),
    ],
)
def test_text_that_does_not_suit_is_refused(documents, fields, message):
    with pytest.raises((RecipeError, DataError), match=message):
        make_task("language_modelling", prose(*documents), context=4, **fields)


def test_training_stops_at_a_limit_and_evaluation_does_not():
    data = bundle("text", texts("ab", "cd", "ef"), texts("gh", "ij", "kl"), classes=None)
    task = make_task("language_modelling", data, context=2, limit_tokens=4)
    assert len(task.train.stream) == 6 and len(task.evaluation.stream) == 9

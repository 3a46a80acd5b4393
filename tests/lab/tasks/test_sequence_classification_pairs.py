import pytest
import torch
from torch.nn.functional import cross_entropy

from lab.helpers import ListSplit, bundle, byte_images
from lab.sequence_helpers import MaskedMean, classify_pairs, everything, pairs, written
from wellcond.errors import RecipeError
from wellcond.lab.data import load_data, resolve_config
from wellcond.lab.tasks.base import EVALUATION
from wellcond.lab.train.prepare import _check_takes

PAIRS = bundle("text", pairs(("ab", "c"), ("é", "xyz"), ("abcdef", "a")), classes=2)


def test_both_texts_are_tokens_of_their_own():
    batch = everything(classify_pairs(PAIRS, length=4, pad_to=5).evaluation)
    assert batch["input_ids"].tolist() == [[98, 99, 0, 0, 0], [196, 170, 0, 0, 0], [98, 99, 100, 101, 0]]
    assert batch["pair_input_ids"].tolist() == [[100, 0, 0, 0, 0], [121, 122, 123, 0, 0], [98, 0, 0, 0, 0]]
    for name in ("", "pair_"):
        assert torch.equal(batch[f"{name}attention_mask"], (batch[f"{name}input_ids"] != 0).long())
    assert batch["label"].tolist() == [0, 1, 0] and all(value.dtype == torch.int64 for value in batch.values())


@torch.no_grad()
def test_loss_and_score_of_pairs():
    task, model = classify_pairs(PAIRS, length=4), MaskedMean(sequences=2)
    batch = everything(task.evaluation)
    logits = model(**{name: batch[name] for name in task.inputs})
    assert task.num_terms(batch) == 3 and task.auto_class is None and task.metric.name == "accuracy"
    assert float(task.loss(model, batch)) == pytest.approx(
        float(cross_entropy(logits, batch["label"], reduction="sum")), rel=1e-6
    )
    sums = {}
    for index in range(3):
        for key, value in task.score(model, task.evaluation.fetch([(index, EVALUATION)])).items():
            sums[key] = sums.get(key, 0.0) + float(value)
    found = task.metrics(sums, task.evaluation)
    assert found["loss"] == pytest.approx(float(cross_entropy(logits, batch["label"])), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == batch["label"]).float().mean()))
    assert model(**task.probe(2)).shape == (2, 2)
    assert task.model_arguments("file") == {"vocab_size": 257, "num_labels": 2, "pad_token_id": 0}


def test_the_order_of_a_pair_matters_to_the_batch_only():
    swapped = bundle(
        "text", ListSplit([{**e, "text": e["text_pair"], "text_pair": e["text"]} for e in PAIRS.train]), classes=2
    )
    a, b = (everything(classify_pairs(data, length=8).train) for data in (PAIRS, swapped))
    assert torch.equal(a["input_ids"], b["pair_input_ids"]) and torch.equal(a["pair_input_ids"], b["input_ids"])


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (written("a", "b"), {"length": 4}, "training split: pair_classification expects 2 texts a sample, found 1"),
        (bundle("image", byte_images(2)), {"length": 4}, "pair_classification needs text data; some has image"),
        (PAIRS, {}, "pair_classification of text: expected task.length, for instance 256"),
        (bundle("text", ListSplit([{"text": "a", "text_pair": "b", "label": 2}]), classes=2), {"length": 4}, "found 2"),
    ],
)
def test_data_that_are_no_pairs_are_refused(data, fields, message):
    with pytest.raises(RecipeError, match=message):
        classify_pairs(data, **fields)


def test_texts_longer_than_the_model_takes_are_refused_with_their_shape():
    task = classify_pairs(PAIRS, length=16)
    message = r"mine does not take .*pair_input_ids \(1, 16\).*: at most 8 tokens, found 16"
    with pytest.raises(RecipeError, match=message):
        _check_takes(MaskedMean(longest=8, sequences=2), task, "mine")
    _check_takes(MaskedMean(longest=16, sequences=2), task, "mine")


def test_retrieval_trains_on_files_in_the_published_form(tmp_path):
    rows = b"".join(b"%d\tA\tB\tb'%s'\tb'%s'\n" % (n % 2, b"x" * 9, b"xy"[n % 2 :][:1] * 9) for n in range(40))
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_bytes(rows)
    data = load_data(resolve_config({"source": "aan_pairs", "path": "."}), base=tmp_path)
    task, model = classify_pairs(data, length=12, pad_to=16), MaskedMean(sequences=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        task.loss(model, everything(task.train)).backward()
        optimizer.step()
    with torch.no_grad():
        scored = task.score(model, everything(task.test))
    assert task.metrics({key: float(value) for key, value in scored.items()}, task.test)["accuracy"] == 1.0

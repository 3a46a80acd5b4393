import pytest
import torch

from lab.helpers import ListSplit, bundle
from lab.sequence_helpers import MaskedMean, classify_pairs, everything, pairs, written
from wellcond.errors import RecipeError
from wellcond.lab.train.prepare import _check_takes

PAIRS = bundle("text", pairs(("ab", "c"), ("é", "xyz"), ("abcdef", "a")), classes=2)


def test_both_texts_are_tokens_of_their_own():
    batch = everything(classify_pairs(PAIRS, length=4, pad_to=5).evaluation)
    assert batch["input_ids"].tolist() == [[98, 99, 0, 0, 0], [196, 170, 0, 0, 0], [98, 99, 100, 101, 0]]
    assert batch["pair_input_ids"].tolist() == [[100, 0, 0, 0, 0], [121, 122, 123, 0, 0], [98, 0, 0, 0, 0]]
    for name in ("", "pair_"):
        assert torch.equal(batch[f"{name}attention_mask"], (batch[f"{name}input_ids"] != 0).long())
    assert batch["label"].tolist() == [0, 1, 0] and all(value.dtype == torch.int64 for value in batch.values())


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (written("a", "b"), {"length": 4}, "training split: pair_classification expects 2 texts a sample, found 1"),
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

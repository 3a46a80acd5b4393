import pytest
import torch

from lab.helpers import bundle, byte_images, make_recipe, texts
from lab.sequence_helpers import classify, everything, ids, tokens, written
from wellcond.errors import RecipeError
from wellcond.lab.data import TensorDataset
from wellcond.lab.methods import MethodSettings
from wellcond.lab.train.prepare import prepare_model

# Tokens


def test_minus_one_at_the_end_of_a_row_is_padding():
    task = classify(tokens([0, 4, -1, -1], [1, 2, 3, 0]), pad_to=5)
    batch = everything(task.evaluation)
    assert batch["input_ids"].tolist() == [[1, 5, 0, 0, 0], [2, 3, 4, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([1, -1, 2], "2 from -1 to 2"),
        ([-1, 1, 1], "2 from -1"),
        ([1, 1, 5], "3 from 1"),
    ],
)
def test_other_tokens_outside_the_vocabulary_are_refused(row, found):
    message = rf"training split, row 1 \(the first is 0\): .* from 0 to 4, and then only -1, as padding; found {found}"
    with pytest.raises(RecipeError, match=message):
        classify(tokens([0, 0, 0], row))


def test_all_splits_get_the_longest_length():
    data = tokens(
        [0, 1], [1, 0], others={"test": TensorDataset("tokens", torch.tensor([[1, 2, 3]]), torch.tensor([1]))}
    )
    task = classify(data)
    assert ids(task.train) == [[1, 2, 0], [2, 1, 0]] and ids(task.test) == [[2, 3, 4]] and task.length == 3


# Lengths


def test_text_is_cut_and_tokens_are_refused():
    assert ids(classify(written("abcdef", "ééé"), length=3).train) == [[98, 99, 100], [196, 170, 196]]
    with pytest.raises(RecipeError, match="training split, row 1 .*task.length"):
        classify(tokens([0, 1, -1, -1, -1], [0, 1, 2, 3, 4]), length=4)


def test_sequences_are_cut_to_the_length_and_padded_further():
    task = classify(written("abcdef", "a"), length=3, pad_to=5)
    assert ids(task.train) == [[98, 99, 100, 0, 0], [98, 0, 0, 0, 0]]
    assert task.probe(1)["input_ids"].shape == (1, 5) and task.probe(9)["attention_mask"].shape == (2, 5)


def test_every_byte_is_a_token():
    everything_utf8 = "".join(map(chr, [*range(0x80), 0x7FF, 0x20AC, 0x1F600, 0xD800]))  # the last is half a pair
    encoded = everything_utf8.encode("utf-8", "surrogatepass")
    task = classify(written(everything_utf8, "a"), length=len(encoded))
    assert ids(task.train)[0] == [byte + 1 for byte in encoded]


# Empty sequences


# The test split


def test_a_labelled_test_split_is_offered():
    data = written("a", "b")
    assert classify(data, length=4).test is None
    labelled, unlabelled = texts("tests", labels=[1]), texts("tests")
    for split, expected in ((labelled, [[117, 102, 116, 117]]), (unlabelled, None)):
        made = classify(bundle("text", data.train, classes=2, others={"test": split, "more": texts("x")}), length=4)
        assert (None if made.test is None else ids(made.test)) == expected
    with pytest.raises(RecipeError, match="test split, row 0"):
        classify(bundle("text", data.train, classes=2, others={"test": texts("t", labels=[7])}), length=4)


# Models and recipes

BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (written("abc", "d"), {"length": 12, "pad_to": 16}),
        (tokens([0, 1, -1], [2, 3, 4]), {"pad_to": 16}),
        (bundle("image", byte_images(4, 3, 4), classes=3), {}),
    ],
)
def test_a_model_of_a_recipe_takes_every_kind(data, fields):
    task = classify(data, **fields)
    recipe = make_recipe(model={"name": "hf:bert", "arguments": BERT | {"max_position_embeddings": 16}})
    model = prepare_model(recipe, MethodSettings(), task, seed=0, base=None)
    batch = everything(task.train)
    assert model(**{name: batch[name] for name in task.inputs}).logits.shape == (len(task.train), task.num_classes)

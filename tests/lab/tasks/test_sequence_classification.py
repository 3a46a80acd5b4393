import pytest
import torch

from lab.helpers import bundle, byte_images, make_recipe, texts, tiny_bert
from lab.sequence_helpers import MaskedMean, classify, everything, ids, tokens, written
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
        ([1, -2, -1], "1 from -2"),
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
    with pytest.raises(RecipeError, match="training split, row 1 .*at most 4 tokens .*found 5 from 0 to 4"):
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

NOTHING = {
    "text": (written("ab", ""), {"length": 4}),
    "tokens": (tokens([0, 1], [-1, -1]), {}),
    "black": (
        bundle("image", TensorDataset("image", torch.tensor([[[[9]]], [[[0]]]]).byte(), torch.tensor([0, 1]))),
        {},
    ),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_an_empty_sequence_is_kept_and_masked(kind):
    data, fields = NOTHING[kind]
    assert everything(classify(data, **fields).train)["attention_mask"][1].sum() == 0


def test_an_empty_sequence_gives_numbers():
    task = classify(written("ab", ""), length=4)
    assert torch.isfinite(task.loss(MaskedMean(), everything(task.train)))


# The test split


def test_a_labelled_test_split_is_offered():
    data = written("a", "b")
    assert classify(data, length=4).test is None
    labelled, unlabelled = texts("tests", labels=[1]), texts("tests")
    for split, expected in ((labelled, [[117, 102, 116, 117]]), (unlabelled, None)):
        made = classify(bundle("text", data.train, classes=2, others={"test": split, "more": texts("x")}), length=4)
        assert (None if made.test is None else ids(made.test)) == expected
    with pytest.raises(RecipeError, match="test split, row 0: expected a label from 0 to 1, found 7"):
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


def test_sequences_longer_than_the_model_takes_are_refused_with_their_shape():
    recipe = make_recipe(model={"name": "hf:bert", "arguments": BERT | {"max_position_embeddings": 8}})
    with pytest.raises(RecipeError, match=r"hf:bert does not take the data of this task \(input_ids \(1, 16\), "):
        prepare_model(recipe, MethodSettings(), classify(written("ab", "c"), length=16), seed=0, base=None)


def test_bert_is_not_confused_by_padding():
    model = tiny_bert().eval()
    short, long = (classify(written("abc", "d"), length=4, pad_to=width) for width in (4, 16))
    with torch.no_grad():
        logits = [model(**task.probe(1)).logits for task in (short, long)]
    torch.testing.assert_close(logits[0], logits[1])

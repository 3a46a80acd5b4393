import itertools

import pytest
import torch

from lab.helpers import ListSplit
from lab.tasks.glue.helpers import WORDS
from wellcond.errors import RecipeError
from wellcond.lab.data.base import progress_to
from wellcond.lab.tasks.glue import Sentences, with_marks
from wellcond.lab.tokenizers import ByteTokenizer, import_tokenizers, tokenizer_of

VOCABULARY = {name: number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}


def tokenizer():
    return tokenizer_of(import_tokenizers().models.WordPiece(VOCABULARY, unk_token="[UNK]"), lower_case=True)


def rows(*examples, length=16):
    split = ListSplit([{"label": number % 2, **example} for number, example in enumerate(examples)])
    return Sentences(split, tokenizer(), length)


def ids(text):
    return [VOCABULARY[word] for word in text.split()]


@pytest.mark.parametrize("length", [8, 9, 16])
def test_sequences_are_those_of_the_tokenizers_library(length):
    library = pytest.importorskip("tokenizers")
    reference = tokenizer().inner
    reference.post_processor = library.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    reference.enable_truncation(length, strategy="longest_first")
    texts = [" ".join(WORDS[:count]) for count in (0, 1, 3, 4, 5, 6, 9, 20)]
    for a, b in [*((text, None) for text in texts), *itertools.product(texts, texts)]:
        example = {"text": a} if b is None else {"text": a, "text_pair": b}
        batch = rows(example, length=length).fetch([(0, 0)])
        expected = reference.encode(a, b) if b is not None else reference.encode(a)
        seen = batch["attention_mask"][0].bool()
        assert batch["input_ids"][0][seen].tolist() == expected.ids
        assert batch["token_type_ids"][0][seen].tolist() == expected.type_ids


def test_a_batch_is_as_wide_as_its_longest_sequence_and_pads_are_masked():
    found = rows({"text": "the cat"}, {"text": " ".join(WORDS[:9])}, {"text": " ".join(WORDS)})
    short = found.fetch([(0, 0)])
    assert short["input_ids"].tolist() == [[2, *ids("the cat"), 3, 0, 0, 0, 0]]
    assert short["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert found.fetch([(0, 0), (1, 0)])["input_ids"].shape == (2, 16)  # 11 tokens
    assert found.fetch([(2, 0)])["input_ids"].shape == (1, 16)  # cut to the length
    batch = found.fetch([(2, 3), (0, 3)])
    assert batch["row"].tolist() == [2, 0] and batch["label"].tolist() == [0, 0]


def test_encoding_is_told_and_a_row_is_the_same_in_every_batch():
    told, split = [], ListSplit([{"text": text, "label": 1} for text in ("the cat", "a mat")])
    with progress_to(lambda *row: told.append(row)):
        found = Sentences(split, tokenizer(), 8, "a set")
    assert len(found) == 2 and told == [("encoding a set", 2, 2)]
    batch = found.fetch([(0, 0), (1, 0)])
    assert batch["input_ids"][1, 1:3].tolist() == ids("a mat")
    assert torch.equal(found.fetch([(1, 0)])["input_ids"], batch["input_ids"][1:])


def test_a_tokeniser_without_the_marks_of_sentences_is_refused():
    with pytest.raises(RecipeError, match="wordpiece"):
        with_marks(ByteTokenizer())

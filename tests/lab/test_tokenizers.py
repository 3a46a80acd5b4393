"""Tokenisers: bytes, trained, from files; and what a recipe may say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from lab.helpers import texts, tiny_gpt2
from wellcond.errors import DataError, RecipeError
from wellcond.lab.tasks.language_modelling import generate_text
from wellcond.lab.tokenizers import (
    ByteTokenizer,
    TokenizerChoice,
    make_tokenizer,
    read_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(os.environ.get("WELLCOND_DATA") or Path(__file__).parents[2] / "../shared/data")
WORDS = "One day, a little girl named Lily found a needle in her room. Her café was älter than naïve people say".split()
# Rows of words in a changing order, so that pairs of many frequencies occur, and ties.
STORIES = texts(*(" ".join(WORDS[(5 * row + k * k) % len(WORDS)] for k in range(30)) for row in range(40)))
ODD = ["Hello world", " two  spaces\n\nand\ttabs ", "née 你好 🙂", "\x00\x7f", "", "don't stop"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WELLCOND_DATA", raising=False)


def choose(choice, split=STORIES, base=None):
    return make_tokenizer(TypeAdapter(TokenizerChoice).validate_python(choice), split, "stories", base)


def bpe(vocabulary=300, **fields):
    return choose({"train": "bpe", "vocabulary": vocabulary, **fields})


def word_pieces(vocabulary=64, **fields):
    return choose({"train": "wordpiece", "vocabulary": vocabulary, **fields})


@pytest.fixture
def gpt2_folder(tmp_path):
    """The two files of a byte-pair tokeniser."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    bpe().inner.model.save(str(folder))
    return folder


@pytest.mark.parametrize("make", [ByteTokenizer, bpe], ids=["bytes", "bpe"])
def test_bytes_and_byte_pairs_give_every_text_back(make):
    tokenizer = make()
    encoded = tokenizer.encode_batch(ODD)
    assert [tokenizer.decode(ids) for ids in encoded] == ODD
    assert all(ids.dtype == np.uint16 and (ids < tokenizer.vocabulary_size).all() for ids in encoded)
    assert len(encoded[4]) == 0


def test_byte_pairs_are_fewer_than_bytes_and_end_with_their_own_token():
    tokenizer = bpe()
    (ids,) = tokenizer.encode_batch(["little girl"])
    assert len(ids) < len("little girl") and tokenizer.vocabulary_size == 300
    assert tokenizer.special == {"end_of_text": 0} and tokenizer.document_end == 0
    assert tokenizer.decode([*ids, 0]) == "little girl"


def test_characters_are_those_of_the_training_text_in_order():
    tokenizer = choose("characters", texts("cab\n", "ée"))
    assert tokenizer.vocabulary_size == 6 and tokenizer.document_end is None and not tokenizer.special
    assert [ids.tolist() for ids in tokenizer.encode_batch(["\nabc", "", "éé"])] == [[0, 1, 2, 3], [], [5, 5]]
    assert tokenizer.decode([3, 1, 2]) == "cab"
    assert tokenizer.fingerprint == choose("characters", texts("éeabc", "\n")).fingerprint
    assert tokenizer.fingerprint != choose("characters", texts("eabc", "\n")).fingerprint
    with pytest.raises(DataError) as error:
        tokenizer.encode_batch(["abcd"])
    assert error.value.found == "'d'" and "6 characters" in error.value.expected


def test_word_pieces_are_those_of_bert():
    tokenizer = word_pieces(lower_case=True)
    assert tokenizer.special == {"pad": 0, "unknown": 1, "classify": 2, "separator": 3, "mask": 4}
    assert tokenizer.document_end == 3
    ids = tokenizer.encode_batch(["Lily CAFÉ", "lily cafe", "Ω", "  "])
    assert ids[0].tolist() == ids[1].tolist() and tokenizer.decode(ids[0]) == "lily cafe"
    assert ids[2].tolist() == [1] and len(ids[3]) == 0
    kept = word_pieces(lower_case=False)
    assert kept.decode(kept.encode_batch(["Lily café"])[0]) == "Lily café"


@pytest.mark.slow
def test_training_repeats_in_another_process_with_other_threads():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from lab.test_tokenizers import bpe, word_pieces; print(bpe().fingerprint, word_pieces().fingerprint)"
    )
    here = [bpe().fingerprint, word_pieces().fingerprint]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "WELLCOND_CACHE": f"{os.environ['WELLCOND_CACHE']}-other"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == here


def test_training_is_kept_and_depends_on_text_and_options(tmp_path):
    first = bpe()
    (kept,) = (tmp_path / "cache/tokenizers").glob("*/tokenizer.json")
    before = kept.stat().st_mtime_ns
    assert bpe().fingerprint == first.fingerprint and kept.stat().st_mtime_ns == before
    others = [bpe(290), bpe(lower_case=True), bpe(documents=20)]
    changed = texts(*(row["text"] for row in STORIES.examples[:-1]), STORIES.examples[-1]["text"] + "!")
    others.append(choose({"train": "bpe", "vocabulary": 300}, changed))
    assert len(list((tmp_path / "cache/tokenizers").glob("*/tokenizer.json"))) == 5
    assert first.fingerprint not in {other.fingerprint for other in others[:3]}
    assert json.loads(kept.read_bytes())


@pytest.mark.parametrize(
    ("choice", "documents", "message"),
    [
        (
            {"train": "bpe", "vocabulary": 4096},
            ["some words"],
            "of 4096 tokens.*\n.*\n.*found: +257.*\n.*lower task.tok",
        ),
        ({"train": "wordpiece", "vocabulary": 4096}, ["some words"] * 3, "(?s)of 4096 tokens.*lower"),
        ({"train": "bpe", "vocabulary": 100}, ["words"], "(?s)of 100 tokens.*at least 257 .*Raise"),
        ({"train": "bpe", "vocabulary": 300}, ["", " \n"], "(?s)of 300 tokens.*found: +257"),
    ],
)
def test_text_and_vocabulary_that_do_not_suit_each_other(choice, documents, message):
    with pytest.raises(DataError, match=message):
        choose(choice, texts(*documents))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("words", "expected bytes, characters, {train"),
        ({"train": "unigram", "vocabulary": 9}, "'wordpiece' or 'bpe'"),
        ({"train": "bpe", "vocabulary": 9, "lowercase": True}, "Did you mean 'lower_case'"),
        ({"name": "x", "sha256": "12"}, "pattern"),
    ],
)
def test_a_recipe_is_checked(choice, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(TokenizerChoice).validate_python(choice)


def test_files_of_each_kind_give_the_tokeniser_back(gpt2_folder, tmp_path):
    trained = bpe()
    whole = tmp_path / "whole"
    whole.mkdir()
    trained.inner.save(str(whole / "tokenizer.json"))
    expected = [ids.tolist() for ids in trained.encode_batch(ODD)]
    for name in ("pairs", "pairs/vocab.json", "whole", "whole/tokenizer.json"):
        found = choose({"name": name}, base=tmp_path)
        assert [ids.tolist() for ids in found.encode_batch(ODD)] == expected and found.special["end_of_text"] == 0


def test_a_name_is_a_folder_here_or_in_a_mirror_or_an_id_of_the_hub(gpt2_folder, tmp_path, monkeypatch):
    expected = choose({"name": "pairs"}, base=tmp_path).fingerprint
    assert choose({"name": "pairs"}, base=tmp_path).fingerprint == expected
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path))
    assert choose({"name": "pairs", "sha256": expected}, base=tmp_path / "cache").fingerprint == expected
    with pytest.raises(RecipeError, match="sha256"):
        choose({"name": "pairs", "sha256": "0" * 64})
    for name, words in (("some/tokeniser", "HF_HUB_OFFLINE"), ("../pairs/x", "an id such as")):
        with pytest.raises(DataError) as caught:
            choose({"name": name}, base=tmp_path / "cache")
        assert words in caught.value.expected and name in caught.value.problem


def test_a_folder_that_transformers_wrote_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = word_pieces()
    transformers.PreTrainedTokenizerFast(tokenizer_object=ours.inner, pad_token="[PAD]").save_pretrained(tmp_path / "t")
    found = choose({"name": "t"}, base=tmp_path)
    assert [ids.tolist() for ids in found.encode_batch(ODD)] == [ids.tolist() for ids in ours.encode_batch(ODD)]


def test_a_file_that_cuts_or_pads_does_so_no_more(tmp_path):
    inner = bpe().inner
    inner.enable_truncation(3)
    inner.enable_padding()
    inner.save(str(tmp_path / "tokenizer.json"))
    found = choose({"name": "tokenizer.json"}, base=tmp_path).encode_batch(["a little girl named Lily", "a"])
    assert len(found[0]) > 3 and len(found[1]) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "merges.txt").unlink(), "FileNotFoundError.*merges.txt"),
        (lambda folder: (folder / "vocab.json").write_text("[1, 2]"), "vocab.json and .*merges.txt: the tokeniser can"),
        (lambda folder: (folder / "merges.txt").write_text("zz qq\n"), "zz.* out of vocabulary"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"a": 1}'), "the tokeniser cannot be read"),
        (lambda folder: shutil.rmtree(folder), "HF_HUB_OFFLINE"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "pairs: the tokeniser cannot be read"),
    ],
)
def test_damaged_files_are_named(gpt2_folder, damage, message):
    damage(gpt2_folder)
    with pytest.raises(DataError, match=message):
        choose({"name": "pairs"}, base=gpt2_folder.parent)


def test_a_vocabulary_without_all_bytes_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 1}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(DataError, match="255 of the 256 bytes"):
        read_tokenizer(tmp_path)


def test_the_files_of_gpt2():
    folder = ROOT / "gpt2-bpe"
    if not folder.is_dir():
        pytest.skip("no gpt2-bpe: set WELLCOND_DATA to a folder that holds it")
    tokenizer = read_tokenizer(folder)
    known = {"Hello world": [15496, 995], " the": [262], "<|endoftext|>": [50256], "don't": [9099, 470]}
    assert [ids.tolist() for ids in tokenizer.encode_batch(list(known))] == list(known.values())
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(ODD)] == ODD
    assert tokenizer.vocabulary_size == 50257 and tokenizer.document_end == 50256


# Generated text


def test_a_text_is_drawn_again_and_leaves_everything_as_it_was():
    import torch

    model, tokenizer = tiny_gpt2(context=8).train(), ByteTokenizer()
    state = torch.get_rng_state()
    first = generate_text(model, tokenizer, "ab", 30, context=8)
    assert first == generate_text(model, tokenizer, "ab", 30, context=8) and first.startswith("ab")
    assert model.training and torch.equal(state, torch.get_rng_state())


def test_the_end_of_a_document_ends_a_text():
    import torch
    from torch import nn

    class Alphabet(nn.Module):
        """After a letter its successor; the document ends after d."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache):
            following = torch.where(input_ids == 1 + ord("d"), 0, input_ids + 1)
            return torch.nn.functional.one_hot(following, 300).float() * 50

    assert generate_text(Alphabet(), ByteTokenizer(), "a", 30, context=9) == "abcd"
    assert generate_text(Alphabet(), ByteTokenizer(), "a", 2, context=9) == "abc"


def test_conditioned_and_folded_models_write_the_same():
    import wellcond

    model = tiny_gpt2(context=16)
    wellcond.init_(model, "conditioned")
    wellcond.condition_(model, "identity", lam=1.0)

    drawn = {prompt: generate_text(model, ByteTokenizer(), prompt, 40, context=16) for prompt in ("", "x", "yes")}
    wellcond.fold_(model)
    for prompt, text in drawn.items():
        assert generate_text(model, ByteTokenizer(), prompt, 40, context=16) == text

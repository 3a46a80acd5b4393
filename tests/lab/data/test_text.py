"""Streams of tokens on disk, and corpora that are read once."""

import bz2
import functools
import gzip
import itertools
import json
import os
import pickle
import shutil

import numpy as np
import pytest

from lab.data.helpers import load
from lab.helpers import texts
from lab.small import Killed
from wellcond.errors import DataError
from wellcond.lab.data import fingerprint
from wellcond.lab.data import text as text_data
from wellcond.lab.data.base import progress_to
from wellcond.lab.data.text import open_token_stream
from wellcond.lab.tasks.base import TASKS, TaskContext
from wellcond.lab.tokenizers import ByteTokenizer

DOCUMENTS = [f"document number {number} " * (number % 5) for number in range(700)]  # every fifth is empty


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.delenv("WELLCOND_DATA", raising=False)


@pytest.fixture
def small_batches(monkeypatch):
    """A batch has 512 documents, and what it adds is kept at once."""
    monkeypatch.setattr("wellcond.lab.data.text.ROWS_AT_ONCE", 512)
    monkeypatch.setattr("wellcond.lab.data.text.PIECE", 30_000)


class Counting(ByteTokenizer):
    """Knows how much it has encoded, and can stop there."""

    def __init__(self, stop_after=None):
        self.batches, self.stop_after = 0, stop_after

    def encode_batch(self, batch):
        self.batches += 1
        if self.stop_after is not None and self.batches > self.stop_after:
            raise KeyboardInterrupt
        return super().encode_batch(batch)


class Wide(ByteTokenizer):
    vocabulary_size = 2**16 + 1
    fingerprint = "wide"

    def encode_batch(self, batch):
        return [ids.astype(np.uint32) + 2**16 - 256 for ids in super().encode_batch(batch)]


def expected_stream(documents):
    kept = [document for document in documents if document.strip()]
    return np.concatenate([np.append(ids, 0) for ids in ByteTokenizer().encode_batch(kept)])


def open_stream(documents=DOCUMENTS, tokenizer=None, **options):
    return open_token_stream(texts(*documents), tokenizer or ByteTokenizer(), "some text", **options)


def same(stream, documents=DOCUMENTS):
    return np.array_equal(stream.tokens, expected_stream(documents))


def test_a_stream_holds_all_documents_with_their_ends():
    stream = open_stream(["ab", "", "c d", " \n"])
    assert stream.tokens.tolist() == [98, 99, 0, 100, 33, 101, 0]
    assert stream.tokens.dtype == np.uint16 and isinstance(stream.tokens, np.memmap) and len(stream) == 7
    counts = stream.counts
    assert counts == {"documents": 2, "skipped": 2, "tokens": 7, "words": 3, "bytes": 5}
    with pytest.raises(ValueError, match="read-only"):
        stream.tokens[0] = 1


def test_a_stream_is_made_once_and_depends_on_text_tokeniser_and_limit(small_batches):
    first = Counting()
    assert same(open_stream(tokenizer=first)) and first.batches > 1
    again = Counting()
    assert same(open_stream(tokenizer=again)) and again.batches == 0
    middle = [*DOCUMENTS[:333], DOCUMENTS[333] + "!", *DOCUMENTS[334:]]  # a row that `fingerprint` does not look at
    assert same(open_stream(middle, again), middle) and again.batches > 0
    assert open_stream(tokenizer=Wide()).tokens.dtype != open_stream().tokens.dtype
    # "ab", "c": the same bytes, cut elsewhere
    assert open_stream(["ab", "c"]).tokens.tolist() != open_stream(["a", "bc"]).tokens.tolist()


@pytest.mark.parametrize(("limit", "documents"), [(1, 1), (3, 1), (4, 2), (10**6, 3)])
def test_a_limit_ends_behind_the_document_that_reaches_it(limit, documents):
    stream = open_stream(["ab", "cd", "ef"], limit_tokens=limit)
    assert stream.counts["documents"] == documents and len(stream) == 3 * documents


def test_an_interruption_leaves_nothing_that_is_taken_for_the_tokens(tmp_path, small_batches):
    with pytest.raises(KeyboardInterrupt):
        open_stream(DOCUMENTS * 8, Counting(stop_after=5))
    assert {path.suffix for path in (tmp_path / "cache/tokens").iterdir()} <= {".partial", ".lock"}
    told, rest = [], Counting()
    with progress_to(lambda *row: told.append(row)):
        assert same(open_stream(DOCUMENTS * 8, rest), DOCUMENTS * 8)
    assert rest.batches == 6  # of eleven
    assert told[-1] == ("tokenising some text, documents", len(DOCUMENTS) * 8, len(DOCUMENTS) * 8)


def files_of_stream(cache):
    """Of the only stream in a cache, by name."""
    [folder] = [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("limit", [None, 40_000])
def test_a_kill_at_any_write_loses_no_more_than_a_piece(tmp_path, monkeypatch, small_batches, limit):
    documents, cache = DOCUMENTS * 4, tmp_path / "cache"
    unbroken = Counting()
    open_stream(documents, unbroken, limit_tokens=limit)
    expected = files_of_stream(cache)
    real = {name: getattr(os, name) for name in ("fsync", "replace")}
    kept = []
    for moment in itertools.count():
        shutil.rmtree(cache)
        writes = itertools.count()

        def die(name, *arguments, writes=writes, moment=moment):
            if next(writes) == moment:
                raise Killed
            return real[name](*arguments)

        first, second = Counting(), Counting()
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, functools.partial(die, name))
            try:
                open_stream(documents, first, limit_tokens=limit)
                break
            except Killed:
                pass
        open_stream(documents, second, limit_tokens=limit)
        assert files_of_stream(cache) == expected
        kept.append(first.batches + second.batches - unbroken.batches)
    assert moment > 6 and set(kept) <= {0, 1}  # the piece that was being written, at most, is tokenised again


def test_what_is_no_token_file_is_made_again(tmp_path, small_batches):
    with pytest.raises(KeyboardInterrupt):
        open_stream(DOCUMENTS * 8, Counting(stop_after=5))
    [folder] = (tmp_path / "cache/tokens").glob("*.partial")
    tokens = folder / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-100_000])  # shorter than what was kept
    again = Counting()
    assert same(open_stream(DOCUMENTS * 8, again), DOCUMENTS * 8) and again.batches == 11


@pytest.mark.parametrize("documents", [[""], ["", " \n\t"], ["\u3000"]])
def test_no_text_at_all_is_an_error_every_time(documents):
    for _ in range(2):
        with pytest.raises(DataError, match="some text"):
            open_stream(documents)


# Corpora


def write_corpus(folder, name, documents):
    path = folder / name
    if ".txt" in name:
        content = "\n".join(documents).encode()
    elif ".jsonl" in name:
        content = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(documents)).encode()
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=100)
        return path
    if name.endswith(".zst"):
        import pyarrow

        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(content)
        return path
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


def stream_of(folder, files="*", **fields):
    return load(base=folder, source="text_stream", files=files, **{"evaluation_documents": 10, **fields})


def all_texts(split):
    return [split[row]["text"] for row in range(len(split))]


KEPT = [document for document in DOCUMENTS if document]
NAMES = ["a.txt", "a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.txt.bz2", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_documents(name, tmp_path):
    if name.endswith(".zst"):
        pytest.importorskip("zstandard")
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder, name, DOCUMENTS)
    bundle = stream_of(folder, name)
    assert all_texts(bundle.evaluation) == KEPT[:10] and all_texts(bundle.train) == KEPT[10:]
    assert bundle.kind == "text" and bundle.class_names is None and str(tmp_path) not in bundle.description
    assert fingerprint(bundle) == fingerprint(pickle.loads(pickle.dumps(bundle)))
    stream = open_token_stream(bundle.train, ByteTokenizer(), "train")
    assert same(stream, KEPT[10:])


def test_limits_end_the_reading_and_the_cache_answers_the_second_time(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder, "a.jsonl", KEPT[:300])
    path = write_corpus(folder, "b.jsonl", KEPT[300:])
    few = stream_of(folder, limit_bytes=1000, evaluation_documents=1)
    size = sum(map(len, [*all_texts(few.evaluation), *all_texts(few.train)]))
    assert 1000 <= size < 1000 + max(map(len, KEPT))
    with open(path, "ab") as file:
        file.write(b'{"text": "one more"}\n')
    assert all_texts(stream_of(folder).train)[-1] == "one more"  # a changed file is read again
    path.unlink()
    with pytest.raises(DataError, match="too few documents"):
        stream_of(folder, evaluation_documents=300)


def test_a_corpus_is_read_once_for_tokeniser_and_tokens(tmp_path, monkeypatch):
    """And not at all where a run resumes."""
    folder, rows = tmp_path / "corpus", []
    folder.mkdir()
    write_corpus(folder, "a.jsonl", DOCUMENTS)

    def counted(*arguments):
        for found in read(*arguments):
            rows.extend(found)
            yield found

    read = text_data._read
    monkeypatch.setattr(text_data, "_read", counted)
    settings, make = TASKS["language_modelling"]
    fields = {"context": 8, "tokenizer": {"train": "bpe", "vocabulary": 270}}
    first, again = (make(settings(**fields), TaskContext(stream_of(folder), 0)) for _ in range(2))
    assert rows == DOCUMENTS
    assert again.train.stream.tokens.filename == first.train.stream.tokens.filename

    def unreadable(*_):
        raise AssertionError("the text is read again")

    monkeypatch.setattr("wellcond.lab.data.text.text_columns", unreadable)  # nor is the copy in the cache
    assert len(make(settings(**fields), TaskContext(stream_of(folder), 0)).train) == len(first.train)


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', {}, r"a.jsonl: this cannot be read"),
        ("a.jsonl", b'{"body": "a"}\n', {}, r"a.jsonl: this(?s:.*)no text in column 'text' .* columns .*body"),
        ("a.txt", b"\xff\xfe\n", {}, "a.txt: this cannot be read(?s:.*)UTF-8"),
        ("a.txt", b"", {}, "too few documents(?s:.*)0 with text"),
        ("a.parquet", b"no parquet", {}, "a.parquet: this cannot be read"),
        ("a.xlsx", b"text\na\n", {}, "the format is not known"),
        ("b.txt", b"a\n", {"files": "c.txt"}, "c.txt: no such file"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, fields, message, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        stream_of(folder, **{"files": "*", **fields})


@pytest.mark.parametrize("fields", [{}, {"id": "a/b", "files": "c"}])
def test_settings_that_say_nothing_or_too_much(fields):
    with pytest.raises(ValueError, match="expected either"):
        load(source="text_stream", **fields)


def test_a_set_of_a_mirror_is_streamed(tmp_path, monkeypatch):
    folder = tmp_path / "mirror/some/set/data"
    folder.mkdir(parents=True)
    write_corpus(folder, "train-00000-of-00002.parquet", DOCUMENTS[:400])
    write_corpus(folder, "train-00001-of-00002.parquet", DOCUMENTS[400:])
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    bundle = load(source="text_stream", id="some/set", evaluation_documents=10)
    assert all_texts(bundle.train) == KEPT[10:] and bundle.name == "some/set"
    with pytest.raises(DataError, match="there is no split 'nowhere'"):
        load(source="text_stream", id="some/set", split="nowhere")
    with pytest.raises(DataError, match="some/other"):
        load(source="text_stream", id="some/other")


def test_long_documents_are_tokenised_a_few_at_a_time(small_batches):
    few = Counting()
    documents = ["many words " * 1000] * 9
    assert same(open_stream(documents, few), documents) and few.batches == 3

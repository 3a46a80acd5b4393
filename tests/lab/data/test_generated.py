"""Generators in chunks: the same samples in any process, kept on disk, taken up again."""

import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from lab.data.helpers import failure
from wellcond.lab.data import GeneratorOptions, TensorDataset, fingerprint, generated, load_data, resolve_config
from wellcond.lab.data.base import progress_to
from wellcond.lab.data.generated import GENERATORS


class CountingOptions(GeneratorOptions):
    class_names = ("even", "odd")
    vocabulary_size = 50
    chunk = 10
    width: int = 6
    record: str | None = None
    fail_from: int | None = None


class DistinctOptions(CountingOptions):
    @property
    def distinct(self):
        return True


def counting(count, options, generator):
    """Random tokens; notes each call in a file, and is interrupted after a number of them."""
    if options.record is not None:
        with open(options.record, "a") as file:
            file.write("called\n")
        if options.fail_from is not None and len(Path(options.record).read_text().split()) > options.fail_from:
            raise KeyboardInterrupt
    tokens = torch.randint(-1, 50, (count, options.width), generator=generator).to(torch.int8)
    return TensorDataset("tokens", tokens, tokens[:, 0].long().clamp(min=0) % 2)


@pytest.fixture(autouse=True)
def generators(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(GENERATORS, "counting", (CountingOptions, counting))
    monkeypatch.setitem(GENERATORS, "different", (DistinctOptions, counting))


def load(generator="counting", *, told=None, num_train=45, num_evaluation=20, **fields):
    sizes = {"num_train": num_train, "num_evaluation": num_evaluation}
    with progress_to(told):
        return load_data(resolve_config({"source": "generated", "generator": generator} | sizes | fields))


def chunk_files(root):
    return sorted(path for path in (root / "cache").rglob("samples.pt"))


@pytest.mark.parametrize("generator", ["counting", "different", "listops"])
def test_a_longer_split_begins_with_the_shorter_one(generator):
    options = {"max_depth": 4, "max_args": 4, "min_length": 3, "max_length": 30} if generator == "listops" else {}
    short = load(generator, options=options, num_test=15)
    long = load(generator, options=options, num_train=1200, num_evaluation=33, num_test=16)
    for name in ("train", "evaluation"):
        a, b = getattr(short, name), getattr(long, name)
        assert a.inputs.equal(b.inputs[: len(a)]) and a.labels.equal(b.labels[: len(a)])
    assert len(short.others["test"]) == 15 and short.others["test"].inputs.equal(long.others["test"].inputs[:15])
    assert "test" not in load(generator, options=options).others
    assert "15 test examples" in short.description


def test_the_streams_of_seeds_splits_options_and_versions_differ(monkeypatch):
    first = load(num_test=20)
    others = [load(seed=1).train, first.evaluation, first.others["test"], load(options={"fail_from": 99}).train]
    monkeypatch.setattr(generated, "VERSION", 2)
    others.append(load().train)
    for other in others:
        assert not other.inputs[:10].equal(first.train.inputs[:10])
        assert not other.inputs[:10].equal(first.train.inputs[10:20])
    chunks = first.train.inputs[:40].reshape(4, 10, -1)
    assert not any(chunks[0].equal(chunk) for chunk in chunks[1:])


def test_what_is_on_disk_is_read_and_what_is_missing_made_again(tmp_path):
    options = {"record": str(tmp_path / "record")}
    first = load(options=options)
    files = chunk_files(tmp_path)
    assert len(files) == 5 + 2
    before = {path: path.stat().st_mtime_ns for path in files}
    shutil.rmtree(files[1].parent)
    again = load(options=options)
    assert fingerprint(again) == fingerprint(first)
    assert [path for path in files if path.stat().st_mtime_ns != before[path]] == [files[1]]
    assert len(Path(options["record"]).read_text().split()) == 7 + 1


def test_an_interrupted_split_resumes_where_it_was(tmp_path):
    record = tmp_path / "record"
    options = {"record": str(record), "fail_from": 3}
    with pytest.raises(KeyboardInterrupt):
        load(options=options)
    assert len(chunk_files(tmp_path)) == 3
    record.unlink()
    with pytest.raises(KeyboardInterrupt):
        load(options=options)
    assert len(chunk_files(tmp_path)) == 3 + 3  # the split is now complete, one chunk of the other is there
    record.unlink()
    load(options=options)
    assert len(record.read_text().split()) == 1


def test_distinct_samples_differ_within_and_between_splits():
    bundle = load("different", options={"width": 2}, num_train=1000, num_evaluation=100, num_test=100)
    rows = [
        tuple(row)
        for split in (bundle.train, bundle.evaluation, bundle.others["test"])
        for row in split.inputs.tolist()
    ]
    assert len(set(rows)) == len(rows) == 1200
    for row, label in zip(bundle.train.inputs.tolist(), bundle.train.labels.tolist(), strict=True):
        assert label == max(row[0], 0) % 2


def test_too_small_a_space_is_an_error():
    message = failure(source="generated", generator="different", options={"width": 1}, num_train=45, num_evaluation=1)
    assert "different, train split: there are too few different samples" in message and "45 that differ" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"generator": "noise"},
            "1 validation error for .*\\ngenerator\\n.*unknown data generator: got 'noise', expected .*'listops', 'pat",
        ),
        ({"generator": "listops", "options": {"max_arg": 3}}, "options.max_arg\n.*unknown field"),
        ({"generator": "listops", "num_train": 0}, "num_train\n.*greater than or equal to 1"),
    ],
)
def test_settings_are_checked(fields, message):
    with pytest.raises(ValidationError, match=message):
        resolve_config({"source": "generated", **fields})


def test_recipes_get_what_they_got():
    """Computed before Pathfinder's published values became constants."""
    fields = {"image_size": 12, "contour_length": 2, "num_distractors": 0}
    images = load("pathfinder", options=fields, num_train=64, num_evaluation=32)
    fields = {"min_length": 8, "max_length": 128, "max_depth": 5, "max_args": 5}
    expressions = load("listops", options=fields, num_train=64, num_evaluation=32)
    found = [fingerprint(data)["train"]["sha256"][:16] for data in (images, expressions)]
    assert found == ["755f63dfdf1cbfbb", "3b74efc67f9e82bb"]

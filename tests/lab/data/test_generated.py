"""Generators in chunks: the same samples in any process, kept on disk, taken up again."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from lab.data.chunk_generators import CountingOptions, DistinctOptions, counting
from lab.data.helpers import failure
from patience import PATIENCE, wait_until
from wellcond.errors import DataError, WellcondError
from wellcond.lab.data import fingerprint, generated, load_data, resolve_config
from wellcond.lab.data.base import progress_to
from wellcond.lab.data.generated import GENERATORS

pytestmark = pytest.mark.processes


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
    others = [load(seed=1).train, first.evaluation, first.others["test"], load(options={"hold_from": 99}).train]
    monkeypatch.setattr(generated, "VERSION", 2)
    others.append(load().train)
    for other in others:
        assert not other.inputs[:10].equal(first.train.inputs[:10])
        assert not other.inputs[:10].equal(first.train.inputs[10:20])
    chunks = first.train.inputs[:40].reshape(4, 10, -1)
    assert not any(chunks[0].equal(chunk) for chunk in chunks[1:])


def test_tokens_are_small_in_memory_and_whole_in_an_example():
    bundle = load()
    assert bundle.train.inputs.dtype == torch.int8 and bundle.train[0]["tokens"].dtype == torch.int64
    assert int(bundle.train.inputs.min()) == -1 and bundle.vocabulary_size == 50


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


def test_progress_is_told():
    told = []
    load(told=lambda *event: told.append(event))
    told = [event for event in told if "split" in event[0]]
    assert told[0] == ("making counting, train split, chunks", 1, 5) and told[4][1:] == (5, 5)
    assert told[-1] == ("making counting, evaluation split, chunks", 2, 2)
    told = []
    load(told=lambda *event: told.append(event))
    assert not told


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written(?s:.*)set WELLCOND_CACHE(?s:.*)Not a directory"):
        load()


SCRIPT = """
import signal
import sys
from lab.data.chunk_generators import CountingOptions, counting
from wellcond.lab.data import load_data, register_generator, resolve_config
from wellcond.lab.data.base import progress_to
register_generator("counting", CountingOptions)(counting)
def show(*event):
    print(*event, flush=True)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    options = {"record": sys.argv[1], "hold_from": int(sys.argv[2])}
    data = {"source": "generated", "generator": "counting", "num_train": 200, "num_evaluation": 1, "options": options}
    with progress_to(show):
        load_data(resolve_config(data))
"""


class Maker:
    """A process that makes 20 chunks, of which those beyond `hold_from` are not made before the hold ends."""

    def __init__(self, tmp_path, hold_from):
        self.script = tmp_path / "script.py"
        self.script.write_text(SCRIPT)
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        self.output, self.errors = (tempfile.TemporaryFile("w+", dir=tmp_path) for _ in range(2))
        self.process = subprocess.Popen(
            [sys.executable, self.script, tmp_path / "record", str(hold_from)],
            stdout=self.output,
            stderr=self.errors,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )

    def told(self):
        self.output.seek(0)
        return self.output.read()

    def wait_until_it_tells(self, text):
        wait_until(lambda: text in self.told(), process=self.process)

    def end(self):
        """Exit code and errors, once it is gone."""
        code = self.process.wait(PATIENCE)
        self.errors.seek(0)
        return code, self.errors.read()


@pytest.fixture
def make(tmp_path):
    """Starts makers; none outlives the test."""
    made = []
    yield lambda hold_from: made.append(Maker(tmp_path, hold_from)) or made[-1]
    for maker in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(maker.process.pid, signal.SIGKILL)
        maker.process.wait()
        maker.output.close()
        maker.errors.close()


def end_hold(tmp_path):
    (tmp_path / "record.open").touch()


def test_of_processes_that_start_at_once_one_makes_the_data_and_the_other_waits(make, tmp_path):
    makers = [make(0) for _ in range(2)]
    wait_until(lambda: all("here or in another process" in maker.told() for maker in makers))
    end_hold(tmp_path)
    assert [maker.end() for maker in makers] == [(0, "")] * 2
    assert len((tmp_path / "record").read_text().split()) == 20 + 1


@pytest.mark.slow
def test_interrupt_keeps_what_is_done(make, tmp_path):
    maker = make(3)
    maker.wait_until_it_tells("chunks 3 20")
    os.killpg(maker.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    code, errors = maker.end()
    assert code != 0 and errors.rstrip().endswith("KeyboardInterrupt")
    assert len(chunk_files(tmp_path)) == 3


def test_errors_arrive_whole(tmp_path):
    with pytest.raises(WellcondError, match="no\n  expected: a"):
        load(options={"record": str(tmp_path / "record"), "refuse_from": 3})


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


def test_the_global_seed_is_left_alone():
    before = torch.get_rng_state()
    load()
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"generator": "noise"},
            "1 validation error for .*\\ngenerator\\n.*unknown data generator: got 'noise', expected .*'listops', 'pat",
        ),
        ({"generator": "listops", "options": {"max_arg": 3}}, "options.max_arg\n.*unknown field"),
        ({"generator": "listops", "options": {"max_args": 1}}, "max_args\n.*greater than or equal to 2"),
        ({"generator": "listops", "num_train": 0}, "num_train\n.*greater than or equal to 1"),
    ],
)
def test_settings_are_checked(fields, message):
    with pytest.raises(ValidationError, match=message):
        resolve_config({"source": "generated", **fields})


def test_settings_record_the_defaults():
    config = resolve_config({"source": "generated", "generator": "listops", "options": {"max_depth": 4}})
    assert config.model_dump()["options"] == {"max_depth": 4, "max_args": 10, "min_length": 500, "max_length": 2000}


def test_recipes_get_what_they_got():
    """Computed before Pathfinder's published values became constants."""
    fields = {"image_size": 12, "contour_length": 2, "num_distractors": 0}
    images = load("pathfinder", options=fields, num_train=64, num_evaluation=32)
    fields = {"min_length": 8, "max_length": 128, "max_depth": 5, "max_args": 5}
    expressions = load("listops", options=fields, num_train=64, num_evaluation=32)
    found = [fingerprint(data)["train"]["sha256"][:16] for data in (images, expressions)]
    assert found == ["755f63dfdf1cbfbb", "3b74efc67f9e82bb"]

"""Mistakes of users, each once: one message with the value and the way out, exit code 2, and no traceback."""

import errno
import faulthandler
import json
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import wellcond as wc
from lab.report.fake_runs import usual_methods, write_comparison
from lab.small import CHANGES_IN_WORDS
from wellcond.cli.main import main
from wellcond.files import read_regular
from wellcond.lab.models.build import build_model

VIT = "timm:test_vit"
HANG = 300
"""Seconds after which a command that gives no answer is ended; far more than any of them takes."""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected a config.json of transformers"),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', "n_layer"),
    ],
)
def test_damaged_configurations(run, tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    told, _ = run("inspect", f"hf:{tmp_path}")
    assert words in told and str(tmp_path) in told


def test_a_model_of_ones_own_that_raises(run, tmp_path):
    (tmp_path / "mine.py").write_text("def build(width=8):\n    return 1 / (width - 8)\n")
    assert "ZeroDivisionError" in run("inspect", f"{tmp_path}/mine.py:build")[0]
    (tmp_path / "broken.py").write_text("def build(:\n")
    assert "SyntaxError" in run("inspect", f"{tmp_path}/broken.py:build")[0]


def test_outputs_that_cannot_be_written(run, tmp_path):
    # /proc takes no files, even from root, whom permissions do not bind.
    assert "/proc/o.safetensors cannot be written" in run("init", VIT, "-o", "/proc/o.safetensors")[0]
    assert "/proc/o.json cannot be written" in run("measure", VIT, "-o", "/proc/o.json")[0]
    (tmp_path / "file").write_text("")
    assert "cannot be written: Not a directory" in run("init", VIT, "-o", tmp_path / "file" / "o.safetensors")[0]
    assert "could not be written" in run("train", "digits", "-o", tmp_path / "file" / "run")[0]


def test_a_disk_that_is_full_at_the_end(run, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(os, "replace", full)
    told, _ = run("init", VIT, "--method", "gaussian", "-o", tmp_path / "o.safetensors")
    assert "could not be written: No space left on device" in told and not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written(run, tmp_path):
    write_comparison(tmp_path / "runs", usual_methods())
    (tmp_path / "runs" / "report").write_text("a file where the folder of the report should be")
    told, _ = run("report", tmp_path / "runs", "--no-pictures")
    assert f"{tmp_path / 'runs' / 'report'}" in told and "give a path that can be read and written" in told


@pytest.mark.parametrize(
    "damage",
    [
        {"method": 3},
        {"sites": ["elsewhere"]},
        {"target": None},
        {"more": 1},
    ],
    ids=str,
)
def test_fold_with_a_damaged_marker(run, tmp_path, damage):
    state = wc.condition_(build_model(VIT), "balanced", target=1.5).state_dict()
    marker = "wellcond_conditioning"
    settings = json.loads(bytes(state[marker].byte().tolist())) | damage
    state[marker] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    save_file(state, tmp_path / "damaged.safetensors")
    told, _ = run("fold", VIT, "--weights", tmp_path / "damaged.safetensors", "-o", tmp_path / "o.safetensors")
    assert isinstance(told, str) and not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.weight_decay=.nan", "optimizer.weight_decay: Input should be a finite number"),
        ("tracking.heads=[1000]", "tracking.heads: expected numbers from 0 to"),
        ("training.length={steps: 1000000000000}", "tracking.weights_every: expected at most"),
        ("model.weights=" + "x" * 300, "File name too long"),
    ],
)
def test_recipes_that_cannot_be_run(run, tmp_path, change, words):
    told, _ = run("train", "digits", *CHANGES_IN_WORDS, "--set", change, "-o", tmp_path / "run", "--cpu", "-q")
    assert words in told


def test_too_many_samples_and_tokens(run):
    assert run("measure", VIT, "--samples", 100000000)[0] == 2
    small = ("n_layer=1", "n_embd=12", "n_head=2", "vocab_size=40", "n_positions=1000000000")
    told, _ = run("measure", "hf:gpt2", *[part for a in small for part in ("--model-arg", a)])
    assert "hf:gpt2 cannot be built" in told and "take a smaller model" in told


@pytest.fixture
def little_memory():
    """No more than 8 GB beyond what the process has: filling all of the memory takes minutes."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 8 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="this system does not tell how large a process is")
def test_a_model_that_does_not_fit_into_memory_is_not_begun(run, little_memory, tmp_path):
    train = ["train", "digits", *CHANGES_IN_WORDS, "--set", "model.arguments.embed_dim=100000000"]
    for arguments in (["inspect", VIT, "--model-arg", "embed_dim=1000000000"], [*train, "-o", tmp_path / "run"]):
        assert "take a smaller model" in run(*arguments)[0]


@pytest.fixture
def guarded():
    """Ends the whole process, with a traceback of where it waits, if a test gives no answer."""
    faulthandler.dump_traceback_later(HANG, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_pipe_among_the_images(run, guarded, tmp_path):
    """Nobody writes into it, so a reader would wait for ever."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for number in range(20):
                Image.new("L", (8, 8), number).save(place / f"{number}.png")
    os.mkfifo(tmp_path / "images" / "train" / "cat" / "pipe.png")
    told, _ = run("train", "digits", *CHANGES_IN_WORDS, "--data", tmp_path / "images", "-o", tmp_path / "run", "--cpu")
    assert "pipe.png" in told and "not a regular file" in told


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    os.symlink(tmp_path / "file", tmp_path / "link")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"content"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(OSError):
            read_regular(tmp_path / name)


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err


def test_debug_shows_the_traceback_of_a_mistake(monkeypatch, capsys):
    monkeypatch.setenv("WELLCOND_DEBUG", "")
    arguments = ["inspect", VIT, "--model-arg", "nope=3"]
    code, plain = call(monkeypatch, capsys, *arguments)
    assert code == 2 and plain.startswith("error: ") and "Traceback" not in plain
    code, told = call(monkeypatch, capsys, "--debug", *arguments)
    assert code == 2 and "Traceback" in told and "create_model" in told and told.endswith(plain)
    monkeypatch.setenv("WELLCOND_DEBUG", "1")
    assert "Traceback" in call(monkeypatch, capsys, *arguments)[1]


def test_a_bug_is_one_message_that_asks_for_a_report(monkeypatch, capsys, tmp_path):
    def broken(*arguments, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setenv("WELLCOND_DEBUG", "")
    monkeypatch.setattr("wellcond.cli.report.print_report", broken)
    code, told = call(monkeypatch, capsys, "report", tmp_path)
    assert code == 1 and "wellcond report failed unexpectedly: ZeroDivisionError: a bug" in told
    assert "please report" in told and "wellcond --debug report" in told and "Traceback" not in told
    code, told = call(monkeypatch, capsys, "--debug", "report", tmp_path)
    assert code == 1 and "Traceback" in told and "in broken" in told


def test_a_run_that_ends_with_an_unknown_error(monkeypatch, capsys, tmp_path):
    def broken(*arguments, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setenv("WELLCOND_DEBUG", "")
    monkeypatch.setattr("wellcond.lab.train.run.fingerprint", broken)
    arguments = ["train", "digits", *CHANGES_IN_WORDS, "-o", tmp_path / "run", "--cpu", "-q"]
    monkeypatch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    told = "".join(capsys.readouterr())
    assert end.value.code == 2 and "ZeroDivisionError: a bug; wellcond --debug shows where" in told
    assert "Traceback" not in told and json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"

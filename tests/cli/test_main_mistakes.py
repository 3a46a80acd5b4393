"""Mistakes of users, each once: one message with the value and the way out, exit code 2, and no traceback."""

import errno
import faulthandler
import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import wellcond as wc
from lab.report.fake_runs import usual_methods, write_comparison
from lab.small import CHANGES_IN_WORDS, command
from wellcond.cli.main import main
from wellcond.files import read_regular
from wellcond.lab.models.build import build_model

VIT = "timm:test_vit"
HANG = 300
"""Seconds after which a command that gives no answer is ended; far more than any of them takes."""


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("nope=3", "unexpected keyword argument 'nope'"),
        ("depth=-1", "number of steps must be non-negative"),
        ("depth=1000000000", "depth: expected at most 10000, found 1000000000"),
        ("depth=NaN", "depth: expected at most 10000, found nan"),
        ("embed_dim=abc", "'embed_dim': 'abc'"),
        ("num_heads=7", "'num_heads': 7"),
        ("embed_dim=-64", "'embed_dim': -64"),
        ("mlp_ratio=1e300", "'mlp_ratio': 1e+300"),
    ],
)
def test_arguments_that_a_library_refuses(run, argument, words):
    told, _ = run("inspect", VIT, "--model-arg", argument)
    assert words in told and VIT in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "a mapping of settings; found '[]'"),
        ("{", "expected a config.json of transformers"),
        ('{"model_type": "gpt2", "n_layer": 1, "n_head": "abc"}', "expected int, got str"),
        ('{"model_type": "gpt2", "n_layer": 1, "n_head": 7}', "must be divisible by num_heads"),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', "n_layer: expected at most 10000"),
        ('{"model_type": "nonsense"}', "nonsense"),
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


def test_weight_selection_needs_a_teacher(run, tmp_path):
    told, _ = run("init", VIT, "--method", "weight_selection", "-o", tmp_path / "o.safetensors")
    assert "needs the option teacher=" in told


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
        {"method": "nonsense"},
        {"sites": 5},
        {"sites": [1]},
        {"sites": ["elsewhere"]},
        {"projections": ["q"]},
        {"target": "abc"},
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
        ("optimizer.lr=1e300", "optimizer.lr: expected a number of at most 9223372036854775807"),
        ("optimizer.lr=1e30", "optimizer.lr: expected a number of at most 9223372036854775807"),
        ("optimizer.weight_decay=.nan", "optimizer.weight_decay: Input should be a finite number"),
        ("model.arguments.depth=-1", "'depth': -1"),
        ("model.arguments.embed_dim=abc", "'embed_dim': 'abc'"),
        ("model.arguments.nope=1", "nope"),
        ("training.threads=1000000000", "training.threads"),
        ("training.workers=1000000000", "training.workers"),
        ("tracking.heads=[1000]", "tracking.heads: expected numbers from 0 to"),
        ("tracking.heads=[]", "tracking.heads"),
        ("training.length={steps: 1000000000000}", "tracking.weights_every: expected at most"),
        ("data.source=[]", "unknown data source"),
        ("task.name={}", "unknown task"),
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


@pytest.mark.parametrize("arguments", [
    ["inspect", VIT, "--model-arg", "embed_dim=1000000000"],
    pytest.param(["train", "digits", *CHANGES_IN_WORDS, "--set", "model.arguments.embed_dim=100000000"],
                 marks=pytest.mark.slow),
], ids=["inspect", "train"])  # fmt: skip
def test_a_model_that_does_not_fit_into_memory(arguments, tmp_path):
    """A process of its own: such a model must not be begun, since filling the memory takes minutes."""
    folder = ["-o", tmp_path / "run"] if arguments[0] == "train" else []
    done = subprocess.run(command(*arguments, *folder), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and "take a smaller model" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


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


def test_checkpoints_are_not_left_half_written(run, tmp_path):
    target = tmp_path / "o.safetensors"
    assert run("init", VIT, "--method", "gaussian", "-o", target)[0] == 0
    assert load_file(target) and [path.name for path in tmp_path.iterdir()] == [target.name]

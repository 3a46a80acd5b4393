"""Booleans where numbers are expected, and values that are too large or leave nothing: errors, and no folder."""

import json

import pytest

QUICK = ["training.length={steps: 1}", "tracking={weights_every: null, jacobian_points: 0}"]


def sets(*changes):
    return [part for change in (*QUICK, *changes) for part in ("--set", change)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer.lr", "on"),
        ("optimizer.betas", "[0.9, true]"),
        ("training.batch_size", "yes"),
        ("training.clip_norm", "off"),
        ("seeds", "[true]"),
        ("model.layer_scale", "true"),
        ("data.held_out", "on"),
        ("training.length", "{epochs: on}"),
        ("proxy.width", "on"),
        ("task.image_size", "no"),
        ("augmentation.flip", "on"),
        ("tracking.heads", "[on]"),
        ("evaluation.samples", "yes"),
        ("schedule.rise", "on"),
    ],
)
def test_a_boolean_is_no_number(run, tmp_path, field, value):
    message, _ = run("train", "digits", "-o", tmp_path / "run", *sets(f"{field}={value}"))
    assert f"{field}" in message and "expected a number; YAML reads on" in message
    assert not (tmp_path / "run").exists()


def test_a_boolean_is_no_number_in_methods_and_files(run, tmp_path):
    for method in ("identity(lam=on)", "calibrated(logits=yes)", "tokens(positions=on)"):
        message, _ = run("train", "digits", "--method", method, "-o", tmp_path / "run", *sets())
        assert "True" in message and "expected" in message
    message, _ = run("train", "digits", "--method", "default+set(optimizer.lr=on)", "-o", tmp_path / "run", *sets())
    assert "set: optimizer.lr: expected a number" in message
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: tiny/digits\nname: mine\noptimizer: {lr: on}\ntuned: null\n")
    message, _ = run("compare", "--recipe", mine, "-o", tmp_path / "run")
    assert "optimizer.lr: expected a number" in message and not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["precision.mixed=no", "precision.mixed=off", "precision={mixed: no, compile: off}"])
def test_off_is_off(run, tmp_path, change):
    assert run("train", "digits", "-o", tmp_path / "run", "-q", *sets(change))[0] == 0
    config = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert config["precision"] == {"mixed": "no", "compile": None}


def test_whole_numbers_are_numbers_and_booleans_stay_where_they_belong(run, tmp_path):
    changes = ["optimizer.weight_decay=0", "model.arguments.qk_norm=yes", "schedule.cycle_momentum=no"]
    assert run("train", "digits", "-o", tmp_path / "run", "-q", *sets(*changes))[0] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.held_out=0.9999"], "nothing is left to train on"),
        (["data={source: files, train: []}"], "data.train: expected a path or pattern, or a list of at least one"),
        (["data={source: files, train: ''}"], "data.train: expected a path"),
        (["data={source: files, train: [a.csv, '']}"], "data.train: expected a path"),
        (["data={source: files, train: a.csv, evaluation: []}"], "data.evaluation: expected a path"),
        (["model.arguments.embed_dim=2147483648"], "take a smaller model"),
        (["model.arguments.img_size=1000000"], "take a smaller model"),
        (["methods=['identity(lam=1e39)']"], "lam: expected at most 3.4e+38"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_what_cannot_be_is_said_and_leaves_no_folder(run, tmp_path, verb, changes, words):
    command = (
        ["train", "digits"] if verb == "train" else ["compare", "--recipe", "digits", "--jobs", "1", "--seeds", "1"]
    )
    message, _ = run(*command, "-o", tmp_path / "new/run", *sets(*changes))
    assert isinstance(message, str) and words in message and "Traceback" not in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "method", ["identity(lam=1e39)", "identity(lam={q: -1e300})", "gaussian(std=1e39)", "calibrated(words=1e300)"]
)
def test_options_of_methods_fit_into_weights(run, tmp_path, method):
    message, _ = run("train", "digits", "--method", method, "-o", tmp_path / "run", *sets())
    assert "expected at most 3.4e+38, the largest number of float32" in message and not (tmp_path / "run").exists()

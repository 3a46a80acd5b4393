"""Texts of files reach a terminal as text: no control character of a title, label, path or record is sent to it."""

import json
import re
import sys
import warnings

import pytest

from lab.report.fake_runs import FakeMethod, write_comparison
from lab.small import SETTINGS
from wellcond.cli.main import main

HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b8m\x7f\u202etitle\b\r\x00"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def printed(monkeypatch, capfd):
    """The exit code of a command, and what it sends to both streams."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, "".join(capfd.readouterr())

    return call


def assert_shown(text):
    assert re.search(r"evil(<U\+001B>|\\x1b|\\u001b|\ufffd)", text)
    assert not CONTROL.search(text), ascii(CONTROL.search(text)[0])


def test_a_report_of_hostile_records(printed, tmp_path):
    methods = [FakeMethod(label, {0: 0.9}, slug=label[:3]) for label in ("default", f"other{HOSTILE}")]
    folder = write_comparison(tmp_path / "runs", methods, title=HOSTILE, points=2, layers=1, heads=1)
    assert_shown(printed("report", folder, "--no-pictures")[1])
    assert not CONTROL.search((folder / "report" / "report.md").read_text("utf-8"))


def recipe(folder, **changes):
    settings = {"extends": "tiny/digits", "name": "mine", "scale": "tiny", "title": HOSTILE, "description": HOSTILE}
    (folder / "mine.yaml").write_text(json.dumps(settings | changes))
    return folder / "mine.yaml"


@pytest.mark.parametrize("json_output", [False, True], ids=["text", "json"])
def test_a_recipe_that_runs(printed, tmp_path, json_output):
    small = [part for change in SETTINGS if not change.startswith("methods") for part in ("--set", change)]
    method = {"init": "default", "label": HOSTILE}
    file = recipe(tmp_path, methods=[method], baseline=HOSTILE, tuned=None)
    options = ["--seeds", 1, "--jobs", 1, "--cpu", "--no-report", *(["--json"] if json_output else [])]
    code, told = printed("compare", "--recipe", file, "-o", tmp_path / "runs", *options, *small)
    assert code == 0
    assert_shown(told)


def test_names_of_a_models_layers(printed, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        f"    return torch.nn.ModuleDict({{{HOSTILE.replace('.', '')!r}: torch.nn.MultiheadAttention(8, 2)}})\n"
    )
    for options in ((), ("--json",)):
        assert_shown(printed("inspect", f"{tmp_path}/mine.py:build", *options)[1])


def test_arguments_with_control_characters_are_refused(printed, tmp_path):
    for arguments in (
        ("report", tmp_path / "evil\x1b[2J"),
        ("train", "evil\x1b[2J"),
        ("evil\x1b[2J",),
        ("--evil\x9b2J",),
    ):
        code, told = printed(*arguments)
        assert code == 2 and told.startswith("error: expected arguments without control") and not CONTROL.search(told)


def test_a_warning_shows_what_it_quotes(run, monkeypatch, tmp_path):
    """Warnings are printed by Python, not by the commands."""
    (tmp_path / "mine.py").write_text(
        "import torch, warnings\n"
        "def build():\n"
        f"    warnings.warn({HOSTILE!r})\n"
        "    return torch.nn.ModuleDict({'a': torch.nn.MultiheadAttention(8, 2)})\n"
    )
    seen = []
    monkeypatch.setattr(warnings, "showwarning", lambda *given: seen.append(warnings.formatwarning(*given[:4])))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run("inspect", f"{tmp_path}/mine.py:build")
    [text] = [text for text in seen if "evil" in text]
    assert_shown(text)

"""What a user reads after a mistake: the golden messages of the product, whole, in `messages.txt`.

Elsewhere tests ask for the type and the fields of an error. To write what the commands say now, set WELLCOND_RENEW=1
and run this file; read the difference before you commit it.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("messages.txt")
PROGRAM = """
import contextlib, io, json, sys
from wellcond.cli.main import main
printed = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["wellcond", *arguments]
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try: main()
        except SystemExit as end: code = end.code
    loaded = [name for name in ("torch", "timm", "transformers", "numpy", "scipy") if name in sys.modules]
    printed.append((code, loaded, err.getvalue()))
print(json.dumps(printed))
"""


def golden():
    """Every command and its message, by part: what is said before torch is loaded, and what after."""
    parts = [part.split("\n$ ")[1:] for part in GOLDEN.read_text("utf-8").split("\n# ")]
    return [dict(block.rstrip("\n").split("\n", 1) for block in blocks) for blocks in parts[1:]]


EARLY, LATE = golden()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def early(place):
    """One process for all shows all the more that none loads torch."""
    calls = json.dumps([shlex.split(command)[1:] for command in EARLY])
    done = subprocess.run([sys.executable, "-c", PROGRAM, calls], cwd=place, capture_output=True, text=True, check=True)
    return dict(zip(EARLY, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", EARLY)
def test_mistakes_are_reported_before_torch_is_loaded(early, command):
    code, loaded, printed = early[command]
    assert code == 2 and not {"torch", "timm", "transformers"} & set(loaded)
    compare(command, printed)


@pytest.mark.parametrize("command", LATE)
def test_mistakes_are_reported_in_one_message(place, monkeypatch, capsys, command):
    from wellcond.cli.main import main

    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as end:
        main()
    out, printed = capsys.readouterr()
    assert end.value.code == 2 and not out and not list(place.iterdir())
    compare(command, printed)


def compare(command, printed):
    # Lists that grow with every recipe and method, or with another library, are no part of the message.
    printed = re.sub(r"one of ('[^']*', ){5,}'[^']*'", "one of ...", printed)
    printed = re.sub(r"(Similar( names)?|Classes in the model): .*", r"\1: ...", printed)
    found, expected = printed.rstrip("\n"), (EARLY | LATE)[command]
    if "WELLCOND_RENEW" in os.environ:
        text = GOLDEN.read_text("utf-8")
        GOLDEN.write_text(text.replace(f"$ {command}\n{expected}\n", f"$ {command}\n{found}\n"), "utf-8")
    else:
        assert found == expected


def test_there_are_forty_or_so():
    assert 35 <= len(EARLY) + len(LATE) <= 50

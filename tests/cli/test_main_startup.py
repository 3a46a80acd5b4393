"""What a command loads before it knows that it will be needed: torch takes seconds and 600 MB."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import wellcond
from wellcond.cli.measure import CONVENTIONS
from wellcond.jacobian.problem import Convention
from wellcond.lab.report.glue import TITLES
from wellcond.lab.tasks.glue import NAMES

PROGRAM = """
import contextlib, io, json, sys
from wellcond.cli.main import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["wellcond", *arguments]
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try: main()
        except SystemExit as end: code = end.code
    loaded = [name for name in ("torch", "timm", "transformers", "numpy", "scipy") if name in sys.modules]
    told.append((code, loaded, err.getvalue()))
print(json.dumps(told))
"""
COMMANDS = ("inspect", "doctor", "init", "fold", "measure", "selftest", "train", "compare", "demo", "report", "recipes",
            "glue", "reproduce", "claims")  # fmt: skip


def told_by(*calls):
    """Exit code, large packages that are loaded by then, and standard error of every call, in one fresh process."""
    given = json.dumps([list(map(str, call)) for call in calls])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_help_loads_no_large_package():
    for code, loaded, _ in told_by(["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)):
        assert code == 0 and loaded == []


VIT = "timm:test_vit"
RANDOM = [VIT, "--data", "random"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (["inspect", VIT, "--weights", "none.pt"], "does not exist"),
        (["reproduce", "C-T1", "--records", __file__], "Invalid value for '--records'"),
        (["inspect", VIT, "--model-arg", "depth"], "expected key=value"),
        (["inspect", VIT, "--model-arg", "pretrained=true"], "which loads files or code"),
        (["inspect", "vit"], "unknown MODEL"),
        (["inspect", "none.py:build"], "no such file"),
        (["inspect", "--zoo", "fairseq"], "expected one of 'timm', 'hf'"),
        (["inspect", VIT, "--seed", "-1"], "Usage"),
        (["init", VIT, "-o", "out.pt"], "expected an output named *.safetensors"),
        (["init", VIT, "-o", "none/out.safetensors"], "cannot be written: No such file"),
        (["init", VIT, "-o", "/proc/out.safetensors"], "cannot be written"),
        (["fold", VIT, "-o", "out.safetensors", "--weights", "none.pt"], "does not exist"),
        (["measure", *RANDOM, "--convention", "tall"], "expected one of 'wide', 'stack'"),
        (["measure", *RANDOM, "--samples", "0"], "--samples"),
        (["measure", *RANDOM, "--layers", "first"], "expected 'all' or numbers"),
        (["measure", *RANDOM, "--tokens", "0"], "--tokens"),
        (["measure", *RANDOM, "-o", "/proc/out.json"], "cannot be written"),
        (["measure", VIT, "--data", "nowhere"], "which does not exist"),
        (["measure", VIT, "--data", "nowhere.npy"], "which does not exist"),
        (["train", "nowhere"], "unknown recipe: got 'nowhere'"),
        (["train", "nowhere.yaml"], "No such file"),
        (["train", "digits", "--set", "optimizer"], "expected path.to.field=value"),
        (["train", "digits", "--set", "optimizer.lr=["], "is not YAML"),
        (["train", "digits", "--scale", "paper"], "exists at scale tiny, not 'paper'; correct --scale"),
        (["train", "digits", "--data", "nowhere.csv"], "--data: no such file or folder"),
        (["compare", "--recipe", "vit", "--data", "/nowhere"], "--data: no such file or folder"),
        (["compare", "--recipe", "digits", "--seeds", "1000000000"], "1 to 10000 seeds"),
        (["compare", "--recipe", "digits", "--jobs", "none"], "--jobs: expected auto or a number"),
        (["compare", "--recipe", "digits", "--engine", "slurm"], "unknown engine"),
        (["demo", "--seeds", "none"], "--seeds: expected a number"),
        (["report", "nowhere"], "does not exist"),
        (["glue", "nowhere"], "does not exist"),
        (["glue", ".", "--tasks", "none"], "unknown GLUE task"),
        (["reproduce", "X-1"], "unknown table or figure"),
        (["reproduce", "C-T1", "--scale", "huge"], "unknown scale"),
        (["reproduce", "C-T1", "--records", "nowhere"], "does not exist"),
        (["claims", "nowhere"], "does not exist"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_mistakes_are_told_before_torch_is_loaded(mistakes, call, words):
    code, loaded, told = mistakes(call)
    assert code == 2 and words in told and not {"torch", "timm", "transformers"} & set(loaded), told


@pytest.fixture(scope="module")
def mistakes():
    """What every call of the test above tells; one process for all shows all the more that none loads torch."""
    mark = next(mark for mark in test_mistakes_are_told_before_torch_is_loaded.pytestmark)
    calls = [call for call, _ in mark.args[1]]
    answers = told_by(*calls)
    return lambda call: answers[calls.index(call)]


def test_choices_are_those_of_the_library():
    assert tuple(TITLES) == NAMES  # of GLUE's tasks
    assert CONVENTIONS == get_args(Convention)


def test_importing_wellcond_loads_nothing_and_gives_everything():
    code = (
        "import sys, wellcond\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(wellcond.__all__) <= set(dir(wellcond))\n"
        "assert wellcond.WellcondError is wellcond.errors.WellcondError and 'torch' not in sys.modules\n"
        "from wellcond import *\n"
        "assert measure is wellcond.measure is wellcond.measurement.measure.measure\n"
        "assert wellcond.linalg.spectrum.spectrum is spectrum\n"
        "try: wellcond.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit('found nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_see_the_names_that_are_given():
    tree = ast.parse(Path(wellcond.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert seen == {f"wellcond.{module}": names for module, names in wellcond._LAZY.items()}

"""What a command loads before it knows that it will be needed: torch takes seconds and 600 MB."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import wellcond
from cli.test_main_messages import PROGRAM
from wellcond.cli.measure import CONVENTIONS
from wellcond.jacobian.problem import Convention
from wellcond.lab.report.glue import TITLES
from wellcond.lab.tasks.glue import NAMES

COMMANDS = ("inspect", "doctor", "init", "fold", "measure", "selftest", "train", "compare", "demo", "report", "recipes",
            "glue", "reproduce", "claims")  # fmt: skip


def test_help_loads_no_large_package():
    calls = json.dumps([["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
    done = subprocess.run([sys.executable, "-c", PROGRAM, calls], capture_output=True, text=True, check=True)
    assert {(code, *loaded) for code, loaded, _ in json.loads(done.stdout)} == {(0,)}


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

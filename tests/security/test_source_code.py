"""The source itself: every reader of files is called so that it cannot run code."""

import ast
import builtins
import functools
from pathlib import Path

import pytest

import wellcond

SRC = Path(wellcond.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
MAY_RUN_CODE = tuple(
    """
    builtins. runpy. code. codeop. imp. zipimport. importlib. ctypes. cffi. pty. subprocess. asyncio.create_subprocess
    os.system os.popen os.exec os.spawn os.posix_spawn os.startfile os.fork
    pickle. _pickle. dill. cloudpickle. marshal. shelve. joblib. copyreg. yaml. numpy.load
    pandas.read_pickle pandas.eval
    torch.load torch.jit. torch.hub. torch.package. torch.utils.cpp_extension. torch.serialization.
    tarfile. zipfile. shutil.unpack_archive PIL.Image.open
    """.split()
)
"""How names begin of what runs code, starts programs, unpickles or unpacks archives."""
HARMLESS = tuple(
    """
    importlib.metadata. importlib.resources. importlib.util.find_spec pickle.UnpicklingError subprocess.DEVNULL
    subprocess.SubprocessError torch.jit.is_tracing torch.serialization.safe_globals yaml.SafeLoader yaml.YAMLError
    yaml.CollectionNode yaml.MappingNode yaml.composer.ComposerError yaml.constructor.ConstructorError yaml.resolver.
    """.split()
)
# Where the source of a library, our own sub-modules, or a file that the user trusts is imported; where tensors and
# arrays are read, without pickles (see below); and where git is asked.
EXCEPTIONS = {
    "importlib.import_module": {
        "__init__.py",
        "arguments.py",
        "attention/families/__init__.py",
        "cli/zoo/walk.py",
        "lab/__init__.py",
        "lab/models/__init__.py",
        "lab/tasks/__init__.py",
        "training/alarms.py",
    },
    "importlib.util.spec_from_file_location": {"lab/data/own.py", "lab/models/build.py", "lab/user_code.py"},
    "importlib.util.module_from_spec": {"lab/data/own.py", "lab/models/build.py", "lab/user_code.py"},
    "subprocess.check_output": {"lab/train/run.py"},
    "torch.load": {"lab/data/generated.py", "lab/models/weights.py"},
    "numpy.load": {"cli/inputs.py"},
}


def names_in(source):
    """Full names of everything that is read from a module or a built-in, under whatever name it was imported."""
    tree, known = ast.parse(source), {name: name for name in dir(builtins)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for found in node.names:
                known[found.asname or found.name.partition(".")[0]] = (
                    found.name if found.asname else found.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {found.asname or found.name: f"{node.module}.{found.name}" for found in node.names}

    def full_name(node):
        if isinstance(node, ast.Name):
            return known.get(node.id) if isinstance(node.ctx, ast.Load) else None
        if isinstance(node, ast.Attribute):
            return (inner := full_name(node.value)) and f"{inner}.{node.attr}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            inner, attribute = full_name(node.args[0]), node.args[1]
            return inner and f"{inner}.{attribute.value if isinstance(attribute, ast.Constant) else '*'}"
        return None

    parts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for node in ast.walk(tree) if node not in parts and (name := full_name(node))}


def may_run_code(name):
    return name in RUNS_CODE or (name.startswith(MAY_RUN_CODE) and not name.startswith(HARMLESS))


@functools.cache
def calls():
    return [
        (path.relative_to(SRC).as_posix(), ast.unparse(node.func), node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
    ]


def keyword(node, name):
    return next((ast.unparse(word.value) for word in node.keywords if word.arg == name), None)


def test_what_may_run_code_is_where_it_is_known_and_still_is():
    found = {}
    for path in FILES:
        for name in filter(may_run_code, names_in(path.read_text("utf-8"))):
            found.setdefault(name, set()).add(path.relative_to(SRC).as_posix())
    assert found == EXCEPTIONS  # also without exceptions for calls that are gone
    assert not [path for path, name, _ in calls() if name.endswith((".extract", ".extractall"))]


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.check_output(['ls'])",
        "import subprocess as sp\nrun = sp.Popen",
        "from subprocess import check_output as ask\nask(['ls'])",
        "import os\nos.execvp('ls', [])",
        "from os import popen\npopen('ls')",
        "import os\ngetattr(os, 'system')('ls')",
        "import subprocess\ngetattr(subprocess, name)('ls')",
        "eval('1')",
        "from pickle import loads\nloads(b'')",
        "import torch\ntorch.load('x.pt')",
        "import yaml\nyaml.load(text)",
        "import numpy as np\nnp.load('x.npy')",
        "from PIL import Image\nImage.open('x')",
    ],
)
def test_the_search_sees(source):
    assert any(map(may_run_code, names_in(source)))


@pytest.mark.parametrize(
    "ending, argument, value",
    [
        ("torch.load", "weights_only", "True"),
        ("np.load", "allow_pickle", "False"),
        ("pil.open", "formats", None),
    ],
)
def test_readers_are_told_to_be_careful(ending, argument, value):
    found = [(path, keyword(node, argument)) for path, name, node in calls() if name == ending]
    assert found
    for path, given in found:
        assert given == value if value else given is not None, path


def test_no_code_of_the_hub_is_trusted():
    for path, name, node in calls():
        if name.endswith((".from_pretrained", ".from_config")) and "Auto" in ast.unparse(node):
            assert keyword(node, "trust_remote_code") == "False", f"{path}: {name}"
        assert keyword(node, "trust_remote_code") in (None, "False"), f"{path}: {name}"

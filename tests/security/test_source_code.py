"""The source itself: every reader of files is called so that it cannot run code."""

import ast
import functools
from pathlib import Path

import pytest

import wellcond

SRC = Path(wellcond.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
FORBIDDEN = {
    "eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.jit.load", "torch.hub.load",
    "joblib.load", "marshal.loads", "shelve.open", "runpy.run_path", "shutil.unpack_archive",
    "zipfile.ZipFile", "pd.read_pickle", "builtins.eval", "Image.open", "PIL.Image.open",
}  # fmt: skip
# Where the source of a library, our own sub-modules, or a file that the user trusts is imported; and git is asked.
EXCEPTIONS = {
    "importlib.import_module": {"__init__.py", "attention/adapters/__init__.py", "zoo/walk.py",
                                "lab/models/__init__.py", "lab/tasks/__init__.py"},
    "importlib.util.spec_from_file_location": {"models.py"},
    "subprocess.run": {"lab/train/run.py"},
    "__import__": set(),
    "tarfile.open": {"lab/cluster.py"},  # folders of runs, between machines of a cluster
}  # fmt: skip


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


def test_nothing_that_runs_code_is_called():
    assert not [(path, name) for path, name, _ in calls() if name in FORBIDDEN]
    extracted = {(path, keyword(node, "filter")) for path, name, node in calls() if ".extract" in name}
    assert extracted <= {("lab/cluster.py", "'data'")}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_what_may_run_code_is_where_it_is_known(name):
    assert {path for path, called, _ in calls() if called == name} <= EXCEPTIONS[name]


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

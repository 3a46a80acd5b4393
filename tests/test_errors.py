"""Every exception that reaches a user is in one file, and optional dependencies are named truly."""

import ast
import sys
from pathlib import Path

import pytest

import wellcond as wc
from wellcond import errors
from wellcond.errors import MissingExtraError, needs_extra

SRC = Path(wc.__file__).parent


def test_every_error_is_defined_in_one_file():
    for path in SRC.rglob("*.py"):
        if path == SRC / "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
                ours = [base for base in bases if isinstance(getattr(errors, base, None), type)]
                assert not ours and not any(base.endswith("Warning") for base in bases), f"{path.name}: {node.name}"


def test_a_package_that_is_missing_is_told_from_one_that_fails(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=r"this needs absent, which is not installed. Run: .*wellcond\[train\]"):
        with needs_extra("absent", "train"):
            import absent  # noqa: F401
    (tmp_path / "broken_wellcond_test.py").write_text("import another_that_is_absent")
    with pytest.raises(MissingExtraError, match="cannot be imported: No module named 'another_that_is") as caught:
        with needs_extra("broken", "train", "broken_wellcond_test"):
            import broken_wellcond_test  # noqa: F401
    assert isinstance(caught.value.__cause__, ModuleNotFoundError) and caught.value.package == "broken"
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="this needs pillow, which is not installed"):
        with needs_extra("pillow", "vision", "PIL"):
            from PIL import Image  # noqa: F401


def test_errors_are_what_python_calls_them_and_carry_what_was_found():
    assert issubclass(wc.OptionError, ValueError) and issubclass(wc.MissingFileError, FileNotFoundError)
    with pytest.raises(wc.OptionError) as caught:
        wc.init_(None, "unknown")
    assert caught.value.found == "unknown" and "gaussian" in caught.value.expected

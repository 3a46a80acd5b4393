"""Optional dependencies are named truly, and errors carry what was found."""

import sys

import pytest

import wellcond as wc
from wellcond.errors import MissingExtraError, needs_extra


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

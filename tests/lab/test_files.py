import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond import files
from wellcond.files import json_ready, to_json, write_atomically


@pytest.mark.parametrize("content", ["text é\r\n", b"\x00\xff", ""])
def test_content_is_written_as_given(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text("old, and longer than the new one")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("problem", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, function, problem):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*arguments):
        raise problem

    monkeypatch.setattr(files.os, function, fail)
    with pytest.raises(problem):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_whole_before_it_takes_the_place(tmp_path, monkeypatch):
    path, replace, seen = tmp_path / "a.txt", os.replace, []
    monkeypatch.setattr(files.os, "replace", lambda a, b: (seen.append(a.read_text()), replace(a, b)))
    write_atomically(path, "new")
    assert seen == ["new"] and path.read_text() == "new"


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "a.txt", "new")


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8")))


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_is_strict_and_keeps_every_number(value):
    def refuse(name):
        raise AssertionError(name)

    again = json.loads(to_json(value), parse_constant=refuse)
    assert again == json_ready(value)


def test_numbers_without_a_json_form_become_text():
    value = {"a": [math.inf, -math.inf, math.nan, 1.5], "b": (math.inf, True)}
    assert json_ready(value) == {"a": ["inf", "-inf", "nan", 1.5], "b": ["inf", True]}
    assert to_json({"a": math.nan}, indent=1) == '{\n "a": "nan"\n}'

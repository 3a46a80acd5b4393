"""One text that is cut in two."""

import pytest

from lab.data.helpers import load
from wellcond.errors import DataError

TEXT = "First line.\r\nSecond line, é.\n" * 10


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    """The folder of a set in a mirror of the hub."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    folder = tmp_path / "mirror/someone/plays"
    folder.mkdir(parents=True)
    return folder


def test_the_last_share_of_the_characters_is_evaluated_on_and_nothing_is_lost(tmp_path):
    (tmp_path / "all.txt").write_bytes(TEXT.encode())
    data = load(tmp_path, source="one_text", files="all.txt", held_out=0.25)
    train, evaluation = data.train[0]["text"], data.evaluation[0]["text"]
    assert train + evaluation == TEXT and len(train) == int(0.75 * len(TEXT))
    assert len(data.train) == len(data.evaluation) == 1


def test_files_of_a_mirror_are_read_as_they_are(mirror, tmp_path):
    (mirror / "input.txt").write_bytes(TEXT.encode())
    data = load(tmp_path, source="one_text", id="someone/plays")
    assert data.train[0]["text"] + data.evaluation[0]["text"] == TEXT


def test_splits_of_a_table_are_joined_in_the_order_of_the_text(mirror, tmp_path):
    for split in ("test", "train", "validation"):
        (mirror / f"{split}.jsonl").write_text(f'{{"text": "words of {split} "}}\n')
    data = load(tmp_path, source="one_text", id="someone/plays", held_out=0.5)
    whole = data.train[0]["text"] + data.evaluation[0]["text"]
    assert whole == "words of train words of validation words of test "
    with pytest.raises(DataError) as error:
        load(tmp_path, source="one_text", id="someone/plays", text="content")
    assert "columns ['text']" in str(error.value)


def test_a_text_that_cannot_be_cut_and_one_that_is_none_are_refused(tmp_path):
    (tmp_path / "short.txt").write_text("x")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for file in ("short.txt", "binary.txt"):
        with pytest.raises(DataError):
            load(tmp_path, source="one_text", files=file)

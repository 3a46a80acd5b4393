import pytest

from lab.data.helpers import failure, load
from wellcond.lab.data import fingerprint

# As published: bytes literals, with quotes in them that are no quotes of the table.
FIRST, SECOND = rb"""b'Trigrams\'n\'Tags "(TnT)" \xc3\xa9'""", rb'''b"a b'c"'''


def row(number, label=b"0.0", first=FIRST, second=SECOND):
    return b"\t".join([label, b"P%d" % number, b"Q%d" % number, first, second]) + b"\n"


def write(folder, **splits):
    folder.mkdir(exist_ok=True)
    labels = (b"0", b"1", b"0.0", b"1.0")
    default = b"".join(row(number, labels[number % 4]) for number in range(8))
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(splits.get(name, default))
    return folder


def test_texts_are_those_of_the_file(tmp_path):
    train = row(0, b"1.0") + row(1, b"0", first="ü".encode())[:-1]  # without an end of line
    bundle = load(write(tmp_path / "aan", train=train), source="aan_pairs", path=".")
    assert bundle.kind == "text" and bundle.class_names == ("unrelated", "related")
    assert bundle.train[0] == {"text": FIRST.decode(), "text_pair": SECOND.decode(), "label": 1}
    assert bundle.train[-1]["text"] == "ü" and bundle.train[1]["text_pair"] == SECOND.decode()
    assert bundle.train.content(0) == FIRST + b"\0" + SECOND
    assert bundle.evaluation.labels.tolist() == bundle.others["test"].labels.tolist() == [0, 1] * 4
    assert "2 training and 8 evaluation examples" in bundle.description and str(tmp_path) not in bundle.description
    assert fingerprint(bundle)["test"]["size"] == 8


def test_lines_may_end_as_on_windows(tmp_path):
    folder = write(tmp_path, train=row(0).replace(b"\n", b"\r\n") * 2)
    assert load(folder, source="aan_pairs", path=".").train[1]["text_pair"] == SECOND.decode()


def test_only_the_beginning_of_a_text_is_read(tmp_path):
    folder = write(tmp_path, train=row(0, first=b"a" + "é".encode() * 4000, second=b"abcdef" * 1000))
    example = load(folder, source="aan_pairs", path=".").train[0]
    assert example["text"] == "a" + "é" * 2049  # half a character is left out
    assert len(example["text_pair"]) == 4100


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1\tA\tB\tonly one text\n", "1 texts"),
        (b"1\tA\tB\ta\tb\tc\n", "3 texts"),
        (b"\n", "not enough values"),
        (row(0, b"2"), "KeyError: b'2'"),
        (row(0, b"label"), "KeyError: b'label'"),
        (row(0, first=b""), "or an empty one"),
        (row(0, second=b""), "or an empty one"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, expected):
    message = failure(write(tmp_path, test=row(0) + row(1) + line), source="aan_pairs", path=".")
    assert message.startswith(f"{tmp_path}/new_aan_pairs.test.tsv, line 3: ") and expected in message


def test_missing_files_are_named(tmp_path):
    folder = write(tmp_path / "aan")
    (folder / "new_aan_pairs.eval.tsv").unlink()
    message = failure(tmp_path, source="aan_pairs", path="aan")
    assert "new_aan_pairs.eval.tsv: no such file" in message and "new_aan_pairs.test.tsv" in message
    message = failure(tmp_path, source="aan_pairs", path="other")
    assert f"in {tmp_path}: aan" in message and "WELLCOND_DATA is not set" in message
    assert "no rows" in failure(write(folder, train=b""), source="aan_pairs", path=".")

"""The original files of ListOps of the Long Range Arena."""

import pytest

from lab.data.helpers import failure, load
from wellcond.lab.data import fingerprint, load_data, resolve_config
from wellcond.lab.data.listops_files import write_lra_listops
from wellcond.lab.data.listops_language import evaluate_listops

OPTIONS = {"max_depth": 5, "max_args": 5, "min_length": 0, "max_length": 100}
SIZES = {"num_train": 600, "num_evaluation": 20, "num_test": 30}
GOOD = "( ( ( [MAX 2 ) 9 ) ] )\t9"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def generated():
    return load(source="generated", generator="listops", options=OPTIONS, **SIZES)


def write_rows(folder, *rows, header="Source\tTarget", others=GOOD):
    for name in ("train", "val", "test"):
        lines = [header, *(rows if name == "train" else [others])]
        (folder / f"basic_{name}.tsv").write_bytes("".join(line + "\r\n" for line in lines).encode())
    return {"source": "lra_listops", "path": str(folder)}


def test_generated_data_survive_the_original_format(generated, tmp_path):
    write_lra_listops(generated, tmp_path)
    bundle = load(tmp_path, source="lra_listops", path=".", max_length=100)
    assert fingerprint(bundle)["splits"] == fingerprint(generated)["splits"]
    assert (
        bundle.train.inputs.equal(generated.train.inputs) and bundle.train.inputs.dtype == generated.train.inputs.dtype
    )
    assert bundle.vocabulary_size == 15 and bundle.num_classes == 10
    assert "600 training and 20 evaluation examples, 10 classes, 30 test examples" in bundle.description
    lines = (tmp_path / "basic_train.tsv").read_bytes().split(b"\r\n")
    assert lines[0] == b"Source\tTarget" and lines[-1] == b"" and len(lines) == 602
    assert all(evaluate_listops(text) == int(label) for text, label in (x.decode().split("\t") for x in lines[1:-1]))


def test_the_text_is_that_of_the_published_generator(tmp_path):
    texts = ["( ( ( ( [SM 1 ) ( ( ( [MED 3 ) 8 ) ] ) ) 4 ) ] )\t0", "7\t7"]
    bundle = load(**write_rows(tmp_path, *texts))
    write_lra_listops(bundle, tmp_path / "again")
    assert (tmp_path / "again/basic_train.tsv").read_bytes() == (tmp_path / "basic_train.tsv").read_bytes()
    assert (
        bundle.train[0]["tokens"][:9].tolist() == [13, 1, 12, 3, 8, 14, 4, 14, -1]
        and len(bundle.train[0]["tokens"]) == 2000
    )


def test_a_file_is_read_once_and_again_when_it_changes(generated, tmp_path):
    write_lra_listops(generated, tmp_path)
    told = []

    def read(**fields):
        told.clear()
        config = resolve_config({"source": "lra_listops", "path": str(tmp_path), "max_length": 100} | fields)
        return fingerprint(load_data(config, progress=lambda what, *_: told.append(what)))

    first = read()
    assert {"reading basic_train.tsv, MB", "reading basic_val.tsv, MB"} < set(told)
    assert read() == first and not told
    assert read(verify=False) == first and told
    path = tmp_path / "basic_test.tsv"
    path.write_bytes(path.read_bytes() + GOOD.encode())
    assert read()["splits"]["test"]["size"] == 31 and set(told) == {"reading basic_test.tsv, MB"}


def test_without_a_cache_files_are_read_every_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "file"))
    assert load(**write_rows(tmp_path, GOOD)).train.labels.tolist() == [9]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[MEAN 2 9 ]\t9", "unknown operator '[MEAN'"),
        ("[MINX 2 9 ]\t9", "unknown operator '[MINX'"),
        ("[ 2 9 ]\t2", "unknown operator '['"),
        ("[LAST 2 9 ]\t9", "'[LAST': expected one of the operators MIN, MAX, MED, SM at character 0"),
        ("[MAX 2 # 9 ]\t9", "unknown symbol '#'"),
        ("[MAX 2 M 9 ]\t9", "unknown symbol 'M'"),
        ("[MAX 2 19 ]\t9", "unknown symbol '19'"),
        ("[MAX 2 9]\t9", "unknown symbol '9]'"),
        ("[MAX 2 9\t9", "no ']' for [MAX at character 0"),
        ("( [MAX 2 9 ]\t9", "no ')' for '('"),
        (") [MAX 2 9 ] (\t9", "')' closes nothing"),
        ("[MAX [MIN ] 9 ]\t9", "[MIN has no arguments"),
        ("[MAX 2 9 ] 9\t9", "after the end"),
        ("\t9", "no expression"),
        ("[MAX 2 9 ]\t10", "expected: an answer from 0 to 9\n  found:    '10'"),
        ("[MAX 2 9 ]\tx", "found:    'x'"),
        ("[MAX 2 9 ]", "found:    1 value(s)"),
        ("[MAX 2 9 ]\t8", "expected: the answer of the expression, 9\n  found:    8"),
        ("[MAX " + "2 " * 2000 + "]\t2", "expected: at most 2000 symbols (max_length)\n  found:    2002"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    found = failure(**write_rows(tmp_path, *[GOOD] * 300, row, GOOD))
    assert f"{tmp_path}/basic_train.tsv, row 300 (the first is 0)" in found and message in found
    assert not list((tmp_path / "cache").rglob("tokens.npy"))


def test_a_wrong_answer_passes_without_verification(tmp_path):
    assert load(**write_rows(tmp_path, "[MAX 2 9 ]\t8"), verify=False).train.labels.tolist() == [8]


def test_odd_but_sound_files_are_read(tmp_path):
    rows = ["9\tnote\t  [MAX   2 9 ] ", "", "3\t\t(  3\u00a0 )"]
    bundle = load(**write_rows(tmp_path, *rows, header="Target\tNote\tSource", others=rows[0]))
    assert bundle.train.inputs[:, :5].tolist() == [[11, 2, 9, 14, -1], [3, -1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("Source\tAnswer", [GOOD], "basic_train.tsv: columns are missing: Target"),
        ("", [], "columns are missing: Source, Target.\n.*\n  found:    an empty file"),
        ("Source\tTarget", [], "basic_train.tsv: there are no rows"),
    ],
)
def test_files_without_columns_or_rows_are_refused(tmp_path, header, rows, message):
    import re

    assert re.search(message, failure(**write_rows(tmp_path, *rows, header=header)))


def test_a_missing_file_is_named(tmp_path):
    settings = write_rows(tmp_path, GOOD)
    (tmp_path / "basic_val.tsv").unlink()
    found = failure(**settings)
    assert f"{tmp_path}/basic_val.tsv: the file cannot be read" in found and "No such file" in found

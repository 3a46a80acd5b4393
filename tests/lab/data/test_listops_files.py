"""The original files of ListOps of the Long Range Arena."""

import pytest

from lab.data.helpers import failure, load
from wellcond.lab.data import fingerprint
from wellcond.lab.data.listops import SYMBOLS

OPTIONS = {"max_depth": 5, "max_args": 5, "min_length": 0, "max_length": 2000}
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


def published_text(tokens):
    """An operator of n arguments is preceded by n + 1 round brackets; one closes after each argument and at its end."""
    arguments = [[]]
    for token in tokens:
        if token == 14:
            name, *inner = arguments.pop()
            text = "( " * (len(inner) + 1) + " ".join([name, *(f"{one} )" for one in inner), "] )"])
            arguments[-1].append(text)
        elif token >= 10:
            arguments.append([SYMBOLS[token]])
        else:
            arguments[-1].append(str(token))
    return arguments[0][0]


def write_published(bundle, folder):
    for name, split in {"train": bundle.train, "val": bundle.evaluation, **bundle.others}.items():
        texts = [published_text(row[row >= 0].tolist()) for row in split.inputs]
        lines = [f"{text}\t{label}" for text, label in zip(texts, split.labels.tolist(), strict=True)]
        (folder / f"basic_{name}.tsv").write_bytes("".join(f"{x}\r\n" for x in ["Source\tTarget", *lines]).encode())


def test_generated_data_survive_the_original_format(generated, tmp_path):
    write_published(generated, tmp_path)
    bundle = load(tmp_path, source="lra_listops", path=".")
    assert fingerprint(bundle) == fingerprint(generated)
    assert (
        bundle.train.inputs.equal(generated.train.inputs) and bundle.train.inputs.dtype == generated.train.inputs.dtype
    )
    assert bundle.vocabulary_size == 15 and len(bundle.class_names) == 10
    assert "600 training and 20 evaluation examples, 10 classes, 30 test examples" in bundle.description


def test_tokens_of_the_published_text(tmp_path):
    bundle = load(**write_rows(tmp_path, "( ( ( ( [SM 1 ) ( ( ( [MED 3 ) 8 ) ] ) ) 4 ) ] )\t0", "7\t7"))
    assert bundle.train.labels.tolist() == [0, 7] and len(bundle.train[0]["tokens"]) == 2000
    assert bundle.train[0]["tokens"][:9].tolist() == [13, 1, 12, 3, 8, 14, 4, 14, -1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[MEAN 2 9 ]\t9", "KeyError: '[MEAN'"),
        ("[ 2 9 ]\t2", "KeyError: '['"),
        ("[LAST 2 9 ]\t9", "KeyError: '[LAST'"),
        ("[MAX 2 # 9 ]\t9", "KeyError: '#'"),
        ("[MAX 2 19 ]\t9", "KeyError: '19'"),
        ("[MAX 2 9]\t9", "KeyError: '9]'"),
        ("[MAX 2 9 ]\t10", "ValueError"),
        ("[MAX 2 9 ]\tx", "ValueError"),
        ("[MAX 2 9 ]", "not enough values"),
        ("[MAX " + "2 " * 2000 + "]\t2", "at most 2000 symbols"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    found = failure(**write_rows(tmp_path, *[GOOD] * 300, row, GOOD))
    assert f"{tmp_path}/basic_train.tsv, line 302" in found and message in found


def test_files_without_rows_are_refused(tmp_path):
    assert "basic_train.tsv: there are no rows" in failure(**write_rows(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    settings = write_rows(tmp_path, GOOD)
    (tmp_path / "basic_val.tsv").unlink()
    found = failure(**settings)
    assert f"{tmp_path}/basic_val.tsv: no such file" in found and "basic_test.tsv" in found

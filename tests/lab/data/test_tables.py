import bz2
import gzip
import json
import os
import pickle

import pytest
import torch

from lab.data.helpers import failure, load, refusal, write_csv, write_features, write_jsonl, write_parquet
from wellcond.errors import DataError
from wellcond.lab.data import fingerprint

pytest.importorskip("datasets")

ROWS = [{"review": f"text {i}", "stars": i % 2, "id": i} for i in range(10)]
NAMED = {"input": "review", "label": "stars"}


def write_rows(path, rows=ROWS):
    if path.suffix == ".parquet":
        return write_parquet(path, {name: [row[name] for row in rows] for name in rows[0]})
    if path.suffix in (".csv", ".tsv"):
        return write_csv(path, list(rows[0]), [list(row.values()) for row in rows])
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return path
    return write_jsonl(path, rows)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv", "tsv"])
def test_own_files_need_a_path_and_two_column_names(tmp_path, suffix):
    write_rows(tmp_path / f"a.{suffix}")
    write_rows(tmp_path / f"b.{suffix}", ROWS[:4])
    bundle = load(tmp_path, source="files", train=f"a.{suffix}", evaluation=f"b.{suffix}", **NAMED)
    assert bundle.kind == "text" and bundle.class_names == ("0", "1")
    assert [bundle.train[i] for i in (0, -1)] == [{"text": "text 0", "label": 0}, {"text": "text 9", "label": 1}]
    assert len(bundle.evaluation) == 4 and bundle.name == f"a.{suffix}"
    assert pickle.loads(pickle.dumps(bundle.train))[3] == bundle.train[3]
    # Nothing is written beside the data.
    assert sorted(os.listdir(tmp_path)) == [f"a.{suffix}", f"b.{suffix}"]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv.gz", "tsv.bz2", "csv.zst"])
def test_compressed_files_are_read_like_plain_ones(tmp_path, suffix):
    import zstandard

    compress = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.ZstdCompressor().compress}
    plain = write_rows(tmp_path / f"plain.{suffix.split('.')[0]}")
    (tmp_path / f"a.{suffix}").write_bytes(compress[suffix.split(".")[1]](plain.read_bytes()))
    bundle = load(tmp_path, source="files", train=f"a.{suffix}", evaluation=plain.name, **NAMED)
    assert [bundle.train[i] for i in range(10)] == [bundle.evaluation[i] for i in range(10)]


def test_a_rewritten_file_is_read_anew(tmp_path):
    write_rows(tmp_path / "a.csv")
    load(tmp_path, source="files", train="a.csv", evaluation="a.csv", **NAMED)
    write_rows(tmp_path / "a.csv", [{**row, "review": "new"} for row in ROWS])
    assert load(tmp_path, source="files", train="a.csv", evaluation="a.csv", **NAMED).train[0]["text"] == "new"


def test_a_pattern_reads_its_files_in_order_and_errors_name_the_first(tmp_path):
    for number in range(3):
        write_jsonl(tmp_path / f"part[{number}].jsonl", ROWS[3 * number : 3 * number + 3])
    fields = {"source": "files", "train": "part*.jsonl", "evaluation": ["part[[]0].jsonl", "part[2].jsonl"], **NAMED}
    bundle = load(tmp_path, **fields)
    assert [bundle.train[i]["text"] for i in range(9)] == [f"text {i}" for i in range(9)]
    assert [bundle.evaluation[i]["text"] for i in (0, 5)] == ["text 0", "text 8"]
    write_jsonl(tmp_path / "bad.jsonl", [ROWS[0], {**ROWS[1], "stars": -4}])
    message = failure(tmp_path, **{**fields, "evaluation": "bad.jsonl"})
    assert f"{tmp_path}/bad.jsonl, row 1 (the first is 0): the label is not a class" in message and "-4" in message
    write_jsonl(tmp_path / "part[2].jsonl", [{"other": 1}])
    message = failure(tmp_path, **fields)
    assert f"{tmp_path}/part[0].jsonl and 2 more: this cannot be read" in message and "the same columns" in message


def test_a_fraction_is_drawn_from_every_class(tmp_path):
    rows = [{"text": str(i), "label": "rare" if i < 2 else "common"} for i in range(50)]
    write_jsonl(tmp_path / "a.jsonl", rows)

    def split():
        bundle = load(tmp_path, source="files", train="a.jsonl", evaluation_fraction=0.2)
        texts = [[part[i]["text"] for i in range(len(part))] for part in (bundle.train, bundle.evaluation)]
        assert sorted(texts[0] + texts[1], key=int) == [row["text"] for row in rows]
        assert bundle.class_names == ("common", "rare")
        assert bundle.train.labels.bincount().tolist() == [38, 2] and len(bundle.evaluation) == 10
        assert all(bundle.train[i]["label"] == int(int(text) < 2) for i, text in enumerate(texts[0]))
        return texts

    assert split() == split()
    assert len(load(tmp_path, source="files", train="a.jsonl").evaluation) == 5


def test_limits_draw_a_fixed_subset(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": str(i), "label": i // 50} for i in range(100)])
    fields = {"source": "files", "train": "a.jsonl", "evaluation": "a.jsonl"}
    bundle = load(tmp_path, limit_train=20, limit_evaluation=500, **fields)
    texts = [int(bundle.train[i]["text"]) for i in range(20)]
    assert len(bundle.train) == 20 and len(bundle.evaluation) == 100 and texts == sorted(texts) and max(texts) >= 50
    assert bundle.train.labels.tolist() == [text // 50 for text in texts] and len(bundle.class_names) == 2
    assert fingerprint(load(tmp_path, limit_train=20, **fields)) == fingerprint(bundle)
    both = load(tmp_path, source="files", train="a.jsonl", evaluation_fraction=0.5, limit_train=7)
    drawn = [both.train[i] for i in range(7)]
    assert len(both.train) == 7 and all(row["label"] == int(row["text"]) // 50 for row in drawn)
    assert {row["label"] for row in drawn} == {0, 1}


def test_text_files_give_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n  two\u2028same line\nthree", encoding="utf-8")
    (tmp_path / "b.txt").write_text("four\nfive\n")
    lines = load(tmp_path, source="files", train="a.txt", evaluation="b.txt")
    assert [lines.train[i] for i in range(4)] == [{"text": t} for t in ("one", "", "  two\u2028same line", "three")]
    assert lines.class_names is None and lines.train.labels is None
    assert "unlabelled" in lines.description


def test_csv_texts_survive_as_written(tmp_path):
    texts = ["NA", "null", "007", "", "1.50", 'with, comma and "quotes"\nand a line', "None", "ünï"]
    write_csv(tmp_path / "a.csv", ["text", "label"], [[text, "yes" if i else "no"] for i, text in enumerate(texts)])
    bundle = load(tmp_path, source="files", train="a.csv", evaluation="a.csv")
    assert [bundle.train[i]["text"] for i in range(len(texts))] == texts
    assert bundle.class_names == ("no", "yes")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a,1,2\n", "3 values in the first row for the columns text, label"),
        ("a,0\nb,1,2\n", "a.csv: this cannot be read"),
        ("a,0\nb\n", "row 1 (the first is 0): the label is not a class"),
        ("a\n", "1 values in the first row for the columns text, label"),
    ],
)
def test_csv_rows_that_do_not_fit_their_columns(tmp_path, lines, message):
    (tmp_path / "a.csv").write_text("text,label\n" + lines)
    assert message in failure(tmp_path, source="files", train="a.csv", evaluation="a.csv")


@pytest.mark.parametrize("form", ["bytes", "struct", "feature"])
def test_images_in_parquet(tmp_path, png, form):
    encoded = [png(seed) for seed in range(4)]
    labels = ["b", "a", "b", "a"]
    if form == "feature":
        datasets = pytest.importorskip("datasets")
        columns = {"picture": [{"bytes": data, "path": None} for data in encoded], "label": labels}
        features = {"picture": datasets.Image(), "label": datasets.Value("string")}
        write_features(tmp_path / "a.parquet", columns, features)
    else:
        structs = [{"bytes": data, "path": "x.png"} for data in encoded]
        pictures = {"bytes": encoded, "struct": structs}[form]
        write_parquet(tmp_path / "a.parquet", {"picture": pictures, "label": labels})
    fields = {"train": "a.parquet", "evaluation": "a.parquet", "input": "picture", "label": "label"}
    bundle = load(tmp_path, source="files", **fields)
    assert bundle.kind == "image" and bundle.train.labels.tolist() == [1, 0, 1, 0]
    for number in range(4):
        assert bundle.train[number]["image"].size == (8, 8) and bundle.train.content(number) == encoded[number]
    batch = next(iter(torch.utils.data.DataLoader(bundle.train, batch_size=4, collate_fn=list, num_workers=1)))
    assert [example["label"] for example in batch] == [1, 0, 1, 0]


def test_the_path_of_an_image_is_not_followed(tmp_path, png):
    (tmp_path / "secret.png").write_bytes(png())
    row = {"bytes": None, "path": str(tmp_path / "secret.png")}
    write_parquet(tmp_path / "a.parquet", {"image": [{"bytes": png(), "path": None}, row], "label": [0, 1]})
    bundle = load(tmp_path, source="files", train="a.parquet", evaluation="a.parquet")
    with pytest.raises(DataError, match="row 1"):
        bundle.train[1]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_truncated_or_undecodable_file_is_named(tmp_path, suffix):
    path = write_rows(tmp_path / f"a.{suffix}")
    path.write_bytes(path.read_bytes()[:-20] + (b'"\xff\xfe' if suffix == "csv" else b""))
    message = failure(tmp_path, source="files", train=path.name, evaluation=path.name, **NAMED)
    assert f"{path}: this cannot be read" in message and "whole files of" in message


def test_missing_and_unknown_files_are_named(tmp_path):
    write_rows(tmp_path / "a.csv")
    write_rows(tmp_path / "a.jsonl")
    (tmp_path / "a.xlsx").write_text("x")
    message = failure(tmp_path, source="files", train="b.csv", evaluation="a.csv")
    assert f"{tmp_path}/b.csv: no such file" in message and "a.csv, a.jsonl" in message and "'train'" in message
    assert "'evaluation'" in failure(tmp_path, source="files", train="a.csv", evaluation="*.parquet")
    message = failure(tmp_path, source="files", train="a.xlsx", evaluation="a.csv")
    assert "the format is not known" in message and ".parquet, .jsonl" in message


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv", "txt"])
def test_files_without_rows_are_named(tmp_path, suffix):
    path = tmp_path / f"empty.{suffix}"
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        write_parquet(path, {"text": pa.array([], pa.string())})
    else:
        path.write_text("text,label\n" if suffix == "csv" else "")
    message = failure(tmp_path, source="files", train=path.name, evaluation=path.name)
    assert f"{path}: this cannot be read" in message and "not empty" in message


def test_missing_columns_list_those_that_exist(tmp_path):
    write_rows(tmp_path / "a.csv")
    fields = {"source": "files", "train": "a.csv", "evaluation": "a.csv"}
    message = failure(tmp_path, **fields, input="reviews", label="stars")
    assert "column 'reviews' cannot be the input" in message and "no such column; columns review, stars, id" in message
    assert "the field 'label' names" in failure(tmp_path, **fields, input="review", label="star")
    message = failure(tmp_path, **fields)
    assert "which column is the input is not clear" in message and "columns review, stars" in message
    write_rows(tmp_path / "b.csv", [{"review": "a", "id": 1}])
    message = failure(tmp_path, source="files", train="a.csv", evaluation="b.csv", **NAMED)
    assert "b.csv: there is no column 'stars'" in message
    write_parquet(tmp_path / "c.parquet", {"review": [1.5, 2.5]})
    message = failure(tmp_path, source="files", train="c.parquet", evaluation="c.parquet", input="review")
    assert "column 'review' cannot be the input" in message and "float64" in message


@pytest.mark.parametrize(
    ("train", "evaluation", "file", "row"),
    [
        ([0, 1], [1, 2], "evaluation", 1),
        ([0, 1], [-1], "evaluation", 0),
        ([0, 0.5], [0], "train", 0),
        ([0, None], [0], "train", 1),
        (["b", "a"], ["a", "c"], "evaluation", 1),
        ([0, 1], ["a"], "evaluation", 0),
    ],
)
def test_wrong_labels_name_file_row_and_value(tmp_path, train, evaluation, file, row):
    for name, labels in (("train", train), ("evaluation", evaluation)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "x", "label": label} for label in labels])
    error = refusal(tmp_path, source="files", train="train.jsonl", evaluation="evaluation.jsonl")
    assert error.problem.startswith(f"{tmp_path}/{file}.jsonl") and error.row == row
    assert error.found != "" and "in column 'label'" in error.expected


def test_labels_of_other_forms(tmp_path):
    write_jsonl(tmp_path / "bool.jsonl", [{"text": "x", "label": value} for value in (True, False)])
    assert load(tmp_path, source="files", train="bool.jsonl", evaluation="bool.jsonl").train.labels.tolist() == [1, 0]
    write_jsonl(tmp_path / "gap.jsonl", [{"text": "x", "label": value} for value in (10, 2, 10)])
    fields = {"source": "files", "train": "gap.jsonl", "evaluation": "gap.jsonl"}
    bundle = load(tmp_path, **fields)
    assert bundle.class_names == ("2", "10") and bundle.train.labels.tolist() == [1, 0, 1]
    assert load(tmp_path, **fields, label=None).class_names is None
    write_jsonl(tmp_path / "mixed.jsonl", [{"text": "x", "label": value} for value in ("one", 0, "one")])
    bundle = load(tmp_path, source="files", train="mixed.jsonl", evaluation="mixed.jsonl")
    assert bundle.class_names == ("0", "one") and bundle.train.labels.tolist() == [1, 0, 1]


def test_missing_text_names_the_row(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None}])
    message = failure(tmp_path, source="files", train="a.jsonl", evaluation="a.jsonl")
    assert "a.jsonl, row 1 (the first is 0): column 'text' has no value" in message

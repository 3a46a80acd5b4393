"""Labels that are numbers, and splits with names of their own."""

import math

import pytest
import torch

from lab.data.helpers import failure, load, write_csv, write_jsonl, write_parquet
from wellcond.lab.data import fingerprint

TEXTS = ["a b", "c d", "e f", "g h"]
NUMBERS = [0.0, 3.8, 5.0, 2.25]


def write(tmp_path, name, numbers):
    path = tmp_path / name
    if path.suffix == ".parquet":
        return write_parquet(path, {"text": TEXTS, "label": numbers})
    if path.suffix == ".csv":
        return write_csv(path, ["text", "label"], zip(TEXTS, numbers, strict=True))
    return write_jsonl(path, [{"text": text, "label": label} for text, label in zip(TEXTS, numbers, strict=True)])


def fields(path, **changes):
    return {"source": "files", "train": str(path), "evaluation": str(path), "label_kind": "number"} | changes


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_numbers_are_labels_in_every_format(tmp_path, name):
    bundle = load(**fields(write(tmp_path, name, NUMBERS)))
    assert bundle.class_names is None and bundle.train.labels.dtype == torch.float64
    assert bundle.train.labels.tolist() == NUMBERS and bundle.train[1] == {"text": "c d", "label": 3.8}
    assert "labelled with numbers" in bundle.description


def test_classes_stay_classes_and_are_refused_if_they_have_decimals(tmp_path):
    path = write(tmp_path, "a.jsonl", NUMBERS)
    assert "the label is not a class" in failure(**fields(path, label_kind="class"))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("a.jsonl", [1.0, None, 2.0, 3.0]),
        ("a.parquet", [1.0, math.nan, 2.0, 3.0]),
        ("a.parquet", [1.0, math.inf, 2.0, 3.0]),
        ("a.csv", ["1.0", "", "2.0", "3.0"]),
        ("a.csv", ["1.0", "much", "2.0", "3.0"]),
    ],
)
def test_a_label_that_is_no_number_is_an_error(tmp_path, name, numbers):
    message = failure(**fields(write(tmp_path, name, numbers)))
    assert f"{tmp_path / name}, row 1 (the first is 0): the label is not a number" in message
    assert "finite numbers (label_kind is number) in column 'label'" in message


def test_the_fingerprint_sees_decimals(tmp_path):
    digests = {
        fingerprint(load(**fields(write(tmp_path, f"{last}.jsonl", [0.0, 1.0, 2.0, last]))))["train"]["sha256"]
        for last in (3.0, 3.5)
    }
    assert len(digests) == 2

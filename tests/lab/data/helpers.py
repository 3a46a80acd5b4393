"""Shorthands of the data tests."""

import csv
import json

import pytest

from wellcond.errors import DataError
from wellcond.lab.data import load_data, resolve_config


def load(base=None, **fields):
    return load_data(resolve_config(fields), base=base)


def refusal(base=None, **fields):
    """The error that loading must raise."""
    with pytest.raises(DataError) as caught:
        load(base, **fields)
    assert caught.value.expected and caught.value.found
    return caught.value


def failure(base=None, **fields):
    """Message of the error that loading must raise."""
    return str(refusal(base, **fields))


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def write_parquet(path, columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def write_features(path, columns, features):
    """Parquet with the types of the hub (class names, images) in its metadata."""
    datasets = pytest.importorskip("datasets")
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path)
    datasets.enable_progress_bars()
    return path

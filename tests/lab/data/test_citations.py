import json
import os
import re
from pathlib import Path

import pytest

from lab.data.helpers import failure, load

ROOT = os.environ.get("WELLCOND_DATA") or str(Path(__file__).parents[3] / "../shared/data")
NAME = "acl-citation-pairs"


def write(folder, documents=None, citing=None, cocited=None):
    """Thirty papers, each of which cites the next two and is cited with the tenth after."""
    folder.mkdir(exist_ok=True)
    texts = {f"P{n}": f"paper {n}" for n in range(30)}
    lines = [f"P{n}\tP{(n + step) % 30}" for n in range(30) for step in (1, 2)]
    files = {
        "docs_first4100B.json": json.dumps(texts if documents is None else documents),
        "citation_pairs.tsv": "\n".join(lines) + "\n" if citing is None else citing,
        "cocited_pairs.tsv": "".join(f"P{n}\tP{(n + 10) % 30}\t1\n" for n in range(30)) if cocited is None else cocited,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def splits_of(bundle):
    return {"train": bundle.train, "evaluation": bundle.evaluation, **bundle.others}


def pairs_of(split, label=None):
    """Numbers of the papers of every pair, smaller first."""
    pairs = split.pairs if label is None else split.pairs[split.labels == label]
    return [tuple(sorted(pair)) for pair in pairs.tolist()]


def papers_of(split):
    return set(split.pairs.flatten().tolist())


def check_soundness(bundle, related):
    """Balanced, no pair twice or in two splits, related pairs from the file, unrelated ones related in no way."""
    seen = [pair for split in splits_of(bundle).values() for pair in pairs_of(split)]
    assert len(seen) == len(set(seen))
    for split in splits_of(bundle).values():
        assert split.labels.bincount().tolist() == [len(split) // 2] * 2
        assert set(pairs_of(split, 1)) <= related and not set(pairs_of(split, 0)) & related
        assert all(a != b for a, b in pairs_of(split))


def test_pairs_are_balanced_and_in_one_split(tmp_path):
    bundle = load(write(tmp_path), source="citation_pairs", path=".")
    citing = {tuple(sorted((n, (n + step) % 30))) for n in range(30) for step in (1, 2)}
    cocited = {tuple(sorted((n, (n + 10) % 30))) for n in range(30)}
    check_soundness(bundle, citing | cocited)
    assert set().union(*(pairs_of(split, 1) for split in splits_of(bundle).values())) == citing | cocited


def test_texts_and_labels(tmp_path):
    bundle = load(write(tmp_path), source="citation_pairs", path=".")
    assert bundle.kind == "text" and bundle.class_names == ("unrelated", "related")
    assert (len(bundle.train), len(bundle.evaluation), len(bundle.others["test"])) == (144, 18, 18)
    first, second = bundle.train.pairs[0].tolist()
    example = bundle.train[0]
    assert example["text"] == f"paper {first}" and example["text_pair"] == f"paper {second}"
    assert bundle.train.content(0) == f"paper {first}\0paper {second}".encode()
    assert example["label"] == int(bundle.train.labels[0]) and 0 < int(bundle.train.labels[:20].sum()) < 20
    assert "paper pairs of" in bundle.description and str(tmp_path.parent) not in bundle.description


def test_the_first_paper_says_nothing_about_the_class(tmp_path):
    for split in splits_of(load(write(tmp_path), source="citation_pairs", path=".")).values():
        related, unrelated = (sorted(split.pairs[split.labels == label][:, 0].tolist()) for label in (0, 1))
        assert related == unrelated


def test_a_pair_in_both_directions_is_one_pair(tmp_path):
    lines = "".join(f"P{n}\tP{n + 1}\nP{n + 1}\tP{n}\n" for n in range(20))
    bundle = load(write(tmp_path, citing=lines, cocited=""), source="citation_pairs", path=".")
    check_soundness(bundle, {(n, n + 1) for n in range(20)})
    assert sum(map(len, splits_of(bundle).values())) == 40
    assert all(a < b for a, b in bundle.train.pairs[bundle.train.labels == 1].tolist())  # the first direction


def test_papers_without_text_are_left_out_and_counted(tmp_path):
    documents = {f"P{n}": "" if n == 4 else f"paper {n}" for n in range(30)}
    bundle = load(write(tmp_path, documents=documents), source="citation_pairs", path=".")
    assert all(4 not in papers_of(split) for split in splits_of(bundle).values())
    assert "without 1 papers that have no text" in bundle.description
    assert sum(map(len, splits_of(bundle).values())) == 2 * (90 - 6)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"citing": "P0\tP1\nP0\n"}, "citation_pairs.tsv, line 2: .*\n.*two different papers.*\n  found:    'P0'"),
        ({"citing": "P0\tP99\n"}, "line 1: .*\n.*\n  found:    'P0.tP99'"),
        ({"citing": "P0\tP0\n"}, "line 1: .*\n.*\n  found:    'P0.tP0'"),
        ({"cocited": b"P0\tP1\nP0\t\xff\n"}, "cocited_pairs.tsv, line 2"),
        ({"citing": "", "cocited": ""}, "the evaluation split has too few papers"),
        ({"documents": ["a"]}, "docs_first4100B.json: .*\n.*texts by id"),
        ({"documents": {"P0": 3}}, "docs_first4100B.json: .*\n.*texts by id"),
        ({"citing": "P0\tP1\n", "cocited": ""}, "the evaluation split has too few papers"),
    ],
)
def test_bad_files_are_named(tmp_path, files, expected):
    message = failure(write(tmp_path, **files), source="citation_pairs", path=".")
    assert re.search(expected, message), message


def test_real_papers(monkeypatch):
    folder = next((Path(root) / NAME for root in ROOT.split(os.pathsep) if (Path(root) / NAME).is_dir()), None)
    if folder is None:
        pytest.skip(f"no {NAME}: set WELLCOND_DATA to a folder that holds it")
    monkeypatch.setenv("WELLCOND_DATA", ROOT)
    bundle = load(source="citation_pairs", path=NAME)
    assert tuple(map(len, splits_of(bundle).values())) == (16458, 2058, 2058)
    numbers = {name: number for number, name in enumerate(json.loads((folder / "docs_first4100B.json").read_text()))}
    citing, cocited = (
        {tuple(sorted(numbers[name] for name in line.split()[:2])) for line in (folder / file).read_text().splitlines()}
        for file in ("citation_pairs.tsv", "cocited_pairs.tsv")
    )
    check_soundness(bundle, citing | cocited)


def test_a_broken_file_of_documents_is_named(tmp_path):
    (write(tmp_path) / "docs_first4100B.json").write_bytes(b'{"P0": "cut')
    assert "JSON in UTF-8" in failure(tmp_path, source="citation_pairs", path=".")
    (tmp_path / "docs_first4100B.json").write_bytes(b'{"P0": "\xff"}')
    assert "invalid unicode" in failure(tmp_path, source="citation_pairs", path=".")

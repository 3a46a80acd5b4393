import sys

import pytest
from pydantic import ValidationError

from lab.data.helpers import failure, load, write_csv, write_features, write_parquet
from wellcond.lab.data import fingerprint, resolve_config
from wellcond.lab.data.tables import opened

datasets = pytest.importorskip("datasets")


def write_split(folder, split, columns, features=None):
    path = folder / f"{split}-00000-of-00001.parquet"
    return write_parquet(path, columns) if features is None else write_features(path, columns, features)


@pytest.fixture
def mirror(tmp_path, monkeypatch, png):
    """Two sets as on the hub: images with class names, and texts in two configurations with a hidden test split."""
    root = tmp_path / "mirror"
    features = {"img": datasets.Image(), "label": datasets.ClassLabel(names=["plane", "car"])}
    for split, count in (("train", 6), ("test", 4)):
        images = [{"bytes": png(seed), "path": None} for seed in range(count)]
        columns = {"img": images, "label": [seed % 2 for seed in range(count)]}
        write_split(root / "lab/pictures/plain", split, columns, features)
    kinds = datasets.ClassLabel(names=["bad", "good"])
    for config in ("one", "two"):
        names = ["sentence"] if config == "one" else ["first", "second"]
        for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1])):
            columns = {name: [f"{config} {split} {i}" for i in range(len(labels))] for name in names}
            features = {**{name: datasets.Value("string") for name in names}, "label": kinds}
            write_split(root / "lab/texts" / config, split, {**columns, "label": labels}, features)
    monkeypatch.setenv("WELLCOND_DATA", str(root))
    return root


def test_mirror_resolves_images_with_their_class_names(mirror, png):
    bundle = load(source="hub", id="lab/pictures")
    assert bundle.class_names == ("plane", "car") and bundle.kind == "image" and bundle.name == "lab/pictures"
    assert len(bundle.train) == 6 and len(bundle.evaluation) == 4
    assert bundle.train[3]["label"] == 1 and bundle.train[3]["image"].mode == "RGB"
    assert bundle.train.content(3) == png(3)
    assert "local mirror" in bundle.description and str(mirror) not in bundle.description


def test_mirror_resolves_configurations_pairs_and_hidden_labels(mirror):
    one = load(source="hub", id="lab/texts", config="one")
    assert one.evaluation[0] == {"text": "one validation 0", "label": 1}
    assert one.others["test"][1] == {"text": "one test 1"} and one.others["test"].labels is None
    two = load(source="hub", id="lab/texts", config="two", input=["first", "second"], evaluation_split="train")
    assert two.train[0] == {"text": "two train 0", "text_pair": "two train 0", "label": 0}
    assert "validation" in two.others
    assert "label" not in load(source="hub", id="lab/texts", config="one", label=None).train[0]


def test_hidden_labels_are_an_error_where_labels_are_needed(mirror):
    message = failure(source="hub", id="lab/texts", config="one", evaluation_split="test")
    assert "one/test-00000-of-00001.parquet, row 0 (the first is 0): the label is not a class" in message
    assert "one of 0, 1" in message and "-1" in message


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("train/00.csv", "train/01.csv", "val.csv", "test.csv"), {"train": 2, "evaluation": 1, "test": 1}),
        (("data/c4-train.00000-of-00002.csv", "data/c4-validation.00000.csv"), {"train": 1, "evaluation": 1}),
        (("rows.csv", "dev.csv", "test_hard.csv", "notes.md"), {"train": 1, "evaluation": 1, "test_hard": 1}),
        (("train.csv", "valid.csv"), {"train": 1, "evaluation": 1}),
    ],
)
def test_paths_name_the_splits_of_a_mirror(files, splits, tmp_path, monkeypatch):
    for number, name in enumerate(files):
        path = tmp_path / "lab/set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, ["text", "label"], [[f"row {number}", "0"]])
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path))
    bundle = load(source="hub", id="lab/set")
    found = {"train": bundle.train, "evaluation": bundle.evaluation, **bundle.others}
    assert {name: len(split) for name, split in found.items()} == splits
    assert bundle.train[0]["text"] == "row 0"


def test_the_first_mirror_wins_and_mirrors_do_not_mix(mirror, tmp_path, monkeypatch):
    before = fingerprint(load(source="hub", id="lab/texts", config="one"))
    other = tmp_path / "other"
    for split in ("train", "validation"):
        write_split(other / "lab/texts/one", split, {"sentence": ["else"], "label": [0]})
    monkeypatch.setenv("WELLCOND_DATA", f"{other}:{mirror}")
    assert load(source="hub", id="lab/texts", config="one").train[0]["text"] == "else"
    assert len(load(source="hub", id="lab/pictures").train) == 6
    monkeypatch.setenv("WELLCOND_DATA", f"{mirror}:{other}")
    assert fingerprint(load(source="hub", id="lab/texts", config="one")) == before


def test_set_outside_of_the_mirror_says_what_to_do(mirror, monkeypatch):
    message = failure(source="hub", id="lab/nothing")
    assert message.startswith("lab/nothing: this cannot be read")
    assert f"a folder lab/nothing in a mirror that WELLCOND_DATA names (not in the mirror {mirror})" in message
    monkeypatch.delenv("WELLCOND_DATA")
    assert "WELLCOND_DATA is not set" in failure(source="hub", id="lab/nothing")
    monkeypatch.setenv("WELLCOND_DATA", str(mirror / "gone"))
    assert f"{mirror}/gone (no such folder)" in failure(source="hub", id="a/b")


def test_missing_configuration_split_or_column_lists_those_that_exist(mirror):
    message = failure(source="hub", id="lab/texts")
    assert "several configurations" in message and "one, two" in message
    message = failure(source="hub", id="lab/texts", config="three")
    assert "of other or several configurations" in message and "one, two" in message
    message = failure(source="hub", id="lab/pictures", evaluation_split="validation")
    assert "there is no split 'validation'" in message and "splits train, test" in message
    message = failure(source="hub", id="lab/pictures", train_split="training")
    assert "there is no split 'training'" in message
    message = failure(source="hub", id="lab/pictures", input="image")
    assert "column 'image' cannot be the input" in message and "no such column; columns img, label" in message
    message = failure(source="hub", id="lab/texts", config="two")
    assert "which column is the input is not clear" in message and "first, second" in message
    (mirror / "lab/pictures/plain/test-00000-of-00001.parquet").unlink()
    message = failure(source="hub", id="lab/pictures")
    assert "there is no split to evaluate on" in message and "splits train" in message


def test_a_set_with_its_own_script_is_not_run(tmp_path, monkeypatch):
    folder = tmp_path / "lab/script"
    folder.mkdir(parents=True)
    (folder / "script.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path))
    assert "there are no data files" in failure(source="hub", id="lab/script")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "fields", [{"id": "../secret"}, {"id": "a/../b"}, {"id": "/etc"}, {"id": "a/b", "config": ".."}]
)
def test_ids_cannot_leave_the_mirror(fields):
    with pytest.raises(ValidationError):
        resolve_config({"source": "hub", **fields})


def test_progress_bars_show_on_a_terminal(tmp_path, monkeypatch):
    file = write_csv(tmp_path / "a.csv", ["text"], [["a"]])
    with opened([file]):
        assert datasets.are_progress_bars_disabled()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with opened([file]):
        assert not datasets.are_progress_bars_disabled()


def test_training_splits_may_be_joined(mirror):
    bundle = load(source="hub", id="lab/pictures", train_split="train+test", evaluation_split="test")
    assert len(bundle.train) == 10 and len(bundle.evaluation) == 4 and not bundle.others
    assert bundle.train[6]["label"] == bundle.evaluation[0]["label"]
    assert "'gone'" in failure(source="hub", id="lab/pictures", train_split="train+gone")


def test_held_out_makes_three_splits(mirror, png):
    bundle = load(source="hub", id="lab/pictures", held_out=0.34, limit_test=2)
    contents = {
        name: {split.content(row) for row in range(len(split))}
        for name, split in (("train", bundle.train), ("evaluation", bundle.evaluation), *bundle.others.items())
    }
    assert {name: len(rows) for name, rows in contents.items()} == {"train": 4, "evaluation": 2, "test": 2}
    assert not contents["train"] & contents["evaluation"]
    assert sorted(bundle.evaluation.labels.tolist()) == [0, 1]  # of every class alike
    assert contents["test"] <= {png(seed) for seed in range(4)}
    message = failure(source="hub", id="lab/pictures", held_out=0.34, evaluation_split="train")
    assert "there is no split 'train'" in message and "with 'held_out' none to train on" in message


def test_the_evaluation_split_may_be_the_test_split_too(mirror):
    bundle = load(source="hub", id="lab/pictures", evaluation_split="test", test_split="test")
    rows = range(len(bundle.evaluation))
    assert len(bundle.others["test"]) == len(bundle.evaluation) > 0
    assert all(bundle.others["test"].content(row) == bundle.evaluation.content(row) for row in rows)
    assert "no split 'dev'" in failure(source="hub", id="lab/pictures", evaluation_split="test", test_split="dev")
    with pytest.raises(ValueError, match="held_out"):
        load(source="hub", id="lab/pictures", held_out=0.3, test_split="test")

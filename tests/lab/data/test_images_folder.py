import pickle

import pytest

from lab.data.helpers import failure, load
from wellcond.errors import DataError
from wellcond.lab.data import fingerprint

CLASSES = ("cat", "ant", "dog")


@pytest.fixture
def folder(tmp_path, png):
    for split, count in (("train", 3), ("val", 2)):
        for number, name in enumerate(CLASSES):
            target = tmp_path / "pets" / split / name
            target.mkdir(parents=True)
            for i in range(count):
                (target / f"{i}.png").write_bytes(png(seed=10 * number + i, size=(8 + i, 6)))
    return tmp_path / "pets"


def test_image_folder_sorts_classes_and_opens_on_access(folder):
    bundle = load(folder.parent, source="image_folder", path="pets")
    assert bundle.class_names == ("ant", "cat", "dog") and bundle.kind == "image" and bundle.name == "pets"
    assert (len(bundle.train), len(bundle.evaluation)) == (9, 6)
    assert bundle.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    example = bundle.train[4]
    assert example["image"].size == (9, 6) and example["image"].mode == "RGB" and example["label"] == 1
    assert pickle.loads(pickle.dumps(bundle.train))[4]["label"] == 1
    assert str(folder.parent) not in bundle.description


def test_image_folder_reads_any_format_nested_and_ignores_others(folder, png):
    (folder / "train/ant/more").mkdir()
    (folder / "train/ant/more/x.JPEG").write_bytes(png(format="JPEG"))
    (folder / "train/ant/y.bmp").write_bytes(png(mode="L", format="BMP"))
    (folder / "train/ant/notes.txt").write_text("not an image")
    (folder / "train/ant/.DS_Store").write_text("hidden")
    (folder / "train/readme.txt").write_text("not a class")
    bundle = load(source="image_folder", path=str(folder))
    assert len(bundle.train) == 11
    assert {example["image"].mode for example in (bundle.train[i] for i in range(5))} == {"RGB", "L"}


def test_image_folder_keeps_the_test_split_beside_validation(folder, png):
    for name in CLASSES:
        (folder / "test" / name).mkdir(parents=True)
        (folder / "test" / name / "0.png").write_bytes(png())
    bundle = load(source="image_folder", path=str(folder))
    assert list(bundle.others) == ["test"] and len(bundle.others["test"]) == 3
    assert set(fingerprint(bundle)) == {"train", "evaluation", "test"}


def test_a_folder_of_classes_is_split_by_itself(folder):
    flat = folder / "train"
    bundle = load(source="image_folder", path=str(flat), evaluation_fraction=0.34)
    assert bundle.class_names == ("ant", "cat", "dog") and bundle.name == "train" and not bundle.others
    assert (bundle.train.labels.tolist(), bundle.evaluation.labels.tolist()) == ([0, 0, 1, 1, 2, 2], [0, 1, 2])
    assert not set(bundle.train.files) & set(bundle.evaluation.files)
    assert "evaluated on 0.34 of the images of every class, set aside by seed 0: 6 training" in bundle.description
    again = load(source="image_folder", path=str(flat), evaluation_fraction=0.34)
    assert fingerprint(again) == fingerprint(bundle)
    assert "too few examples" in failure(source="image_folder", path=str(flat))  # 0.1 of 3
    for name in CLASSES:
        for number in range(3, 10):
            (flat / name / f"{number}.png").write_bytes((flat / name / "0.png").read_bytes())
    assert "evaluated on 0.1 of the images" in load(source="image_folder", path=str(flat)).description


def test_missing_folders_are_named(folder):
    message = failure(folder.parent, source="image_folder", path="pest")
    assert f"{folder.parent}/pest: no such file or folder" in message and "pets" in message
    assert "found:    in" in failure(source="image_folder", path=str(folder / "no/where"))
    (folder / "val").rename(folder / "other")
    message = failure(source="image_folder", path=str(folder))
    assert "there is no split to evaluate on" in message and "val, validation, test" in message
    (folder / "other").rename(folder / "val")
    (folder / "train").rename(folder / "other")
    assert "train: no such folder" in failure(source="image_folder", path=str(folder))


def test_errors_come_before_the_files_are_listed(folder, monkeypatch):
    (folder / "val/dog").rename(folder / "val/cow")
    monkeypatch.setattr("os.walk", lambda *_: pytest.fail("files are listed"))
    assert "val: ant, cat, cow" in failure(source="image_folder", path=str(folder))


def test_empty_class_is_named(folder):
    for split in ("train", "val"):
        (folder / split / "empty").mkdir()
    (folder / "train/empty/list.txt").write_text("x")
    message = failure(source="image_folder", path=str(folder))
    assert f"{folder}/train/empty: this class has no images" in message


def test_images_outside_of_classes_are_named(folder, png, tmp_path):
    (folder / "train/loose.png").write_bytes(png())
    message = failure(source="image_folder", path=str(folder))
    assert "not sorted into classes" in message and "loose.png" in message
    (tmp_path / "bare/train").mkdir(parents=True)
    (tmp_path / "bare/val").mkdir()
    assert f"{tmp_path}/bare/train: the images are not sorted" in failure(
        source="image_folder", path=str(tmp_path / "bare")
    )


@pytest.mark.parametrize("kept", [0, 20, 100])
def test_unreadable_image_is_named_on_access(folder, png, kept):
    broken = folder / "train/cat/1.png"
    broken.write_bytes(png()[:kept])
    bundle = load(source="image_folder", path=str(folder))
    with pytest.raises(DataError, match=rf"{broken}(?s:.)*{kept} bytes"):
        bundle.train[4]
    assert bundle.train[3]["label"] == 1

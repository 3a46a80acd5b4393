"""Data that a user has in Python: datasets of torch and of Hugging Face, functions in a file, folders."""

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from lab.data.helpers import load, write_csv
from wellcond.errors import DataError, RecipeError
from wellcond.lab.data import held_data, hold_again, hold_data, load_data, own, side_of, source_of

LABELS = [0, 1, 2] * 8


class Photos(Dataset):
    """Labelled images of torchvision's form: (PIL image, number), `targets` and `classes`."""

    classes = ["cat", "dog", "owl"]

    def __init__(self, sizes=((20, 20),) * 24, transform=None):
        source = np.random.default_rng(0)
        self.images = [source.integers(0, 256, (high, wide, 3), dtype=np.uint8) for wide, high in sizes]
        self.targets = LABELS[: len(sizes)]
        self.transform = transform
        self.read = []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.read.append(index)
        image = Image.fromarray(self.images[index])
        return (self.transform(image) if self.transform else image), self.targets[index]


def held(data, **options):
    config = hold_data(data, **options)
    return load_data(config)


def test_a_torch_dataset_keeps_its_images_labels_and_class_names():
    photos = Photos()
    data = held(photos)
    assert (data.name, data.kind, data.class_names) == ("Photos", "image", ("cat", "dog", "owl"))
    assert len(data.train) + len(data.evaluation) == 24
    row = int(data.train.rows[3])
    example = data.train[3]
    assert np.array_equal(np.array(example["image"]), photos.images[row]) and example["label"] == photos.targets[row]
    assert side_of(data.train) == 20


def test_targets_save_reading_every_example():
    photos = Photos(((20, 20),) * 600)
    photos.targets = LABELS * 25
    held(photos)
    assert len(set(photos.read)) < 60


def test_targets_that_examples_contradict_are_not_believed():
    class Shifted(Photos):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, (label + 1) % 3

    data = held(Shifted())
    assert [int(data.train[index]["label"]) for index in range(len(data.train))] == [
        (LABELS[row] + 1) % 3 for row in data.train.rows.tolist()
    ]


def test_part_of_a_dataset_and_splits_by_name_and_place():
    photos = Photos()
    pair = held((Subset(photos, range(9)), Subset(photos, [9, 10, 11])))
    assert (len(pair.train), len(pair.evaluation), pair.name) == (9, 3, "Photos")
    named = held(
        {"train": Subset(photos, range(6)), "val": Subset(photos, range(6, 9)), "test": Subset(photos, range(9, 12))}
    )
    assert [len(named.train), len(named.evaluation), len(named.others["test"])] == [6, 3, 3]
    assert named.others["test"].labels.tolist() == LABELS[9:12]


def test_a_random_transform_gives_the_same_example_again():
    def shake(image):
        return torch.rand(3, 4, 4) + random.random() + np.random.random()

    data = held(Photos(transform=shake))
    state = torch.get_rng_state()
    first = data.train[2]["image"]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(data.train[2]["image"], first) and not torch.equal(data.train[3]["image"], first)


def test_tensors_arrays_texts_and_tokens():
    images = torch.arange(24 * 48, dtype=torch.float32).view(24, 3, 4, 4)
    data = held(TensorDataset(images, torch.tensor(LABELS)))
    assert data.kind == "image" and torch.equal(data.train[0]["image"], images[int(data.train.rows[0])])
    arrays = [{"pixels": np.full((6, 5, 1), 7, np.uint8), "label": "ab"[number % 2]} for number in range(20)]
    data = held(arrays)
    assert data.train[0]["image"].size == (5, 6) and data.class_names == ("a", "b")
    texts = [{"text": f"story {number}"} for number in range(20)]
    data = held(texts)
    assert data.kind == "text" and data.train.labels is None and data.train[0]["text"].startswith("story ")
    pairs = [{"a": "x", "b": "y", "label": 0.5} for _ in range(20)]
    data = held(pairs, input=["a", "b"], label_kind="number")
    assert (data.train[0]["text"], data.train[0]["text_pair"]) == (
        "x",
        "y",
    ) and data.train.labels.dtype == torch.float64
    tokens = [(torch.arange(1 + number), number % 2) for number in range(20)]
    data = held(tokens)
    assert (data.kind, data.vocabulary_size) == ("tokens", 20)
    assert data.train[0]["tokens"].tolist() == [0, *[-1] * 19]


def test_hugging_face_datasets_are_read_as_tables(png, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    path = tmp_path / "one.png"
    path.write_bytes(png(3, (10, 12)))
    rows = {"img": [{"bytes": png(number), "path": None} for number in range(11)], "label": [0, 1] * 6}
    rows["img"].append({"bytes": None, "path": str(path)})  # as `load_dataset("imagefolder")` has them
    made = datasets.Dataset.from_dict(rows, features=features)
    data = held(made, name="photos")
    assert (data.name, data.class_names) == ("photos", ("cat", "dog")) and isinstance(data.train, own.TableDataset)
    assert data.train[len(data.train) - 1]["image"].size == (10, 12)
    splits = datasets.DatasetDict(train=made.select([0, 1, 2, 3]), test=made.select([4, 5]))
    both = held(splits)
    assert len(both.train) == 4 and both.evaluation.labels.tolist() == [0, 1]


def test_a_transform_of_hugging_face_is_applied():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": ["a", "b"] * 10, "label": [0, 1] * 10})
    made.set_transform(lambda rows: {**rows, "text": [text.upper() for text in rows["text"]]})
    assert held(made).train[0]["text"] in "AB"


def test_equal_data_have_equal_settings_and_another_process_must_be_given_them(monkeypatch):
    config = hold_data(Photos())
    assert hold_data(Photos()) == config != hold_data(Photos(((20, 20),) * 15))
    data = held_data(config)
    monkeypatch.setattr(own, "_HELD", {})
    with pytest.raises(DataError, match="another Python process") as caught:
        load_data(config)
    assert config.sha256 in caught.value.expected
    hold_again(config, data)
    assert load_data(config) is data


@pytest.mark.parametrize(
    "given",
    [
        iter([1, 2]),
        type("Stream", (IterableDataset,), {"__iter__": lambda self: iter([])})(),
        {"validation": Photos()},
        [(1.5, {"no": "input"})] * 20,
        [{"a": "x", "b": "y"}] * 20,
        [(torch.rand(7), 1)] * 20,
        torch.rand(5, 3, 8, 8),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_was_found(given):
    with pytest.raises(DataError) as caught:
        hold_data(given)
    assert caught.value.expected and caught.value.found


def test_an_odd_label_or_input_is_named_by_its_row():
    rows = [("a", 0), ("b", 1)] * 10
    with pytest.raises(DataError) as caught:
        hold_data((rows, [("a", 0), ("b", 7)]))
    assert caught.value.row == 1 and caught.value.found == "7"
    rows[5] = (3.5, 1)
    with pytest.raises(DataError, match="row 5"):
        hold_data((rows, rows[:2]))


FACTORY = """
from torch.utils.data import TensorDataset
import torch, pathlib
pathlib.Path(__file__).with_name("ran").touch()
def make(count=20):
    return TensorDataset(torch.zeros(count, 1, 8, 8), torch.arange(count) % 2)
"""


def test_a_function_in_a_file_runs_only_if_it_is_trusted(tmp_path):
    (tmp_path / "mine.py").write_text(FACTORY)
    fields = {"source": "factory", "factory": "mine.py:make", "arguments": {"count": 30}}
    with pytest.raises(RecipeError, match="--trust-local-code"):
        load(tmp_path, **fields)
    assert not (tmp_path / "ran").exists()
    data = load_data(own.FactoryConfig(**fields), base=tmp_path, local_code=True)
    assert len(data.train) == 26 and data.name == "mine-make"
    with pytest.raises(DataError) as caught:
        load_data(own.FactoryConfig(**fields | {"arguments": {"size": 1}}), base=tmp_path, local_code=True)
    assert caught.value.found.startswith("TypeError")


def test_sources_of_what_a_user_names(tmp_path, png, monkeypatch):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.png").write_bytes(png())
    assert source_of(tmp_path / "photos", evaluation_fraction=0.5).path == str(tmp_path / "photos")
    rows = [[f"text {number}", number % 2] for number in range(20)]
    (tmp_path / "tables").mkdir()
    files = [write_csv(tmp_path / "tables" / name, ["text", "label"], rows) for name in ("train.csv", "dev.csv")]
    found = source_of(tmp_path / "tables")
    assert (found.train, found.evaluation) == ([str(files[0])], [str(files[1])])
    assert source_of(files[0], label="label").train == str(files[0])
    assert source_of("uoft-cs/cifar10").id == "uoft-cs/cifar10"
    assert source_of({"source": "digits"}).source == "digits"
    assert source_of(f"{tmp_path}/mine.py:make").local_code == f"{tmp_path}/mine.py:make"
    assert source_of(Photos(), name="mine").name == "mine"
    with pytest.raises(DataError, match="no such file or folder"):
        source_of(tmp_path / "nowhere")


SHORT = ("training.length={steps: 2}", "training.batch_size=4", "evaluation.every={steps: 2}")


def test_a_comparison_takes_a_dataset_and_a_function(tmp_path, monkeypatch):
    from wellcond.lab import compare

    monkeypatch.chdir(tmp_path)
    changes = [*SHORT, "model.arguments={patch_size: 4, embed_dim: 8, depth: 1, num_heads: 2}"]
    options = {"methods": "default,gaussian", "seeds": 1, "settings": changes, "at_once": 1, "cpu": True}
    result = compare(data=Photos(), **options)
    written = json.loads(next(tmp_path.glob("runs/*photos*/gaussian/seed0/run.json")).read_text())
    assert result.complete and written["status"] == "finished"
    assert (written["config"]["data"]["source"], written["config"]["task"]["image_size"]) == ("object", 32)
    before = next(tmp_path.glob("runs/*photos*/gaussian/seed0/run.json")).stat().st_mtime_ns
    compare(data=Photos(), **options)  # another object of the same content: nothing is repeated
    assert next(tmp_path.glob("runs/*photos*/gaussian/seed0/run.json")).stat().st_mtime_ns == before
    (tmp_path / "mine.py").write_text(FACTORY)
    assert compare(data=f"{tmp_path}/mine.py:make", **options).complete

"""Reading Pathfinder images as they were published; the files are written here, from generated images."""

import os

import numpy as np
import pytest
import torch

from lab.data.helpers import failure, load
from wellcond.lab.data.pathfinder import PathfinderOptions, pathfinder

DIFFICULTY = "curv_contour_length_14"


@pytest.fixture(scope="module")
def generated():
    options = PathfinderOptions(image_size=16, contour_length=4)
    return pathfinder(40, options, torch.Generator().manual_seed(0))


def metadata_rows(labels, folder):
    return [f"imgs/{folder} sample_{i}.png {i} {label} 1.0 4 1 2 0.5 1 1".split() for i, label in enumerate(labels)]


@pytest.fixture
def published(tmp_path, generated):
    """Two folders of 20 images; the metadata are lines of text."""
    image_module = pytest.importorskip("PIL.Image")
    root = tmp_path / "pathfinder16" / DIFFICULTY
    (root / "metadata").mkdir(parents=True)
    for folder in range(2):
        (root / "imgs" / str(folder)).mkdir(parents=True)
        part = slice(20 * folder, 20 * folder + 20)
        for number, image in enumerate(generated.inputs[part, 0].numpy()):
            image_module.fromarray(image).save(root / "imgs" / str(folder) / f"sample_{number}.png")
        rows = metadata_rows(generated.labels[part].tolist(), folder)
        (root / f"metadata/{folder}.npy").write_text("".join(" ".join(row) + "\n" for row in rows))
    return root


def load_published(root, **fields):
    return load(root.parents[1], source="pathfinder_folder", path="pathfinder16", **fields)


def fail(root, **fields):
    return failure(root.parents[1], source="pathfinder_folder", path="pathfinder16", **fields)


def as_set(*splits):
    return {
        (split.labels[i].item(), bytes(np.asarray(split[i]["image"]))) for split in splits for i in range(len(split))
    }


def test_the_splits_hold_every_image_once_with_its_label(published, generated):
    bundle = load_published(published)
    assert [len(bundle.train), len(bundle.evaluation), len(bundle.others["test"])] == [32, 4, 4]
    assert bundle.kind == "image" and bundle.class_names == ("apart", "joined")
    expected = {(int(y), bytes(x)) for x, y in zip(generated.inputs.numpy(), generated.labels, strict=True)}
    assert as_set(bundle.train, bundle.evaluation, bundle.others["test"]) == expected
    assert bundle.train.inputs.shape == (32, 1, 16, 16) and bundle.train.inputs.dtype == torch.uint8
    assert str(published) not in bundle.description


def test_a_mirror_holds_the_folder(published, tmp_path, monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", str(published.parents[1]))
    (tmp_path / "recipes").mkdir()
    assert len(load(tmp_path / "recipes", source="pathfinder_folder", path="pathfinder16").train) == 32


BAD_LINES = {
    "label": ("imgs/0 sample_3.png 3 2 1.0", "KeyError: '2'"),
    "short": ("imgs/0 sample_3.png 3", "not enough values"),
    "missing image": ("imgs/0 sample_99.png 3 1 1.0", "sample_99.png"),
    "missing folder": ("imgs/7 sample_3.png 3 1 1.0", "FileNotFoundError"),
    "out by folder": ("../.. sample_3.png 3 1 1.0", "leads out of its folder"),
    "absolute folder": ("/etc passwd 3 1 1.0", "leads out of its folder"),
    "out by name": ("imgs/0 ../../../secret.png 3 1 1.0", "leads out of its folder"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_rows_are_named(published, case):
    line, message = BAD_LINES[case]
    file = published / "metadata/0.npy"
    lines = file.read_text().splitlines()
    lines[3] = line
    file.write_text("\n".join(lines))
    found = fail(published)
    named = "line 4" if len(line.split()) < 4 or case == "label" else "/".join(line.split()[:2])
    assert f"{file}, {named}: " in found and message in found


@pytest.mark.parametrize("rows", [np.zeros((3, 5)), np.array([["imgs/1", "sample_0.png", 0, 1]], dtype=object)])
def test_metadata_are_text(published, rows):
    np.save(published / "metadata/1.npy", rows)
    assert f"{published}/metadata/1.npy, line 1" in fail(published)


def test_empty_and_missing_metadata(published):
    (published / "metadata/1.npy").unlink()
    (published / "metadata/0.npy").write_text("")
    assert "at least ten, of one size" in fail(published) and "found:    0 images" in fail(published)
    (published / "metadata/0.npy").unlink()
    assert "found:    0 images" in fail(published)
    assert f"in {published.parent}: {DIFFICULTY}" in fail(published, difficulty="curv_baseline")


def cut_short(file, png):
    file.write_bytes(file.read_bytes()[:60])


def link_out(file, png):
    outside = file.parents[4] / "outside.png"
    outside.write_bytes(png(size=(16, 16), mode="L"))
    file.unlink()
    os.symlink(outside, file)


def removed(file, png):
    file.unlink()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (cut_short, "the image cannot be read"),
        (link_out, "leads out of its folder"),
        (removed, "FileNotFoundError"),
    ],
)
def test_bad_images_are_named(published, png, spoil, message):
    spoil(published / "imgs/1/sample_7.png", png)
    found = fail(published)
    assert "1.npy, imgs/1/sample_7.png: " in found and message in found


def test_images_of_another_size_are_refused(published, png):
    (published / "imgs/1/sample_7.png").write_bytes(png(size=(20, 16), mode="L"))
    assert "40 images of sizes" in fail(published)

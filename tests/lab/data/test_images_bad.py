"""Image files that are not what they should be, through whole runs."""

import io

import numpy as np
import pytest
from PIL import Image

from lab.helpers import make_recipe
from wellcond.errors import WellcondError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.train.prepare import prepare_task
from wellcond.lab.train.run import Job, run_job

MODEL = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
ONE_BY_ONE = {"resized_crop": (0.5, 1.0)}


def encoded(mode="RGB", size=8, seed=0, format="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    stream = io.BytesIO()
    (image if mode == "RGB" else image.convert("L" if mode in "IF" else mode).convert(mode)).save(stream, format)
    return stream.getvalue()


@pytest.fixture
def pets(tmp_path):
    for split, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("ant", "cat")):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            for i in range(count):
                (tmp_path / "pets" / split / name / f"{i}.png").write_bytes(encoded(seed=10 * number + i))
    return tmp_path / "pets"


def recipe(pets, augmentation=None, workers=0, arguments=MODEL, **task):
    return make_recipe(
        task={"name": "image_classification"} | task,
        data={"source": "image_folder", "path": str(pets)},
        model={"name": "timm:vit_tiny_patch16_224", "arguments": arguments},
        augmentation=augmentation or {},
        training={"length": {"steps": 2}, "batch_size": 4, "workers": workers},
        tracking={"weights_every": None, "jacobian_points": 0},
    )


def train(pets, *arguments, **fields):
    method = MethodSettings(init="default")
    return run_job(Job(recipe(pets, *arguments, **fields), method, 0, pets.parent / "run", cpu=True))


def failure(pets, *arguments, **fields):
    with pytest.raises(WellcondError) as caught:
        train(pets, *arguments, **fields)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [encoded()[:80], b"", b"a text, whatever its name says"])
@pytest.mark.parametrize("augmentation", [{}, ONE_BY_ONE])
@pytest.mark.parametrize("place", ["train/cat/2.png", "val/ant/1.png"])
def test_a_corrupt_image_is_named(pets, content, augmentation, place):
    (pets / place).write_bytes(content)
    message = failure(pets, augmentation)
    assert f"{pets / place}: the image cannot be read" in message and f"{len(content)} bytes" in message


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_a_corrupt_image_is_named_by_a_worker(pets):
    for name in ("ant", "cat"):
        (pets / f"train/{name}/3.png").write_bytes(b"\x89PNG")
    assert "3.png: the image cannot be read" in failure(pets, ONE_BY_ONE, workers=1)


@pytest.mark.parametrize("augmentation", [{}, ONE_BY_ONE])
def test_other_channels_in_a_set_of_colour_are_converted(pets, augmentation):
    for number, mode in enumerate(("L", "RGBA", "P", "LA")):  # also the first image of all
        (pets / f"train/ant/{number}.png").write_bytes(encoded(mode, seed=number))
    (pets / "train/cat/0.png").unlink()
    (pets / "train/cat/0.jpg").write_bytes(encoded("CMYK", format="JPEG"))
    task = prepare_task(recipe(pets, augmentation), seed=0, base=None)
    assert task.channels == 3 and task.train.fetch([(k, 0) for k in range(8)])["image"].shape == (8, 3, 8, 8)
    assert train(pets, augmentation)["status"] == "finished"


@pytest.mark.parametrize("augmentation", [{}, ONE_BY_ONE])
@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_refused_by_name(pets, mode, augmentation):
    (pets / "train/cat/1.png").unlink()
    (pets / "train/cat/1.tif").write_bytes(encoded(mode, format="TIFF"))
    assert f"{pets}/train/cat/1.tif has 32-bit pixels" in failure(pets, augmentation)


def test_images_smaller_than_the_patch(pets):
    wide = MODEL | {"patch_size": 16}
    message = failure(pets, arguments=wide)
    assert "model: timm:vit_tiny_patch16_224 does not take the data of this task" in message and "8 x 8" in message
    # A size that was asked for is met by enlarging.
    assert prepare_task(recipe(pets, image_size=16), seed=0, base=None).train.fetch([(0, 0)])["image"].shape[-1] == 16

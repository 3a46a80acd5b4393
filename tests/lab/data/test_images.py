import io

import numpy as np
import pytest
import torch

from wellcond.errors import DataError
from wellcond.lab.data import as_tensor_images, to_channels
from wellcond.lab.data import images as images_of_data
from wellcond.lab.data.base import progress_to
from wellcond.lab.data.images import decode_image

Image = pytest.importorskip("PIL.Image")


class Images:
    """A split of given images."""

    def __init__(self, images):
        self.images, self.labels = images, torch.arange(len(images))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": index}


def random_image(seed=0, shape=(6, 8, 3)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def test_whole_split_becomes_one_tensor():
    images, seen = [random_image(seed) for seed in range(5)], []
    with progress_to(lambda *now: seen.append(now)):
        result = as_tensor_images(Images(images), channels=3)
    assert result.dtype == torch.uint8 and result.shape == (5, 3, 6, 8)
    assert result[2].permute(1, 2, 0).numpy().tolist() == np.asarray(images[2]).tolist()
    assert seen[-1] == ("decoding images", 5, 5)


def test_sizes_that_differ_or_exceed_the_limit_give_none(monkeypatch):
    images = [random_image(), random_image(shape=(6, 9, 3))]
    assert as_tensor_images(Images(images), channels=3) is None
    same = Images([random_image(1), random_image(2)])
    for limit, fits in ((2 * 6 * 8 * 3 - 1, False), (2 * 6 * 8 * 3, True)):
        monkeypatch.setattr(images_of_data, "BYTE_LIMIT", limit)
        assert (as_tensor_images(same, channels=3) is not None) == fits


def test_size_resizes_the_shorter_side_and_cuts_the_centre():
    images = [random_image(shape=(6, 9, 3)), random_image(shape=(31, 7, 3)), random_image(shape=(4, 4, 3))]
    result = as_tensor_images(Images(images), channels=3, size=4)
    assert result.shape == (3, 3, 4, 4)
    assert result[2].permute(1, 2, 0).numpy().tolist() == np.asarray(images[2]).tolist()
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 4:8] = 255
    assert as_tensor_images(Images([Image.fromarray(wide)]), channels=3, size=4).min() == 255


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_8_bit_mode_converts(mode, channels):
    image = to_channels(random_image().convert(mode), channels)
    assert image.mode == {1: "L", 3: "RGB"}[channels]


def test_grey_and_rgb_agree_between_images_and_tensors():
    image = random_image()
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    grey = torch.from_numpy(np.array(to_channels(image, 1)))
    assert to_channels(tensor, 1)[0].equal(grey)
    assert to_channels(to_channels(image, 1), 3).getpixel((1, 2)) == (int(grey[2, 1]),) * 3


def test_16_bit_grey_keeps_its_upper_bits():
    pixels = np.array([[0, 255, 256], [32768, 65280, 65535]], dtype=np.uint16)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    image = to_channels(decode_image(stream.getvalue(), "x"), 1)
    assert np.asarray(image).tolist() == [[0, 0, 1], [128, 255, 255]]


def test_orientation_in_exif_is_applied():
    image, stream = random_image(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(stream, format="PNG", exif=exif)
    assert image.size == (8, 6) and decode_image(stream.getvalue(), "x").size == (6, 8)


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(DataError, match=r"32-bit pixels(?s:.)*mode 'F'"):
        to_channels(Image.new("F", (2, 2)), 3)
    with pytest.raises(DataError, match=r"3, or 1(?s:.)*found: +2"):
        to_channels(torch.zeros(2, 4, 4), 3)
    with pytest.raises(DataError, match=r"1, or 1(?s:.)*found: +3"):
        to_channels(torch.zeros(3, 4, 4), 1)


def test_transparent_palette_converts_without_a_warning():
    stream = io.BytesIO()
    random_image().convert("P").save(stream, format="PNG", transparency=bytes([0, 255, 3]))
    assert to_channels(decode_image(stream.getvalue(), "x"), 3).mode == "RGB"

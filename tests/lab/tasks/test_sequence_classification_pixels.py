import numpy as np
import pytest
import torch
from PIL import Image

from lab.helpers import ListSplit, bundle, byte_images, pil_images
from lab.sequence_helpers import classify, everything, ids
from wellcond.errors import RecipeError
from wellcond.lab.data import TensorDataset


def colours():
    """An image of random colours and all greys."""
    random = np.random.default_rng(0).integers(0, 256, (64, 256, 3), dtype=np.uint8)
    return np.concatenate([random, np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 256, 3)])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_pixels_are_the_grey_values_of_pil_row_by_row(as_tensor):
    pixels = colours()
    image = Image.fromarray(pixels)
    given = torch.from_numpy(pixels).permute(2, 0, 1) if as_tensor else image
    task = classify(bundle("image", ListSplit([{"image": given, "label": label} for label in (0, 1)])), black="visible")
    grey = np.array(image.convert("L")).astype(int)
    exact = pixels.astype(float) @ np.array([0.299, 0.587, 0.114])
    assert ids(task.train)[0] == (grey + 1).flatten().tolist()
    assert np.abs(grey - exact).max() <= 0.502  # rounded, but for ties that fixed point decides
    assert set(grey.flatten()) == set(range(256)) and task.length == grey.size


@pytest.mark.parametrize(("black", "shift", "vocabulary"), [("masked", 0, 256), ("visible", 1, 257)])
def test_black_pixels_are_masked_as_in_the_release_or_seen(black, shift, vocabulary):
    images = torch.tensor([[[[0, 7], [255, 0]]], [[[1, 1], [1, 1]]]], dtype=torch.uint8)
    data = bundle("image", TensorDataset("image", images, torch.tensor([0, 1])), classes=2)
    task = classify(data, black=black, pad_to=6)
    batch = everything(task.evaluation)
    assert batch["input_ids"].tolist() == [[shift, 7 + shift, 255 + shift, shift, 0, 0], [1 + shift] * 4 + [0, 0]]
    first = [0, 1, 1, 0, 0, 0] if black == "masked" else [1, 1, 1, 1, 0, 0]
    assert batch["attention_mask"].tolist() == [first, [1, 1, 1, 1, 0, 0]]
    needed = {"vocab_size": vocabulary, "num_labels": 2, "pad_token_id": 0}
    assert task.model_arguments("hf") == needed
    assert task.model_arguments("wellcond") == {"vocab_size": vocabulary, "num_labels": 2, "length": 6}
    assert batch["input_ids"].dtype == torch.int64 and task.train.tokens[""].dtype == torch.int16


def test_images_are_resized_as_pil_does_it_with_an_average_over_what_a_pixel_covers():
    split = pil_images([(32, 32), (32, 32), (48, 32)])
    task = classify(bundle("image", split), image_size=16, black="visible")
    for row, sample in enumerate(split.examples[:2]):
        small = sample["image"].convert("L").resize((16, 16), Image.Resampling.BILINEAR)
        assert ids(task.train)[row] == (np.array(small).astype(int) + 1).flatten().tolist()
    wide = split.examples[2]["image"].convert("L").resize((24, 16), Image.Resampling.BILINEAR).crop((4, 0, 20, 16))
    assert ids(task.train)[2] == (np.array(wide).astype(int) + 1).flatten().tolist()
    assert task.length == 256


@pytest.mark.parametrize(
    ("split", "fields", "message"),
    [
        (
            pil_images([(4, 4), (5, 4)]),
            {},
            "training split: .* each of 16 pixels; set task.image_size",
        ),
        (byte_images(4, size=8), {"image_size": 4}, "each of 16 pixels"),
        (pil_images([(4, 4)] * 2), {"pad_to": 15}, "task.pad_to: expected at least the 16 tokens of some, found 15"),
        (TensorDataset("image", torch.randn(2, 1, 3, 3), torch.tensor([0, 1])), {}, "expected images of bytes"),
    ],
)
def test_images_that_are_no_sequences_of_one_length_are_refused(split, fields, message):
    with pytest.raises(RecipeError, match=message):
        classify(bundle("image", split), **fields)

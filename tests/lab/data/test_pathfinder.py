"""The Pathfinder generator: its geometry, checked independently, and its statistics beside published images."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import ndimage
from scipy.spatial.distance import cdist

from lab.data.helpers import load
from wellcond.errors import DataError
from wellcond.lab.data.pathfinder import (
    PADDLE_LENGTH,
    PADDLE_MARGIN,
    SCALE,
    PathfinderOptions,
    make_strokes,
    pathfinder,
    pathfinder_scenes,
)

MIRROR = Path(os.environ.get("WELLCOND_DATA") or Path(__file__).parents[3] / "../shared/data")
SMALL = {"image_size": 16, "contour_length": 4}


def make(count=100, seed=0, **fields):
    return pathfinder(count, PathfinderOptions(**fields), torch.Generator().manual_seed(seed))


def scenes_of(count=100, seed=0, **fields):
    return pathfinder_scenes(count, PathfinderOptions(**fields), torch.Generator().manual_seed(seed))


def ends_of_paddles(paddles):
    """(..., 2, 2): both ends of every paddle, in pixels."""
    offset = np.ceil(SCALE * PADDLE_LENGTH * make_strokes().unit[paddles[..., 2]] - 1e-9) / SCALE
    return np.stack([paddles[..., :2], paddles[..., :2] + offset], -2)


def test_the_seed_alone_decides_every_byte():
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert first.inputs.equal(again.inputs) and first.labels.equal(again.labels)
    assert not first.inputs.equal(other.inputs)
    assert first.inputs.shape == (100, 1, 32, 32) and first.inputs.dtype == torch.uint8
    assert first.inputs.amax((1, 2, 3)).eq(255).all() and first.labels.dtype == torch.int64


def test_labels_are_balanced_from_the_beginning_and_otherwise_random():
    labels = make(101, **SMALL).labels
    assert labels[:100].view(50, 2).sum(1).eq(1).all()
    assert 10 < int(labels[:100:2].sum()) < 40


@pytest.mark.parametrize("fields", [{}, {"contour_length": 6}, SMALL], ids=["14", "6", "16 pixels"])
def test_labels_follow_from_which_curves_end_at_the_markers(fields):
    """Chains of paddles are found again from the paddles alone: each is near the one before it and far from others."""
    options = PathfinderOptions(**fields)
    scenes = scenes_of(**fields)
    assert scenes.labels.tolist() == make(**fields).labels.tolist()
    ends = ends_of_paddles(scenes.curves)
    assert ends.min() >= 0 and ends.max() <= options.image_size - 1
    for image in range(len(scenes.labels)):
        tips = []
        for curve in ends[image]:
            assert len(curve) == options.contour_length
            gaps = [cdist(a, b).min() for a, b in zip(curve, curve[1:], strict=False)]
            # Two margins, and what rounding to pixels adds or takes.
            assert max(gaps) <= 2 * PADDLE_MARGIN + 2.5
            tips.append({tuple(curve[0, 0]), tuple(curve[-1, 0])})
        first, last = (tuple(marker) for marker in scenes.markers[image])
        on_one = any({first, last} == pair for pair in tips)
        on_both = any({first in pair, last in pair} == {True, False} for pair in tips)
        assert on_one if scenes.labels[image] else on_both


def test_markers_are_the_discs_of_the_image():
    images, scenes = make(contour_length=6), scenes_of(contour_length=6)
    for image, markers in zip(images.inputs[:, 0].numpy(), scenes.markers, strict=True):
        for row, column in markers:
            # Radius 1.5 around the upper left of the pixel: its 2 x 2 neighbourhood is lit as by no paddle.
            assert image[row - 1 : row + 1, column - 1 : column + 1].min() > 100


def test_margins_keep_paddles_apart():
    middles = ends_of_paddles(scenes_of().curves).mean(-2).reshape(100, -1, 2)
    nearest = [(cdist(m, m) + 99 * np.eye(len(m))).min() for m in middles]
    # As published, a paddle may cross the one that the other curve grew last.
    assert np.median(nearest) > 1.5
    anywhere = np.random.default_rng(0).uniform(1, 31, middles.shape)
    assert np.median([(cdist(m, m) + 99 * np.eye(len(m))).min() for m in anywhere]) < 1


def test_without_distractors_only_the_two_curves_are_drawn():
    full, bare = scenes_of(contour_length=6), scenes_of(contour_length=6, num_distractors=0)
    assert full.shown.shape == (100, 10) and 1 < full.shown.sum(1).mean() < 9
    assert bare.shown.shape == (100, 0)
    np.testing.assert_array_equal(full.curves[..., :2], bare.curves[..., :2])


def test_curves_that_cannot_fit_end_in_an_error():
    with pytest.raises(DataError, match="do not fit into images of"):
        make(2, image_size=16, contour_length=30)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"contour_length": 1}, "greater than or equal to 2"),
        ({"contour": 14}, "Did you mean 'contour_length'"),
    ],
)
def test_options_are_checked(fields, message):
    with pytest.raises(ValidationError, match=message):
        PathfinderOptions(**fields)


def statistics(images):
    """(n, s): brightness, ink, pieces, the mean of 16 tiles, and power at six spatial frequencies."""
    images = images.astype(np.float64)
    frequency = np.fft.fftfreq(32) * 32
    radius = np.hypot(frequency[:, None], frequency).round()
    power = np.abs(np.fft.fft2(images)) ** 2
    columns = [images.mean((1, 2)), (images > 0).mean((1, 2)), (images > 20).mean((1, 2)), images.std((1, 2))]
    columns.append([ndimage.label(image > 60, np.ones((3, 3)))[1] for image in images])
    columns += list(images.reshape(-1, 4, 8, 4, 8).mean((2, 4)).reshape(-1, 16).T)
    columns += [power[:, radius == r].mean(1) for r in (1, 2, 4, 8, 12, 16)]
    return np.stack(columns, 1)


@pytest.fixture(scope="module", params=[14, 6])
def both(request):
    file = MIRROR / "pathfinder32" / f"pathfinder32_cl{request.param}.npz"
    if not file.is_file():
        pytest.skip(f"no published images at {file}: set WELLCOND_DATA to a folder that holds pathfinder32")
    with np.load(file) as archive:
        theirs, their_labels = archive["x"][:700], archive["y"][:700]
    ours = make(700, seed=5, contour_length=request.param)
    return ours.inputs[:, 0].numpy(), ours.labels.numpy(), theirs, their_labels


@pytest.mark.parametrize("label", [0, 1])
def test_statistics_are_those_of_published_images(both, label):
    ours, labels, theirs, their_labels = both
    a, b = statistics(ours[labels == label]), statistics(theirs[their_labels == label])
    error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
    assert np.abs((a.mean(0) - b.mean(0)) / error).max() < 4
    # Brightness, ink and contrast, whose errors are small, also within a few per cent.
    np.testing.assert_allclose(a.mean(0)[:4], b.mean(0)[:4], rtol=0.03)
    histograms = [np.bincount(x.ravel() // 8, minlength=32) / x.size for x in (ours, theirs)]
    assert np.abs(histograms[0] - histograms[1]).sum() / 2 < 0.01


def test_simple_statistics_do_not_tell_ours_from_theirs_nor_the_label(both):
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    ours, labels, theirs, _ = both
    model = make_pipeline(StandardScaler(), linear_model.LogisticRegression(max_iter=2000))
    x, y = statistics(ours), statistics(theirs)
    assert cross_val_score(model, x, labels, cv=5).mean() < 0.56
    count = min(len(x), len(y))
    joined = np.concatenate([x[:count], y[:count]])
    assert cross_val_score(model, joined, np.repeat([0, 1], count), cv=5).mean() < 0.57


def test_small_images_do_not_occur_in_two_splits():
    config = {"image_size": 12, "contour_length": 2, "num_distractors": 0}
    bundle = load(
        source="generated", generator="pathfinder", options=config, num_train=1500, num_evaluation=200, num_test=200
    )
    splits = {"train": bundle.train, "evaluation": bundle.evaluation, **bundle.others}
    seen = {name: {split.content(row) for row in range(len(split))} for name, split in splits.items()}
    assert {name: len(images) for name, images in seen.items()} == {"train": 1500, "evaluation": 200, "test": 200}
    assert len(seen["train"] | seen["evaluation"] | seen["test"]) == 1900
    assert 0.45 < float(bundle.train.labels.double().mean()) < 0.55

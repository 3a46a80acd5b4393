"""Every test writes its own files; the cache of `datasets` is one temporary folder."""

import io

import numpy as np
import pytest


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("datasets_cache")


@pytest.fixture(autouse=True)
def isolated(monkeypatch, cache_folder):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache_folder))
    monkeypatch.delenv("WELLCOND_DATA", raising=False)
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS", raising=False)


@pytest.fixture
def png():
    """Encoded image of random pixels."""
    image_module = pytest.importorskip("PIL.Image")

    def make(seed=0, size=(8, 8), mode="RGB", format="PNG"):
        width, height = size
        shape = (height, width, 3) if mode == "RGB" else (height, width)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        stream = io.BytesIO()
        image_module.fromarray(pixels).save(stream, format=format)
        return stream.getvalue()

    return make

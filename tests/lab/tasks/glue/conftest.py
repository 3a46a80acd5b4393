"""Small files in the form of GLUE, and models pre-trained for a few steps on generated text."""

import pytest

from lab.tasks.glue.helpers import FAST, pretrain, write_glue
from wellcond.lab.train import glue


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets_cache")))
        patch.setenv("WELLCOND_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("WELLCOND_DATA", raising=False)
        yield


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("mirror") / "nyu-mll/glue")


@pytest.fixture(autouse=True)
def mirror(glue_folder, monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", str(glue_folder.parents[1]))


@pytest.fixture(autouse=True)
def fine_tuning(monkeypatch):
    """How models of scale tiny are fine-tuned: fast, and otherwise as a test sets it."""
    monkeypatch.setattr(glue, "TINY", dict(FAST))
    return glue.TINY


@pytest.fixture(scope="session")
def pretrained_folders(tmp_path_factory):
    """Folder of a pre-trained run by model and method; nothing may be written into it."""
    made = {}

    def get(model="bert", method="default", seed=0):
        if (model, method, seed) not in made:
            made[model, method, seed] = pretrain(tmp_path_factory.mktemp("pretrained") / "run", model, method, seed)
        return made[model, method, seed]

    return get


@pytest.fixture
def pretrained(pretrained_folders, tmp_path):
    """A copy of a pre-trained run."""
    import shutil

    def copy(*chosen):
        return shutil.copytree(pretrained_folders(*chosen), tmp_path / "-".join(map(str, ("run", *chosen))))

    return copy

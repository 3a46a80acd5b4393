"""Each task of the arena from its shipped recipe to a test score, on data of the layout that the recipe reads."""

import io
import json
import random

import pytest

from lab.data.helpers import write_features
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.train.run import Job, run_job

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
image_module = pytest.importorskip("PIL.Image")

SHORT = ("training.length.steps=4", "training.batch_size=8", "evaluation.every.steps=2", "evaluation.batch_size=20")
CHANGES = {
    "listops": ("data.num_train=60", "data.num_evaluation=20", "data.num_test=20"),
    "pathfinder": ("data.num_train=60", "data.num_evaluation=20", "data.num_test=20"),
    "text": ("task.length=32", "model.arguments.landmarks=4"),
    "retrieval": ("task.length=32", "model.arguments.landmarks=4"),
    "image": ("task.image_size=8", "model.arguments.landmarks=8"),
}


def write_reviews(root):
    classes = datasets.ClassLabel(names=["neg", "pos"])
    for split, count in (("train", 60), ("test", 20)):
        rows = {"text": [f"{'good' if row % 2 else 'bad'} film, no. {row}" for row in range(count)]}
        rows["label"] = [row % 2 for row in range(count)]
        path = root / "stanfordnlp/imdb/plain_text" / f"{split}-00000-of-00001.parquet"
        write_features(path, rows, {"text": datasets.Value("string"), "label": classes})


def write_pictures(root):
    draw = random.Random(0)

    def png():
        buffer = io.BytesIO()
        image_module.frombytes("RGB", (8, 8), draw.randbytes(192)).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    classes = datasets.ClassLabel(names=[str(digit) for digit in range(10)])
    for split, count in (("train", 80), ("test", 20)):
        rows = {"img": [png() for _ in range(count)], "label": [row % 10 for row in range(count)]}
        path = root / "uoft-cs/cifar10/plain_text" / f"{split}-00000-of-00001.parquet"
        write_features(path, rows, {"img": datasets.Image(), "label": classes})


def write_papers(root):
    folder = root / "acl-citation-pairs"
    folder.mkdir(parents=True)
    ids = [f"P{number:02d}" for number in range(40)]
    (folder / "docs_first4100B.json").write_text(json.dumps({name: f"Abstract of {name}. " * 3 for name in ids}))
    cited = "\n".join(f"{ids[number]}\t{ids[(number + 1) % 40]}" for number in range(40))
    (folder / "citation_pairs.tsv").write_text(cited + "\n")
    (folder / "cocited_pairs.tsv").write_text("P00\tP05\n")


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """The sets that tiny recipes read, a few rows of each."""
    root = tmp_path / "mirror"
    write_reviews(root)
    write_pictures(root)
    write_papers(root)
    monkeypatch.setenv("WELLCOND_DATA", str(root))
    return root


def trained(folder, task, method, *changes):
    recipe, base = load_recipe(f"lra-{task}", scale="tiny", overrides=changes)
    return run_job(Job(recipe, MethodSettings.model_validate(method), 0, folder, base, cpu=True))


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("listops", "conditioned"),
        ("text", "balanced"),
        pytest.param("retrieval", "identity(lam=1)", marks=pytest.mark.slow),
        pytest.param("image", "mimetic", marks=pytest.mark.slow),
        pytest.param("pathfinder", "gaussian", marks=pytest.mark.slow),
    ],
)
def test_recipe_runs_to_a_test_score(task, method, mirror, tmp_path):
    record = trained(tmp_path / "run", task, method, *SHORT, *CHANGES[task])
    assert record["status"] == "finished"
    assert 0 <= record["test"]["accuracy"] <= 1 and record["test"]["weights"] == "best"
    assert record["data"]["test"] >= 4


def test_the_jacobian_is_followed_over_training(tmp_path):
    tracking = "tracking={weights_every: {steps: 2}, jacobian_points: 2, heads: [0], budget: null}"
    small = ("task.length=24", "data.options.max_length=24", "model.arguments.landmarks=3", "model.arguments.width=16")
    trained(tmp_path, "listops", "identity(lam=1)", *SHORT, *CHANGES["listops"], *small, tracking)
    rows = [json.loads(line) for line in (tmp_path / "conditioning.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["status"] == "exact"]
    assert {(row["step"], row["layer"][:8], row["head"]) for row in measured} == {
        (step, layer, 0) for step in (0, 4) for layer in ("blocks.0", "blocks.1")
    }
    assert all(row["pseudo_condition_number"] > 1 for row in measured)
    assert all(row["sigma_min_q"] > row["raw_sigma_min_q"] for row in rows)  # lambda I lifts the smallest

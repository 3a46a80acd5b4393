"""The shipped language recipes from text of the layout that they read to a score, a few updates each."""

import json
import math

import numpy as np
import pytest

from lab.data.helpers import write_parquet
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.train.run import Job, run_job

for library in ("transformers", "tokenizers", "datasets"):
    pytest.importorskip(library)

WORDS = "the cat sat on a mat and saw that no dog was near so it ran home to eat fish".split()
SHORT = ("training.length={steps: 3}", "training.batch_size=8", "evaluation.every={steps: 2}")


def document(seed, words=60):
    chosen = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return " ".join(WORDS[number] for number in chosen)


def documents(first, count):
    return [document(number) for number in range(first, first + count)]


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """The sets as the hub has them: stories, and lines of articles with empty ones and headings between."""
    root = tmp_path_factory.mktemp("mirror")
    for number, (split, count) in enumerate([("train", 90), ("validation", 20)]):
        path = root / "roneneldan/TinyStories/data" / f"{split}-00000-of-00001.parquet"
        write_parquet(path, {"text": documents(1000 * number, count)})
    for number, (split, count) in enumerate([("train", 90), ("validation", 20), ("test", 20)]):
        lines = [line for text in documents(1000 * number, count) for line in ("", " = Heading = \n", f" {text} \n")]
        for config in ("wikitext-2-v1", "wikitext-103-v1"):
            write_parquet(root / "Salesforce/wikitext" / config / f"{split}-00000-of-00001.parquet", {"text": lines})
    return root


def trained(folder, scale, name, method, *changes):
    recipe, base = load_recipe(name, scale=scale, overrides=(*SHORT, *changes))
    return run_job(Job(recipe, MethodSettings.model_validate(method), 0, folder, base, cpu=True))


def test_the_recipe_of_nanogpt_runs_on_one_text_of_characters(tmp_path, monkeypatch):
    text = tmp_path / "mirror/karpathy/tiny_shakespeare/input.txt"
    text.parent.mkdir(parents=True)
    text.write_text(document(0, 300))
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    record = trained(tmp_path / "run", "tiny", "gpt2-shakespeare", "calibrated")
    characters = len(document(0, 300))
    assert record["metric"]["name"] == "loss" and record["tokenizer"]["vocabulary_size"] == len({*document(0, 300)})
    assert record["data"]["train"] == int(0.9 * characters) - 64  # a window at every place
    assert 0 < record["final"]["loss"] < record["final"]["perplexity"]


@pytest.mark.parametrize(
    ("name", "method", "vocabulary"),
    [
        ("crammed-bert", "mimetic", 50),
        ("gpt2-tinystories", "identity(lam=10)", 285),
        ("gpt2-wikitext2", "balanced", 285),
    ],
)
def test_tiny_recipe_runs(name, method, vocabulary, mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", str(mirror))
    changes = (f"task.tokenizer.vocabulary={vocabulary}", "tracking.weights_every.steps=2")
    record = trained(tmp_path / "run", "tiny", name, method, *changes)
    assert record["status"] == "finished"
    assert record["final"]["perplexity"] == pytest.approx(math.exp(record["final"]["loss"]))
    assert record["best"]["perplexity"] <= record["final"]["perplexity"]
    assert ("perplexity_per_word" in record["final"]) == name.startswith("gpt2")
    assert record["test"] is not None
    measured = [json.loads(line) for line in (tmp_path / "run/conditioning.jsonl").read_text().splitlines()]
    assert {row["step"] for row in measured} == {0, 2, 3} and len({row["layer"] for row in measured}) == 2

"""Paper recipes as a node launches them: on two ranks with data workers, stopped by a signal to all, and resumed.

The model keeps its width and loses depth, as in `test_paper_recipes`; the data are small, in folders.
"""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lab.recipes.test_paper_recipes import documents, fewer_layers, vocabulary
from lab.small import assert_same_run, command, record
from patience import PATIENCE, wait_until
from wellcond.lab.recipe import load_recipe
from wellcond.lab.settings import shipped_recipes

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PAPER = [name.removeprefix("paper/") for name in shipped_recipes() if name.startswith("paper/")]
SHORT = (
    "training={length: {steps: 12}, batch_size: 4, accumulate: 1, workers: 2, threads: 1, log_every: 1, "
    "diverged_above: null}",
    "evaluation={every: {steps: 100}, batch_size: 2, samples: 4}",
    "checkpoint={every: {steps: 100}}",
    "tracking={weights_every: null, jacobian_points: 0}",
    "tuned=null",
    "precision.compile=null",
)
QUICK = ("vit", "swin", "xcit", "gpt2-tinystories", "lra-listops")
"""Of each kind one: all of them take hours on a CPU."""


def photos(folder, size):
    source = np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 4), ("test", 4)):
        for name in ("ant", "cat"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = source.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def data_of(recipe, folder):
    """Changes of a recipe, and variables, by which it reads small data from a disk; None for other kinds."""
    task, source = recipe.task.name, recipe.data.source
    if source == "generated":
        return ("data.num_train=16", "data.num_evaluation=4", "data.num_test=4"), {}
    if task == "image_classification":
        return (), {"WELLCOND_DATA": f"{recipe.data.id}={photos(folder / 'photos', (250, 240))}"}
    if task == "language_modelling":
        text = folder / "text.txt"
        text.write_text("\n".join(row["text"] for row in documents(60)))
        words = folder / "words"
        words.mkdir()
        files = f"data={{source: files, train: {text}, evaluation: {text}}}"
        return (files, f"task.tokenizer.name={vocabulary(words)}"), {}
    return None


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_recipe_stops_and_resumes_on_two_ranks(name, tmp_path):
    if name not in QUICK and os.environ.get("WELLCOND_ALL_RECIPES") != "1":
        pytest.skip("hours in all: WELLCOND_ALL_RECIPES=1 runs it")
    recipe, _ = load_recipe(name, scale="paper")
    if (found := data_of(recipe, tmp_path)) is None:
        pytest.skip("its data are not made here")
    changes, variables = found
    layers = {key: list(value) if isinstance(value, tuple) else value for key, value in fewer_layers(recipe).items()}
    changes = [*SHORT, *changes, *(f"model.arguments.{key}={value}" for key, value in layers.items())]
    if recipe.training.clip_norm is not None:
        changes.append(f"training.clip_norm={recipe.training.clip_norm}")
    if recipe.training.averaging is not None:
        changes.append("training.averaging={decay: 0.9, evaluate: false}")

    def start(folder):
        words = [word for change in changes for word in ("--set", change)]
        asked = ["train", name, "--scale", "paper", "--method", "conditioned", "-o", folder, "--cpu", "-q"]
        arguments = command(*asked, "--gpus-per-run", 2, *words)
        return subprocess.Popen(
            arguments, env=os.environ | variables, start_new_session=True, stderr=subprocess.PIPE, text=True
        )

    def finish(process, expected):
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == expected, said[-3000:]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole), 0)
    process = start(broken)
    wait_until(lambda: rows(broken) >= 1, process=process)
    os.killpg(process.pid, signal.SIGTERM)  # to the command, both ranks and all their workers, as Slurm sends it
    finish(process, 130)
    stopped = record(broken)["progress"]["step"]
    assert record(broken)["status"] == "interrupted" and 1 <= stopped < 12
    finish(start(broken), 0)
    sessions = [(session["processes"], session["resumed_at_step"]) for session in record(broken)["sessions"]]
    assert sessions == [(2, 0), (2, stopped)]
    assert_same_run(whole, broken)


def rows(folder):
    file = Path(folder) / "steps.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0

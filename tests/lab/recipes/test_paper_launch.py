"""Paper recipes as a node launches them: on two ranks with data workers, stopped by a signal to all, and resumed.

The model keeps its width and loses depth, as in `test_paper_recipes`; the data are small, in folders and files.
"""

import json
import os
import signal
import subprocess

import numpy as np
import pytest
from PIL import Image

from lab import held_updates
from lab.recipes.test_paper_recipes import PAPER, documents, fewer_layers, vocabulary, write_coco
from lab.small import assert_same_run, command, record
from patience import PATIENCE
from wellcond.lab.recipe import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.processes]

STEPS, STOPPED = 5, 4
"""A run that waits in its second update is stopped there; its ranks agree on that two updates later."""
SHORT = (
    f"training={{length: {{steps: {STEPS}}}, batch_size: 4, workers: 2, threads: 1}}",
    "training.log_every=1",
    "training.diverged_above=null",
    "evaluation={every: {steps: 100}, batch_size: 2, samples: 4}",
    "checkpoint={every: {steps: 100}}",
    "tracking={weights_every: null, jacobian_points: 0}",
    "tuned=null",
    "precision.compile=null",
)
QUICK = ("vit", "swin", "xcit", "davit", "gpt2-tinystories", "crammed-bert", "lra-listops", "coco-swin-b")
"""One of each family; the others are of the same ones in other sizes or on other data."""


def photos(folder, size):
    source = np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 4), ("test", 4)):
        for name in ("ant", "cat"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = source.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def texts(folder, **more):
    """A file of labelled texts."""
    rows = [{**row, **more, "label": number % 2} for number, row in enumerate(documents(60))]
    file = folder / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def data_of(recipe, folder):
    """Changes of a recipe, and variables, by which it reads small data of its kind from a disk."""
    task, source = recipe.task.name, recipe.data.source
    if source == "generated":
        return ("data.num_train=16", "data.num_evaluation=4", "data.num_test=4"), {}
    if task == "detection":
        return write_coco(folder), {}
    if task == "image_classification" or "cifar10" in getattr(recipe.data, "id", ""):
        size = (250, 240) if task == "image_classification" else (32, 32)
        return (), {"WELLCOND_DATA": f"{recipe.data.id}={photos(folder / 'photos', size)}"}
    pairs = {"other": "a paper that is cited"} if task == "pair_classification" else {}
    file = texts(folder, **pairs)
    columns = "input: [text, other]" if pairs else "input: text"
    labels = "label: null" if "modelling" in task else "label: label"
    files = f"data={{source: files, train: {file}, evaluation: {file}, {columns}, {labels}}}"
    tokenizer = getattr(recipe.task, "tokenizer", None)
    if hasattr(tokenizer, "train"):
        return (files, "task.tokenizer.vocabulary=50"), {}
    return (files, *([] if tokenizer is None else [f"task.tokenizer.name={vocabulary(folder)}"])), {}


@pytest.mark.parametrize("name", sorted(PAPER, key=lambda name: name not in QUICK))
def test_a_paper_recipe_stops_and_resumes_on_two_ranks(name, tmp_path, hold):
    if name not in QUICK and os.environ.get("WELLCOND_ALL_RECIPES") != "1":
        pytest.skip("hours in all: WELLCOND_ALL_RECIPES=1 runs it")
    recipe, _ = load_recipe(name, scale="paper")
    changes, variables = data_of(recipe, tmp_path)
    layers = {key: list(value) if isinstance(value, tuple) else value for key, value in fewer_layers(recipe).items()}
    changes = [*SHORT, *changes, *(f"model.arguments.{key}={value}" for key, value in layers.items())]
    training = recipe.training
    if training.clip_norm is not None:
        changes.append(f"training.clip_norm={training.clip_norm}")
    if training.averaging is not None:
        changes.append("training.averaging={decay: 0.9, evaluate: false}")
    changes += [f"training.recompute={training.recompute}", f"training.shard={training.shard}"]
    words = [word for change in changes for word in ("--set", change)]

    def start(folder, **more):
        asked = ["train", name, "--scale", "paper", "--method", "conditioned", "-o", folder, "--cpu", "-q"]
        arguments = command(*asked, "--gpus-per-run", 2, "--import", held_updates.__file__, *words)
        options = {"start_new_session": True, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(arguments, env=os.environ | variables | more, **options)

    def finish(process, expected):
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == expected, errors[-3000:]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole), 0)
    process = start(broken, **hold.environment)
    hold.wait_for(2, process)
    os.killpg(process.pid, signal.SIGTERM)  # to the command, both ranks and all their workers, as Slurm sends it
    finish(process, 130)
    kept = record(broken)
    assert (kept["status"], kept["progress"]["step"]) == ("interrupted", STOPPED), kept["reason"]
    finish(start(broken), 0)
    sessions = [(session["processes"], session["resumed_at_step"]) for session in record(broken)["sessions"]]
    assert sessions == [(2, 0), (2, STOPPED)]
    assert_same_run(whole, broken)

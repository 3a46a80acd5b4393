"""The Long Range Arena recipes, value by value."""

from dataclasses import dataclass

import pytest
import torch

from wellcond.lab.load_recipe import load_recipe, shipped_recipes
from wellcond.lab.models.build import build_model

pytest.importorskip("transformers")


@dataclass(frozen=True)
class Row:
    """One row of the table of R-LRA."""

    length: int | None
    padded: int
    vocabulary: int
    classes: int
    batch: int
    warmup: int
    steps: int
    evaluate_every: int
    data: dict
    test: str | None = "best"
    task: str = "sequence_classification"


PAPER = {
    "lra-listops": Row(
        2000, 2048, 32, 10, 32, 1000, 5000, 50,
        {"generator": "listops", "num_train": 96000, "num_evaluation": 2000, "num_test": 2000},
    ),
    "lra-text": Row(
        4000, 4096, 512, 2, 32, 8000, 20000, 500,
        {"id": "stanfordnlp/imdb", "train_split": "train", "evaluation_split": "test", "limit_train": None}, None,
    ),
    "lra-retrieval": Row(
        4000, 4096, 512, 2, 32, 800, 30000, 300, {"source": "aan_pairs"}, task="pair_classification"
    ),
    "lra-image": Row(None, 1024, 512, 10, 256, 175, 35000, 175, {"id": "uoft-cs/cifar10", "held_out": 0.1}),
    "lra-pathfinder": Row(
        None, 1024, 512, 2, 256, 312, 62400, 312,
        {"generator": "pathfinder", "num_train": 160000, "num_evaluation": 20000, "num_test": 20000},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipe(name):
    recipe, _ = load_recipe(name, scale="paper")
    row = PAPER[name]
    assert recipe.task.name == row.task
    assert (recipe.task.length, recipe.task.pad_to) == ((row.length, row.padded) if row.length else (None, None))
    assert {key: getattr(recipe.data, key) for key in row.data} == row.data
    assert (recipe.training.batch_size, recipe.training.length.steps) == (row.batch, row.steps)
    assert recipe.schedule.rise * row.steps == pytest.approx(row.warmup, rel=1e-5)
    assert (recipe.schedule.anneal, recipe.schedule.cycle_momentum) == ("linear", False)
    assert (recipe.evaluation.every.steps, recipe.evaluation.test) == (row.evaluate_every, row.test)
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (1e-4, (0.9, 0.999), 1e-6, 0)
    assert recipe.precision.mixed == "fp16"
    assert recipe.training.clip_norm is None and recipe.training.averaging is None
    assert len(recipe.seeds) == 5


@pytest.mark.parametrize("name", PAPER)
def test_paper_model(name):
    recipe, _ = load_recipe(name, scale="paper")
    row = PAPER[name]
    told = {"num_labels": row.classes, "length": row.padded}  # by the task
    with torch.device("meta"):
        model = build_model(recipe.model.name, told | recipe.model.arguments)
    options = model.options
    assert (options.layers, options.width, options.heads, options.feed_forward) == (2, 64, 2, 128)
    assert (options.dropout, options.landmarks, options.convolution) == (0.1, 64, 35)
    assert (options.vocab_size, options.pairs) == (row.vocabulary, row.task == "pair_classification")


TASKS = ("listops", "text", "retrieval", "image", "pathfinder")


@pytest.mark.parametrize("task", TASKS)
def test_small_recipe_is_a_quarter_of_the_papers(task):
    small, _ = load_recipe(f"lra-{task}", scale="small")
    paper, _ = load_recipe(f"lra-{task}", scale="paper")
    assert 4 * small.training.length.steps == paper.training.length.steps
    assert small.schedule.rise == paper.schedule.rise  # warm-up scales with length
    if paper.task.pad_to:
        assert 4 * small.task.pad_to == paper.task.pad_to
    assert small.optimizer == paper.optimizer and small.training.batch_size == paper.training.batch_size


REQUIRED = {"default", "gaussian", "mimetic", "conditioned", "balanced", "identity(lam=10)"}


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_every_method_at_every_scale(task, scale):
    assert f"{scale}/lra-{task}" in shipped_recipes()
    recipe, _ = load_recipe(f"lra-{task}", scale=scale)
    assert {method.label for method in recipe.methods} >= REQUIRED
    assert recipe.name == f"lra-{task}" and recipe.scale == scale
    if scale != "paper" or task != "text":
        assert recipe.evaluation.test == ("best" if (task, scale) != ("text", "small") else None)


@pytest.mark.parametrize("task", TASKS)
def test_tiny_landmarks_are_at_most_an_eighth_of_the_tokens(task):
    recipe, _ = load_recipe(f"lra-{task}", scale="tiny")
    options = recipe.data.model_dump().get("options", {})
    side = getattr(recipe.task, "image_size", None) or options.get("image_size")
    length = recipe.task.length or side**2
    assert 8 * recipe.model.arguments["landmarks"] <= length
    assert length % recipe.model.arguments["landmarks"] == 0

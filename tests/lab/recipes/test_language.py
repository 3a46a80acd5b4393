"""The shipped language recipes, value by value."""

from dataclasses import dataclass, replace

import pytest

from wellcond.lab.load_recipe import load_recipe, shipped_recipes
from wellcond.lab.optimizers import Constant, Cosine, Triangular
from wellcond.lab.settings import Interval
from wellcond.lab.tasks.language_modelling import MASKED
from wellcond.lab.tokenizers import TokenizerFile, TrainedTokenizer
from wellcond.lab.train.length import ramped_parts

TINYSTORIES = {"source": "hub", "id": "roneneldan/TinyStories", "config": None, "evaluation_split": "validation"}
WIKITEXT = {"source": "hub", "id": "Salesforce/wikitext", "evaluation_split": "validation", "limit_evaluation": None}
PILE = {"source": "text_stream", "id": "monology/pile-uncopyrighted", "split": "train", "text": "text"}
BUDGET = Triangular(peak=0.75, begin=0.25)  # budget-triangle2 of the release
WORD_PIECES = TrainedTokenizer(train="wordpiece", vocabulary=32768, lower_case=True, documents=200000)


@dataclass(frozen=True)
class Row:
    """What one recipe must say."""

    data: dict
    context: int
    tokenizer: TrainedTokenizer | TokenizerFile
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: Triangular | Constant | Cosine
    batch: int
    micro_batch: int
    length: Interval
    dropout: float
    clip: float
    precision: str
    eps: float = 1e-8
    hours: float | None = None
    ramp: float | None = None
    test: str | None = None


CRAMMED = Row(
    PILE, 128, WORD_PIECES, 1e-3, (0.9, 0.98), 0.01, BUDGET, 8192, 128, Interval(steps=19956), 0.0, 0.5, "fp16",
    eps=1e-12, hours=24, ramp=0.6,
)  # fmt: skip
STORIES = Row(
    TINYSTORIES, 512, TokenizerFile(file="gpt2-bpe"), 5e-4, (0.9, 0.95), 0.1, Constant(warmup=Interval(steps=500)),
    1280, 80, Interval(epochs=5), 0.0, 1.0, "bf16",
)  # fmt: skip
ARTICLES = Row(
    WIKITEXT | {"config": "wikitext-103-v1"}, 1024, TokenizerFile(file="gpt2-bpe"), 3e-4, (0.9, 0.95), 0.1,
    Cosine(warmup=Interval(steps=500), end=0.1), 256, 16, Interval(epochs=10), 0.1, 1.0, "bf16", test="best",
)  # fmt: skip
ROWS = {("paper", f"gpt2-tinystories{size}"): STORIES for size in ("", "-472m", "-1.7b")}
ROWS |= {("paper", f"gpt2-wikitext103{size}"): ARTICLES for size in ("", "-472m", "-1.7b")}
ROWS |= {
    ("paper", "crammed-bert"): CRAMMED,
    ("paper", "bert-12"): CRAMMED,
    ("small", "crammed-bert"): replace(CRAMMED, hours=1, length=Interval(steps=20000), batch=2048, micro_batch=512),
    ("small", "gpt2-tinystories"): replace(
        STORIES, schedule=Constant(warmup=Interval(epochs=0.14)), length=Interval(epochs=1), batch=128, micro_batch=64
    ),
    ("small", "gpt2-wikitext103"): replace(
        ARTICLES, schedule=Cosine(warmup=Interval(epochs=0.22), end=0.1), length=Interval(epochs=2), batch=64
    ),
}
every_large_recipe = pytest.mark.parametrize(("scale", "name"), ROWS, ids=["-".join(key) for key in ROWS])
TINY = ("crammed-bert", "gpt2-tinystories", "gpt2-wikitext2")


def dropout(recipe):
    """The one rate of all kinds of dropout that the recipe names."""
    [rate] = {value for name, value in recipe.model.arguments.items() if "drop" in name}
    return rate


@every_large_recipe
def test_values_are_as_written_down(scale, name):
    recipe, _ = load_recipe(name, scale=scale)
    row, task, training = ROWS[scale, name], recipe.task, recipe.training
    found = Row(
        data={key: getattr(recipe.data, key) for key in row.data},
        context=task.length if task.name == "masked_language_modelling" else task.context,
        tokenizer=task.tokenizer,
        lr=recipe.optimizer.lr,
        betas=recipe.optimizer.betas,
        weight_decay=recipe.optimizer.weight_decay,
        schedule=recipe.schedule,
        batch=training.batch_size,
        micro_batch=training.batch_size // training.accumulate,
        length=training.length,
        dropout=dropout(recipe),
        clip=training.clip_norm,
        precision=recipe.precision.mixed,
        eps=recipe.optimizer.eps,
        hours=training.hours,
        ramp=training.batch_ramp,
        test=recipe.evaluation.test,
    )
    assert found == row
    assert (recipe.name, recipe.scale, recipe.optimizer.name) == (name, scale, "adamw")
    assert training.averaging is None and training.batch_size % training.accumulate == 0
    assert "GPU" in recipe.description and recipe.data.id in recipe.description


@every_large_recipe
def test_all_text_and_all_methods_with_five_seeds(scale, name):
    recipe, _ = load_recipe(name, scale=scale)
    assert recipe.seeds == (0, 1, 2, 3, 4) and recipe.task.limit_tokens is None
    if recipe.data.source == "hub":
        assert recipe.data.limit_train is recipe.data.limit_evaluation is recipe.evaluation.samples is None
    labels = {method.label for method in recipe.methods}
    assert labels == {"default", "gaussian", "mimetic", "conditioned", "identity(lam=10)", "polar", "balanced"}
    assert recipe.model.norms == "keep" and recipe.tracking.jacobian_points == 0


@pytest.mark.parametrize("name", ["crammed-bert", "bert-12"])
def test_a_quarter_of_the_tokens_is_guessed(name):
    recipe, _ = load_recipe(name, scale="paper")
    assert recipe.task.name == "masked_language_modelling" and MASKED == 0.25


def all_parts(training):
    steps = training.length.steps
    return sum(ramped_parts(training.batch_ramp, training.accumulate, step, steps) for step in range(steps))


def test_the_limit_of_updates_is_the_releases():
    assert all_parts(load_recipe("crammed-bert", scale="paper")[0].training) == pytest.approx(900_000, abs=64)


def test_the_text_suffices_for_a_day_of_updates():
    changes = ["training.length={steps: 8500}", "training.hours=null"]  # as many as an A6000 makes in about a day
    recipe, _ = load_recipe("crammed-bert", scale="paper", overrides=changes)
    training = recipe.training
    tokens = all_parts(training) * training.batch_size // training.accumulate * recipe.task.length
    assert tokens < recipe.data.limit_bytes / 6  # word pieces of English have fewer bytes than 6


@pytest.mark.parametrize("name", TINY)
def test_tiny_recipe(name):
    recipe, _ = load_recipe(name, scale="tiny")
    crammed = name == "crammed-bert"
    arguments = recipe.model.arguments
    names = ("layers", "width", "heads") if crammed else ("n_layer", "n_embd", "n_head")
    assert tuple(arguments[key] for key in names) == (2, 64, 4)
    assert crammed or recipe.task.context == 128
    assert recipe.task.tokenizer.train == ("wordpiece" if crammed else "bpe")
    assert recipe.training.length == Interval(steps=300) and recipe.seeds == (0, 1, 2)
    assert [method.label for method in recipe.methods] == [
        "default", "gaussian", "mimetic", "conditioned", "balanced", "identity(lam=1)", "identity(lam=10)"
    ]  # fmt: skip
    assert recipe.tracking.jacobian_points == 0 and recipe.tracking.weights_every == Interval(steps=100)
    data = (
        TINYSTORIES | {"held_out": 0.065, "limit_train": 2900, "limit_evaluation": 200, "limit_test": 400}
        if name == "gpt2-tinystories"
        else WIKITEXT | {"config": "wikitext-2-v1"}
    )
    assert {key: getattr(recipe.data, key) for key in data} == data


@pytest.mark.parametrize(
    ("name", "model_of"),
    [
        ("crammed-bert", "crammed-bert"),
        ("gpt2-tinystories", "gpt2-tinystories"),
        ("gpt2-wikitext2", "gpt2-wikitext103"),
    ],
)
def test_tiny_recipes_train_as_the_papers_but_for_sizes(name, model_of):
    tiny, _ = load_recipe(name, scale="tiny")
    paper, _ = load_recipe(model_of, scale="paper")
    same = {"betas", "eps", "weight_decay"}
    assert tiny.optimizer.model_dump(include=same) == paper.optimizer.model_dump(include=same)
    assert tiny.schedule.model_dump(exclude={"warmup"}) == paper.schedule.model_dump(exclude={"warmup"})
    assert tiny.training.clip_norm == paper.training.clip_norm
    assert tiny.evaluation.test == (paper.evaluation.test or "last")  # rates are tuned on the evaluation split
    assert tiny.model.arguments.get("attn_pdrop", 0) == paper.model.arguments.get("attn_pdrop", 0)


def test_no_shipped_recipe_of_these_families_is_left_out():
    found = {
        (scale, name)
        for scale, name in (shipped.split("/") for shipped in shipped_recipes())
        if name.startswith(("crammed-bert", "bert-12", "gpt2-"))
    }
    assert found == {*ROWS} | {("tiny", name) for name in TINY}

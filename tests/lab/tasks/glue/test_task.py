import pytest
import torch
from torch import nn

from lab.helpers import ListSplit, bundle
from lab.tasks.glue.helpers import MODELS, sentence
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import set_field
from wellcond.lab.tasks.base import EVALUATION, TASKS, TaskContext
from wellcond.lab.tasks.glue import score
from wellcond.lab.train.run import Job, run_job

TOKENIZER = {"train": "wordpiece", "vocabulary": 60}


def examples(count, labels, pair=True, start=0):
    pairs = {"text_pair": sentence(900, 5)} if pair else {}
    return ListSplit([{"text": sentence(start + row), **pairs, "label": labels(row)} for row in range(count)])


def make(task, labels=lambda row: row % 2, *, classes=2, pair=True, **settings):
    data = bundle("text", examples(30, labels, pair), examples(13, labels, pair, 50), classes)
    options, build = TASKS["glue"]
    return build(options(task=task, **{"tokenizer": TOKENIZER, "length": 16} | settings), TaskContext(data, 0))


class Answers(nn.Module):
    """Outputs that depend on the tokens in a fixed, arbitrary way."""

    def __init__(self, outputs):
        super().__init__()
        self.table = nn.Embedding(60, outputs)

    def forward(self, input_ids, attention_mask):
        return (self.table(input_ids) * attention_mask[..., None]).mean(1)


@torch.no_grad()
def total(task, model, *batches):
    """Values of an evaluation over batches of rows, as the engine makes them."""
    sums, records = {}, []
    for batch in batches:
        scored = task.score(model, task.evaluation.fetch([(row, EVALUATION) for row in batch]))
        records += scored.pop("records")
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in scored.items()}
    return task.metrics(sums | {"records": [record for _, record in sorted(records)]}, task.evaluation)


@pytest.mark.parametrize(("task", "metrics"), [("cola", {"matthews", "accuracy"}), ("qqp", {"f1", "accuracy"})])
def test_scores_of_classes_are_those_of_scikit_learn_however_rows_are_divided(task, metrics):
    reference = pytest.importorskip("sklearn.metrics")
    glue = make(task, pair=task != "cola")
    model = Answers(2)
    whole = total(glue, model, range(13))
    assert set(whole) == {"loss", "constant", *metrics}
    assert total(glue, model, range(0, 13, 2), range(1, 13, 2)) == pytest.approx(whole, abs=1e-6)
    predictions = [int(_output(glue, model, row).argmax()) for row in range(13)]
    labels = glue.evaluation.labels.tolist()
    assert whole["accuracy"] == reference.accuracy_score(labels, predictions)
    expected = {"matthews": reference.matthews_corrcoef, "f1": reference.f1_score}[glue.metric.name]
    assert whole[glue.metric.name] == pytest.approx(expected(labels, predictions))
    assert whole["constant"] == (len(set(predictions)) == 1)


def _output(task, model, row):
    batch = task.evaluation.fetch([(row, EVALUATION)])
    return model(batch["input_ids"], batch["attention_mask"])[0].detach()


def test_numbers_are_scored_by_their_correlations_however_rows_are_divided():
    glue = make("stsb", lambda row: row % 11 / 2, classes=None)
    model = Answers(1)
    whole = total(glue, model, range(13))
    assert total(glue, model, [12, 3], range(4, 12), [0, 2, 1]) == pytest.approx(whole, abs=1e-6)
    predictions, labels = [float(_output(glue, model, row)) for row in range(13)], glue.evaluation.labels
    assert whole["pearson"] == pytest.approx(score("pearson", predictions, labels), abs=1e-6)
    assert whole["spearman"] == pytest.approx(score("spearman", predictions, labels), abs=1e-6)
    assert whole["loss"] == pytest.approx(float((torch.tensor(predictions) - labels).square().mean()), abs=1e-5)
    part = total(glue, model, range(5))
    assert part["pearson"] == pytest.approx(score("pearson", predictions[:5], labels[:5]), abs=1e-6)


def test_one_answer_to_everything_scores_zero_and_is_noted():
    for task, classes in (("cola", 2), ("stsb", None)):
        glue = make(
            task, (lambda row: row % 2) if classes else (lambda row: row % 2 / 2), classes=classes, pair=not classes
        )
        model = Answers(glue.num_labels)
        nn.init.zeros_(model.table.weight)
        scores = total(glue, model, range(13))
        assert scores[glue.metric.name] == 0.0 and scores["constant"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "stsb"}, "set data.label_kind: number"),
        ({"task": "qqp", "labels": lambda row: row % 3}, "row 2: expected a label from 0 to 1, found 2"),
        ({"task": "qqp", "tokenizer": "bytes"}, r"needs the tokens \[PAD\], \[CLS\] and \[SEP\]"),
    ],
)
def test_data_that_do_not_suit_the_task_are_refused(arguments, message):
    with pytest.raises(RecipeError, match=message):
        make(**arguments)


def scratch_recipe(glue_folder, model, *overrides):
    fields = {
        "name": "scratch",
        "scale": "tiny",
        "task": {"name": "glue", "task": "cola", "tokenizer": TOKENIZER, "length": 16},
        "data": {
            "source": "files",
            "train": str(glue_folder / "cola/train.tsv"),
            "evaluation": str(glue_folder / "cola/train.tsv"),
            "input": "sentence",
            "label": "label",
        },
        "model": model,
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "training": {"length": {"epochs": 25}, "batch_size": 16, "threads": 1},
        "evaluation": {"every": {"epochs": 25}},
        "tracking": {"weights_every": None, "jacobian_points": 1, "heads": "all", "budget": None},
    }
    for override in overrides:
        set_field(fields, override)
    return Recipe.model_validate(fields)


@pytest.mark.parametrize("model", ["bert", "crammed"])
def test_any_model_learns_a_task_from_scratch_by_a_recipe(glue_folder, model, tmp_path):
    name = {"bert": "hf:bert", "crammed": "wellcond:crammed_bert_classifier"}[model]
    recipe = scratch_recipe(glue_folder, {"name": name, "arguments": MODELS[model]["arguments"]})
    record = run_job(Job(recipe, MethodSettings.model_validate("conditioned"), 0, tmp_path, cpu=True))
    assert record["status"] == "finished" and record["metric"]["name"] == "matthews"
    assert record["final"]["matthews"] > 0.9
    assert (tmp_path / "conditioning.jsonl").stat().st_size > 0  # the probe suits the model


def test_sentences_are_told_apart_only_by_models_that_can(glue_folder):
    seen = []

    class Watching(Answers):
        config = type("Config", (), {"type_vocab_size": 2})()

        def forward(self, input_ids, attention_mask, token_type_ids=None):
            seen.append(token_type_ids is not None)
            return super().forward(input_ids, attention_mask)

    glue = make("qqp")
    for size in (2, 1):
        Watching.config.type_vocab_size = size
        glue.loss(Watching(2), glue.train.fetch([(0, 0)]))
    glue.loss(Answers(2), glue.train.fetch([(0, 0)]))
    assert seen == [True, False]

import math

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import wellcond
from lab.helpers import bundle, byte_images, make_recipe, texts, tiny_bert, tiny_gpt2, tiny_vit
from wellcond.errors import RecipeError
from wellcond.lab.data import TensorDataset, load_data, resolve_config
from wellcond.lab.methods import MethodSettings
from wellcond.lab.tasks.base import EVALUATION, TASKS, AugmentationSettings, TaskContext
from wellcond.lab.train.prepare import prepare_model


def make_task(name, data, *, augmentation=None, **fields):
    settings, make = TASKS[name]
    context = TaskContext(data, 0, AugmentationSettings(**augmentation or {}))
    return make(settings(name=name, **fields), context)


def evaluation_batch(task):
    return task.evaluation.fetch([(index, EVALUATION) for index in range(len(task.evaluation))])


def metrics(task, sums):
    return task.metrics({name: float(value) for name, value in sums.items()}, task.evaluation)


def token_data(tokens, labels=(0, 1), vocabulary=5, classes=2):
    split = TensorDataset("tokens", torch.tensor(tokens), torch.tensor(labels))
    return bundle("tokens", split, classes=classes, vocabulary_size=vocabulary)


class Fixed(nn.Module):
    """Logits given in advance."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, *inputs, **named):
        return self.logits


IMAGES = bundle("image", byte_images(12, 1))
DOCUMENTS = bundle("text", texts("good work", "bad", "so so", "x" * 40, labels=[0, 1, 1, 0]), classes=2)


def prose(*documents):
    return bundle("text", texts(*documents), classes=None)


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A flat folder of classes, which is split by itself."""
    root = tmp_path_factory.mktemp("pets")
    for label, name in enumerate(("ant", "cat", "dog")):
        (root / name).mkdir()
        for row, pixels in enumerate(byte_images(12, 1, seed=label).inputs):
            Image.fromarray(pixels[0].numpy()).save(root / name / f"{row}.png")
    return load_data(resolve_config({"source": "image_folder", "path": str(root), "evaluation_fraction": 0.25}))


def cases(pets):
    text = make_task("sequence_classification", DOCUMENTS, length=16)
    return {
        "images": (make_task("image_classification", IMAGES), tiny_vit()),
        "folder": (make_task("image_classification", pets), tiny_vit()),
        "text": (text, tiny_bert()),
        "tokens": (make_task("sequence_classification", token_data([[0, 1, 4], [2, 3, 0]])), tiny_bert(6)),
        "language": (make_task("language_modelling", prose("hello " * 9), context=8), tiny_gpt2()),
    }


@pytest.mark.parametrize("name", ["images", "folder", "text", "tokens", "language"])
@torch.no_grad()
def test_loss_is_a_sum_of_terms_and_agrees_with_the_score(name, pets):
    task, model = cases(pets)[name]
    model.eval()
    batch = evaluation_batch(task)
    mean = float(task.loss(model, batch)) / int(task.num_terms(batch))
    scored = metrics(task, task.score(model, batch))
    assert scored["loss"] == pytest.approx(mean, rel=1e-5) and task.metric.name in scored
    if name == "language":
        logits = model(input_ids=batch["input_ids"]).logits
        expected = cross_entropy(logits.reshape(-1, 257), batch["label"].reshape(-1))
    else:
        inputs = {key: value for key, value in batch.items() if key not in ("label", "image")}
        output = model(batch["image"]) if "image" in batch else model(**inputs).logits
        expected = cross_entropy(output, batch["label"])
    assert mean == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", ["images", "folder", "text", "tokens", "language"])
@torch.no_grad()
def test_sums_over_parts_give_the_metrics_of_the_whole(name, pets):
    task, model = cases(pets)[name]
    model.eval()
    sums = {}
    for index in range(len(task.evaluation)):
        for key, value in task.score(model, task.evaluation.fetch([(index, EVALUATION)])).items():
            sums[key] = sums.get(key, 0.0) + float(value)
    whole = task.score(model, evaluation_batch(task))
    assert metrics(task, sums) == pytest.approx(metrics(task, whole), rel=1e-5)


@pytest.mark.parametrize("name", ["images", "folder", "text", "tokens", "language"])
def test_measure_takes_the_probe(name, pets):
    task, model = cases(pets)[name]
    found = wellcond.measure(model.eval(), task.probe(1))
    assert [len(layer.heads) for layer in found.layers] == [2] * (2 if name in ("images", "folder") else 1)
    assert all(head.jacobian is not None for layer in found.layers for head in layer.heads)


def test_a_probe_is_never_larger_than_the_data():
    task = make_task("image_classification", IMAGES)
    assert task.probe(100).shape == (12, 1, 8, 8) and task.probe(2).shape[0] == 2


# Known answers


def test_accuracy_of_a_known_model():
    task = make_task("image_classification", bundle("image", byte_images(4, 1)))  # labels 0 1 2 0
    model = Fixed([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    found = metrics(task, task.score(model, evaluation_batch(task)))
    right, wrong = math.log(1 + 2 * math.exp(-9)), 9 + math.log(1 + 2 * math.exp(-9))
    assert found["accuracy"] == 0.75 and found["loss"] == pytest.approx((3 * right + wrong) / 4, rel=1e-5)
    assert task.metric.is_better(0.8, 0.7) and task.metric.percent


@torch.no_grad()
def test_label_smoothing_acts_on_the_loss_and_not_on_the_score():
    task = make_task("image_classification", IMAGES, augmentation={"label_smoothing": 0.1})
    model = tiny_vit().eval()
    batch = evaluation_batch(task)
    logits = model(batch["image"])
    expected = cross_entropy(logits, batch["label"], label_smoothing=0.1, reduction="sum")
    assert float(task.loss(model, batch)) == pytest.approx(float(expected), rel=1e-6)
    assert float(task.score(model, batch)["loss"]) == pytest.approx(
        float(cross_entropy(logits, batch["label"], reduction="sum")), rel=1e-6
    )


def test_perplexity_is_the_exponential_of_the_mean_over_predicted_tokens():
    data = bundle("text", texts("ab", "c"), classes=None)
    task = make_task("language_modelling", data, context=2)
    batch = evaluation_batch(task)
    assert batch["input_ids"].tolist() == [[98, 99], [0, 100]]  # a b | end c; then the last end
    logits = torch.zeros(2, 2, 257)
    logits[0, 0, 99] = 3.0
    model = Fixed(logits.tolist())
    chances = [math.exp(3) / (math.exp(3) + 256), 1 / 257, 1 / 257, 1 / 257]
    loss = -sum(map(math.log, chances)) / 4
    found = metrics(task, task.score(model, batch))
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.prod(chances) ** -0.25, rel=1e-6)
    assert not task.metric.is_better(3.0, 2.0) and task.metric.is_better(2.0, 3.0)
    assert metrics(task, {"loss": 1e6, "count": 1, "words": 1, "bytes": 1})["perplexity"] > 1e300  # and no overflow


# Errors


@pytest.mark.parametrize(
    ("name", "data", "fields", "message"),
    [
("image_classification", DOCUMENTS, {}, "image_classification needs image data; some has text"),
("image_classification", bundle("image", byte_images(), classes=None), {}, "needs labels; some has none"),
("image_classification", bundle("image", byte_images(1), classes=1), {}, "at least two classes .* only '0'"),
("sequence_classification", DOCUMENTS, {}, "expected task.length, for instance 256"),
("sequence_classification", token_data([[5, 0], [0, 0]]), {}, "from 0 to 4, .* found 2 from 0 to 5"),
("sequence_classification", token_data([[-1, 0], [0, 4]]), {}, "only -1, as padding; found 1 from -1"),
("sequence_classification", token_data([[1], [1]], labels=(0, 2)), {}, "row 1: .* from 0 to 1, found 2"),
("language_modelling", prose("ab"), {"context": 4}, "one block of 4 tokens .* found 3"),
],
)  # fmt: skip
def test_data_that_do_not_suit_are_refused(name, data, fields, message):
    with pytest.raises(RecipeError, match=message):
        make_task(name, data, **fields)


def test_arguments_against_the_data_are_refused():
    recipe = make_recipe(model={"name": "timm:vit_tiny_patch16_224", "arguments": {"num_classes": 7}})
    with pytest.raises(RecipeError, match="model.arguments.num_classes"):
        prepare_model(recipe, MethodSettings(), make_task("image_classification", IMAGES), seed=0, base=None)

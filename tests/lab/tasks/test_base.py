import math

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import wellcond
from lab.helpers import ListSplit, bundle, byte_images, make_recipe, texts, tiny_bert, tiny_gpt2, tiny_vit
from lab.small import small_job
from wellcond.errors import RecipeError
from wellcond.lab.data import TensorDataset, load_data, resolve_config
from wellcond.lab.methods import MethodSettings
from wellcond.lab.tasks.base import EVALUATION, TASKS, AugmentationSettings, TaskContext
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import run_job


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


def test_blocks_lie_one_after_the_other():
    data = bundle("text", texts("abcdefgh", "", "xyz"), classes=None)
    task = make_task("language_modelling", data, context=4)
    stream = [*range(98, 106), 0, *range(121, 124), 0]  # without the empty one
    assert evaluation_batch(task)["input_ids"].flatten().tolist() == stream[:12]
    assert task.train.fetch([(2, 0), (0, 0)])["input_ids"].tolist() == [stream[8:12], stream[:4]]
    assert task.num_terms(evaluation_batch(task)) == 12


def test_bytes_are_tokens_and_padding_is_masked():
    task = make_task(
        "sequence_classification", bundle("text", texts("é", "abcdef", "", labels=[0, 1, 0]), classes=2), length=4
    )
    batch = evaluation_batch(task)
    assert batch["input_ids"].tolist() == [[196, 170, 0, 0], [98, 99, 100, 101], [0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert batch["label"].tolist() == [0, 1, 0] and batch["input_ids"].dtype == torch.int64
    assert task.model_arguments("hf") == {"vocab_size": 257, "num_labels": 2, "pad_token_id": 0}


def test_a_pair_of_texts_is_another_task():
    split = ListSplit([{"text": "a", "text_pair": "bc", "label": 0}, {"text": "d", "text_pair": "", "label": 1}])
    with pytest.raises(RecipeError, match="task.name: pair_classification"):
        make_task("sequence_classification", bundle("text", split, classes=2), length=5)


def test_no_token_of_the_data_is_taken_for_padding():
    task = make_task("sequence_classification", token_data([[0, 1, 4], [2, 0, 0]]), length=4)
    batch = evaluation_batch(task)
    assert batch["input_ids"].tolist() == [[1, 2, 5, 0], [3, 1, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert task.model_arguments("hf")["vocab_size"] == 6


def test_generated_tokens_are_all_seen():
    data = load_data(resolve_config({"source": "generated", "generator": "listops", "num_train": 50}))
    task = make_task("sequence_classification", data)
    mask = evaluation_batch(task)["attention_mask"]
    assert torch.equal(mask > 0, data.evaluation.inputs[: len(mask)] >= 0)
    assert evaluation_batch(task)["input_ids"].max() < task.model_arguments("hf")["vocab_size"]


# Errors


@pytest.mark.parametrize(
    ("name", "data", "fields", "message"),
    [
        ("image_classification", DOCUMENTS, {}, "image_classification needs image data; some has text"),
        ("language_modelling", IMAGES, {"context": 4}, "language_modelling needs text data; some has image"),
        ("image_classification", bundle("image", byte_images(), classes=None), {}, "needs labels; some has none"),
        ("sequence_classification", bundle("text", texts("a"), classes=None), {"length": 4}, "needs labels"),
        ("image_classification", bundle("image", byte_images(1), classes=1), {}, "at least two classes .* only '0'"),
        ("sequence_classification", token_data([[1], [1]], (0, 0), classes=1), {}, "at least two classes .* only '0'"),
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


def test_images_of_one_class_are_refused_before_training(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(tmp_path / split / "cat" / f"{number}.png")
    with pytest.raises(RecipeError, match="image_classification needs at least two classes .* has only 'cat'"):
        run_job(small_job(tmp_path / "run", "default", f"data={{source: image_folder, path: '{tmp_path}'}}"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_training_split_with_one_label_is_refused_and_text_without_a_use_for_labels_is_not(tmp_path):
    for name, labels in (("train", ["good"] * 6), ("test", ["good"] * 3)):
        rows = "".join(f"some words {i},{label}\n" for i, label in enumerate(labels))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + rows)
    data = {"source": "files", "train": str(tmp_path / "train.csv"), "evaluation": str(tmp_path / "test.csv"),
            "input": "text", "label": "label"}  # fmt: skip
    recipe = make_recipe(data=data, task={"name": "sequence_classification", "length": 8})
    with pytest.raises(
        RecipeError, match="at least two classes in the training data; .* has only 'good'. Add examples"
    ):
        prepare_task(recipe, seed=0, base=None)
    prepare_task(make_recipe(data=data, task={"name": "language_modelling", "context": 8}), seed=0, base=None)


def test_a_text_longer_than_the_model_takes_is_refused_before_training():
    task = make_task("sequence_classification", DOCUMENTS, length=16)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    recipe = make_recipe(model={"name": "hf:bert", "arguments": small})
    with pytest.raises(RecipeError, match="hf:bert does not take the data of this task"):
        prepare_model(recipe, MethodSettings(), task, seed=0, base=None)


def test_arguments_against_the_data_are_refused():
    recipe = make_recipe(model={"name": "timm:vit_tiny_patch16_224", "arguments": {"num_classes": 7}})
    with pytest.raises(RecipeError, match="model.arguments.num_classes: the data need 3, found 7"):
        prepare_model(recipe, MethodSettings(), make_task("image_classification", IMAGES), seed=0, base=None)


def test_local_code_needs_trust(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise RuntimeError('run')\n")
    recipe = make_recipe(model={"name": f"{path}:build"})
    with pytest.raises(wellcond.errors.WellcondError, match="--trust-local-code"):
        prepare_model(recipe, MethodSettings(), make_task("image_classification", IMAGES), seed=0, base=None)


def test_methods_of_one_seed_share_every_other_weight():
    recipe, task = make_recipe(), make_task("image_classification", IMAGES)
    default, conditioned, other = (
        prepare_model(recipe, MethodSettings.model_validate(text), task, seed=seed, base=None).state_dict()
        for text, seed in (("default", 0), ("conditioned", 0), ("default", 1))
    )
    differ = {name for name in default if not torch.equal(default[name], conditioned[name])}
    assert differ and all(".attn.qkv." in name for name in differ)
    assert not torch.equal(default["head.weight"], other["head.weight"])

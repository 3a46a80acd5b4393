"""Every recipe of the papers builds its task, model and optimiser and makes two updates, on small data of its kind.

The model keeps its width, heads and input size, and loses depth; the batch is 2 samples, the precision float32.
"""

import functools

import numpy as np
import pytest
from PIL import Image

from lab.helpers import ListSplit
from lab.tasks.detection.coco_sets import rectangle, write_part
from wellcond.lab.data import Data, hold_data
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.settings import shipped_recipes
from wellcond.lab.tokenizers import TrainedTokenizer, make_tokenizer
from wellcond.lab.train.prepare import prepare_model, prepare_task

pytestmark = pytest.mark.slow

PAPER = [name.removeprefix("paper/") for name in shipped_recipes() if name.startswith("paper/")]
CLASSES = {"ILSVRC/imagenet-1k": 1000, "uoft-cs/cifar100": 100, "timm/oxford-iiit-pet": 37, "ethz/food101": 101}
SHORT = ("training.batch_size=2", "training.accumulate=1", "training.workers=0", "tuned=null")
WORDS = "the cat sat on a mat and saw that no dog was near so it ran home to eat fish".split()


def fewer_layers(recipe):
    """Arguments of the model that make it shallow."""
    family = recipe.model.name.partition(":")[2].partition("_")[0]
    if family in ("swin", "davit"):
        return {"depths": (1, 1, 1, 1)}
    if family == "xcit":
        return {"depth": 2, "cls_attn_layers": 1}
    layers = {"gpt2": "n_layer", "bert": "num_hidden_layers", "crammed": "layers", "long": "layers"}
    if family == "mask":
        return {}  # the backbone's layers are those that the pyramid reads
    return {layers.get(family, "depth"): 2}


def images(count, size, classes, mode="RGB"):
    source = np.random.default_rng(0)
    shape = (*size, 3) if mode == "RGB" else size
    return ListSplit(
        [
            {"image": Image.fromarray(source.integers(0, 256, shape, dtype=np.uint8)), "label": number % classes}
            for number in range(count)
        ]
    )


def documents(count):
    source = np.random.default_rng(0)
    texts = [" ".join(WORDS[word] for word in source.integers(0, len(WORDS), 400)) for _ in range(count)]
    return [{"text": text} for text in texts]


def labelled(rows, **more):
    return ListSplit([{**row, **more, "label": number % 2} for number, row in enumerate(rows)])


def write_coco(folder):
    """A small set in the layout of COCO with 80 classes, and the changes of a recipe that make it read that."""
    sizes = {number: (96, 128) for number in range(1, 9)}
    boxes = [
        {"id": number, "image_id": number, "category_id": number, "bbox": [20, 10, 60, 50], "area": 3000,
         "iscrowd": 0, "segmentation": [rectangle(20, 10, 60, 50)]}
        for number in sizes
    ]  # fmt: skip
    names = [{"id": number, "name": f"thing {number}"} for number in range(1, 81)]
    files = [{"id": n, "file_name": f"{n}.png", "height": high, "width": wide} for n, (high, wide) in sizes.items()]
    for split in ("train", "val"):
        content = {"images": files, "annotations": boxes, "categories": names}
        write_part(folder, split, f"{split}2017", content)
    return (f"data.path={folder}", "task.images.sides=[128]", "model.encoder=null")


def fake(recipe, folder):
    """Changes of the recipe that make it read small data of the kind and shape that it reads."""
    task, source = recipe.task, recipe.data.source
    if source == "generated":
        return ("data.num_train=8", "data.num_evaluation=4", "data.num_test=4")
    if source == "coco":
        return write_coco(folder)
    if task.name == "image_classification":
        classes = CLASSES.get(recipe.data.id, 102 if "flowers" in recipe.data.id else 10)
        parts = [images(count, (250, 240), classes) for count in (8, 4, 4)]
        names = tuple(map(str, range(classes)))
    elif task.name in ("language_modelling", "masked_language_modelling"):
        parts, names = [ListSplit(documents(count)) for count in (60, 12, 12)], None
    elif recipe.data.source == "hub" and "cifar10" in recipe.data.id:
        parts, names = [images(count, (32, 32), 10) for count in (8, 4, 4)], tuple("0123456789")
    else:
        pair = {"text_pair": "a paper that is cited"} if task.name == "pair_classification" else {}
        parts, names = [labelled(documents(count), **pair) for count in (8, 4, 4)], ("no", "yes")
    kind = "image" if "image" in parts[0][0] else "text"
    held = hold_data(Data("small", kind, parts[0], parts[1], names, "made by a test", {"test": parts[2]}))
    return (f"data={{source: object, name: {held.name}, sha256: '{held.sha256}'}}",)


@functools.cache
def vocabulary(folder):
    """A folder with vocab.json and merges.txt, as GPT-2 has them."""
    choice = TrainedTokenizer(train="bpe", vocabulary=280)
    tokenizer = make_tokenizer(choice, ListSplit(documents(20)), "text")
    tokenizer.inner.model.save(str(folder))
    return folder


def weight_sums(model):
    return [parameter.detach().double().abs().sum() for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_recipe_makes_two_updates(name, tmp_path):
    (tmp_path / "set").mkdir()
    recipe, _ = load_recipe(name, scale="paper")
    changes = [*SHORT, *fake(recipe, tmp_path / "set")]
    changes += [f"model.arguments.{key}={list(value) if isinstance(value, tuple) else value}"
                for key, value in fewer_layers(recipe).items()]  # fmt: skip
    tokenizer = getattr(recipe.task, "tokenizer", None)
    if hasattr(tokenizer, "train"):
        changes.append("task.tokenizer.vocabulary=50")
    elif tokenizer is not None:
        changes.append(f"task.tokenizer.name={vocabulary(tmp_path / 'set')}")
    shallow, base = load_recipe(name, scale="paper", overrides=changes)
    task = prepare_task(shallow, seed=0, base=base)
    model = prepare_model(shallow, MethodSettings.model_validate("conditioned"), task, seed=0, base=base).train()
    optimizer = shallow.optimizer.build(model)
    before = weight_sums(model)
    for step in range(2):
        keys = [(sample % len(task.train), step) for sample in range(2 + task.following)]
        batch = task.training_batch(task.train.fetch(keys), step, 0)
        loss = task.loss(model, batch) / task.num_terms(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite()
    after = weight_sums(model)
    assert all(value.isfinite() for value in after)
    assert any(value != old for value, old in zip(after, before, strict=True))

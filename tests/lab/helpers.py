"""Small models, data and recipes of the engine's tests."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellcond.lab.data import Data, TensorDataset
from wellcond.lab.recipe import Recipe, load_recipe

RECIPE = {
    "name": "small",
    "scale": "tiny",
    "task": {"name": "image_classification"},
    "data": {"source": "digits"},
    "model": {
        "name": "timm:vit_tiny_patch16_224",
        "arguments": {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2},
    },
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "training": {"length": {"epochs": 2}, "batch_size": 4},
}


def make_recipe(**changes) -> Recipe:
    return Recipe.model_validate(RECIPE | changes)


def parse_recipe(text, name="recipe.yaml", overrides=()) -> Recipe:
    """A recipe from the text of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8")
        return load_recipe(str(path), overrides=overrides)[0]


def tiny_vit(**changes):
    import timm

    arguments = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 3} | {
        "embed_dim": 8,
        "depth": 2,
        "num_heads": 2,
    }
    return timm.create_model("vit_tiny_patch16_224", **arguments | changes)


def tiny_gpt2(vocabulary=257, context=8):
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return AutoModelForCausalLM.from_config(config)


def tiny_bert(vocabulary=257, num_labels=2):
    from transformers import AutoModelForSequenceClassification, BertConfig

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=32,
        num_labels=num_labels,
        pad_token_id=0,
    )
    return AutoModelForSequenceClassification.from_config(config)


@dataclass
class ListSplit:
    """Examples in a list."""

    examples: list

    @property
    def labels(self) -> Tensor | None:
        found = [example["label"] for example in self.examples if "label" in example]
        return torch.tensor(found) if found else None

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]

    def content(self, index):
        return repr(self.examples[index]).encode()


def bundle(kind, train, evaluation=None, classes=3, **others):
    names = None if classes is None else tuple(map(str, range(classes)))
    return Data("some", kind, train, evaluation or train, names, "", **others)


def byte_images(count=12, channels=3, size=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, channels, size, size), generator=source, dtype=torch.uint8)
    return TensorDataset("image", images, torch.arange(count) % 3)


def pil_images(sizes, mode="RGB"):
    from PIL import Image

    random = np.random.default_rng(0)
    shapes = [(height, width, 3) if mode == "RGB" else (height, width) for width, height in sizes]
    return ListSplit(
        [
            {"image": Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)), "label": number % 3}
            for number, shape in enumerate(shapes)
        ]
    )


def texts(*documents, labels=None):
    rows = [{"text": document} for document in documents]
    return ListSplit([row | {"label": label} for row, label in zip(rows, labels, strict=True)] if labels else rows)


def same_state(a, b):
    """Whether two state dicts are equal bit for bit."""
    return list(a) == list(b) and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key] for key in a
    )

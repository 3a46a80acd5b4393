"""A small ViT on scikit-learn's digits: 1797 grey images of 8 x 8, the whole experiment on a laptop CPU in minutes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.find import find_attention
from wellcond.conditioning.apply import condition_, conditioning_of, fold_
from wellcond.errors import MissingExtraError, NumericalWarning
from wellcond.init.apply import init_
from wellcond.linalg.spectrum import spectra

NUM_TRAIN = 1297
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class Variant:
    """One way to start and to condition a model."""

    name: str
    init: str
    condition: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("default", "default"),
    Variant("Gaussian 1/√D (scale control)", "gaussian"),
    Variant("conditioned", "conditioned"),
    Variant("default + balanced", "default", "balanced"),
    Variant("conditioned + balanced", "conditioned", "balanced"),
    Variant("default + identity λ=10", "default", "identity", {"lam": 10.0}),
)


@dataclass(frozen=True)
class Outcome:
    """Result of one run."""

    variant: str
    seed: int
    accuracy: float
    kappa_before: dict[str, float]
    kappa_after: dict[str, float]
    folded_difference: float
    """Largest change of any test logit by folding, relative to the largest logit."""


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) with zero mean and unit variance, and labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """The digits in one fixed random order: the first 1297 train, the other 500 test."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "train") from error
    data = load()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    images = (images - images[:NUM_TRAIN].mean()) / images[:NUM_TRAIN].std()
    labels = torch.tensor(data.target)[order]
    return Digits(images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:])


def build_vit() -> nn.Module:
    """Timm's ViT at width 64, depth 4, 4 heads, 2 x 2 patches: 16 patches and a class token."""
    try:
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise MissingExtraError("timm", "vision") from error
    return VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.0
    )


def mean_kappa(model: nn.Module) -> dict[str, float]:
    """Geometric mean over layers and heads of the condition number of W_Q, W_K, W_V as the forward uses them."""
    sites = find_attention(model)
    result = {}
    for role in "qkv":
        kappas = [s.condition_number for site in sites for s in spectra(site.slots[role].read())]
        result[role] = float(torch.tensor(kappas, dtype=torch.float64).log().mean().exp())
    return result


def prepare(variant: Variant, seed: int) -> nn.Module:
    """Model of a variant. A seed fixes every other weight, so variants with the same seed are paired."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_vit()
    if variant.init != "default":
        init_(model, variant.init, generator=torch.Generator().manual_seed(seed))
    if variant.condition is not None:
        with warnings.catch_warnings():
            # The table shows the collapse that this warns of.
            warnings.simplefilter("ignore", NumericalWarning)
            condition_(model, variant.condition, **variant.options)
    return model


def train(
    model: nn.Module, data: Digits, *, seed: int, epochs: int, on_epoch: Callable[[int, float], None] | None = None
) -> None:
    """AdamW with a one-cycle cosine schedule; the seed fixes the order of the images."""
    order = torch.Generator().manual_seed(seed)
    num_steps = epochs * -(-len(data.train_images) // BATCH_SIZE)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=0.1)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(data.train_images), generator=order).split(BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(data.train_images[batch]), data.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(batch)
        if on_epoch is not None:
            on_epoch(epoch, total / len(data.train_images))


@torch.no_grad()
def run_variant(
    variant: Variant,
    seed: int,
    data: Digits,
    *,
    epochs: int,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Outcome:
    """Prepare, train, fold and test one model."""
    model = prepare(variant, seed)
    before = mean_kappa(model)
    with torch.enable_grad():
        train(model, data, seed=seed, epochs=epochs, on_epoch=on_epoch)
    model.eval()
    after = mean_kappa(model)
    logits = model(data.test_images)
    difference = 0.0
    if conditioning_of(model) is not None:
        plain_logits = fold_(model)(data.test_images)
        difference = float((plain_logits - logits).abs().max() / logits.abs().max())
        logits = plain_logits
    accuracy = float((logits.argmax(1) == data.test_labels).double().mean())
    return Outcome(variant.name, seed, accuracy, before, after, difference)

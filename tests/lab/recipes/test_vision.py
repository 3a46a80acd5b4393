"""The shipped vision recipes, value by value."""

from dataclasses import dataclass, replace

import pytest
import torch
from timm.layers import DropPath

from wellcond import find_attention
from wellcond.lab.load_recipe import load_recipe, shipped_recipes
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model


@dataclass(frozen=True)
class Column:
    """One column of the table of R-IN."""

    model: str
    lr: float = 1e-3
    batch: int = 1024
    weight_decay: float = 0.05
    epochs: int = 300
    cooldown: float | None = 10
    warmup: float = 5
    warmup_from: float = 1e-6
    min_lr: float = 1e-5
    drop_path: float = 0.1
    color_jitter: float = 0.3
    repeats: int = 3
    clip: float | None = None
    average: float | None = None
    crop: float = 0.875
    data: tuple[str, str, str, str] = ("ILSVRC/imagenet-1k", "validation", "image", "label")
    size: int = 224


VIT = Column("vit_base_patch16_224")
DEIT = replace(VIT, model="deit_base_patch16_224", average=0.99996)
SWIN = Column(
    "swin_base_patch4_window7_224", cooldown=None, warmup=20, warmup_from=5e-7, min_lr=5e-6, drop_path=0.5,
    color_jitter=0.4, repeats=1, clip=5.0,
)  # fmt: skip
XCIT = Column("xcit_medium_24_p16_224", epochs=400, drop_path=0.15, color_jitter=0.4, average=0.99996, crop=1.0)
DAVIT = Column("davit_base", drop_path=0.4, color_jitter=0.4, repeats=1, clip=1.0, crop=0.9)
SMALL_SETS = Column(
    "vit_tiny_patch16_224", lr=2e-3, batch=512, cooldown=None, warmup=50, warmup_from=0.0, min_lr=1e-6, drop_path=0.0,
    color_jitter=0.4, repeats=1,
)  # fmt: skip
PAPER = {
    "vit": VIT,
    "deit": DEIT,
    "swin": SWIN,
    "xcit": XCIT,
    "davit": DAVIT,
    "vit-small": replace(VIT, model="vit_small_patch16_224"),
    "xcit-small": replace(XCIT, model="xcit_small_12_p16_224", drop_path=0.05),
    "vit-large": replace(VIT, model="vit_large_patch16_224", drop_path=0.3),
    "deit-large": replace(DEIT, model="deit3_large_patch16_224", drop_path=0.3),
    "swin-large": replace(SWIN, model="swin_large_patch4_window7_224", drop_path=0.5),
    "xcit-large": replace(XCIT, model="xcit_large_24_p16_224", drop_path=0.3),
    "davit-large": replace(DAVIT, model="davit_large", drop_path=0.5),
    "vit-giant": replace(VIT, model="vit_giant_patch14_224", drop_path=0.4),
    "davit-giant": replace(DAVIT, model="davit_giant", drop_path=0.5),
}
SETS = {
    "cifar10": (("uoft-cs/cifar10", "test", "img", "label"), 10),
    "cifar100": (("uoft-cs/cifar100", "test", "img", "fine_label"), 100),
    "pets": (("timm/oxford-iiit-pet", "test", "image", "label"), 37),
    "flowers": (("dpdl-benchmark/oxford_flowers102", "test", "image", "label"), 102),
    "food101": (("ethz/food101", "validation", "image", "label"), 101),
}
for set_name, (columns, _) in SETS.items():
    PAPER[f"vit-tiny-{set_name}"] = replace(SMALL_SETS, data=columns)
# At the scale `small`: 0.3 of the length, half the batch, half the learning rate, and no average (it is not evaluated).
CIFAR = {
    "lr": 5e-4, "batch": 512, "warmup_from": 5e-7, "min_lr": 5e-6, "cooldown": 3, "warmup": 1.5, "epochs": 90,
    "average": None, "crop": 1.0, "data": SETS["cifar10"][0],
}  # fmt: skip
SWIN_CIFAR = CIFAR | {"cooldown": None, "warmup": 6, "warmup_from": 2.5e-7, "min_lr": 2.5e-6}
SMALL = {
    "vit": replace(VIT, model="vit_tiny_patch16_224", size=32, **CIFAR),
    "deit": replace(DEIT, model="deit_tiny_patch16_224", size=32, **CIFAR),
    "swin": replace(SWIN, model="swin_tiny_patch4_window7_224", drop_path=0.2, size=64, **SWIN_CIFAR),
    "xcit": replace(XCIT, model="xcit_nano_12_p16_224", drop_path=0.0, size=128, **CIFAR | {"epochs": 120}),
    "davit": replace(DAVIT, model="davit_tiny", drop_path=0.1, size=64, **CIFAR),
}
NUM_CLASSES = {"ILSVRC/imagenet-1k": 1000} | {columns[0]: number for columns, number in SETS.values()}
ALL = [("paper", *item) for item in PAPER.items()] + [("small", *item) for item in SMALL.items()]
every_recipe = pytest.mark.parametrize(("scale", "name", "column"), ALL, ids=[f"{s}-{n}" for s, n, _ in ALL])


def epochs(interval):
    return None if interval is None else interval.epochs


def resolved(recipe):
    """The fields of a recipe as the table has them."""
    schedule, augmentation, training = recipe.schedule, recipe.augmentation, recipe.training
    cooldown = epochs(schedule.cooldown)
    return Column(
        model=recipe.model.name.removeprefix("timm:"),
        lr=recipe.optimizer.lr,
        batch=training.batch_size,
        weight_decay=recipe.optimizer.weight_decay,
        epochs=training.length.epochs - (cooldown or 0),
        cooldown=cooldown,
        warmup=schedule.warmup.epochs,
        warmup_from=pytest.approx(schedule.start * recipe.optimizer.lr),
        min_lr=pytest.approx(schedule.end * recipe.optimizer.lr),
        drop_path=recipe.model.arguments["drop_path_rate"],
        color_jitter=augmentation.color_jitter,
        repeats=augmentation.repeats,
        clip=training.clip_norm,
        average=training.averaging and training.averaging.decay,
        crop=recipe.task.evaluation_crop,
        data=(recipe.data.id, recipe.data.evaluation_split, recipe.data.input, recipe.data.label),
        size=recipe.task.image_size,
    )


@every_recipe
def test_a_recipe_has_the_values_of_the_table(scale, name, column):
    assert resolved(load_recipe(name, scale=scale)[0]) == column


@every_recipe
def test_what_all_columns_share(scale, name, column):
    recipe, _ = load_recipe(name, scale=scale)
    optimizer, augmentation, task = recipe.optimizer, recipe.augmentation, recipe.task
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.999), 1e-8)
    assert recipe.schedule.name == "cosine" and recipe.precision.mixed != "no" and recipe.seeds == (0, 1, 2, 3, 4)
    assert (augmentation.rand_augment, augmentation.random_erasing) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert (augmentation.mixup, augmentation.cutmix, augmentation.label_smoothing) == (0.8, 1.0, 0.1)
    assert (augmentation.flip, augmentation.resized_crop, augmentation.crop_padding) == (0.5, (0.08, 1.0), 0)
    assert task.name == "image_classification"
    assert recipe.training.averaging is None or not recipe.training.averaging.evaluate
    splits = "train+validation" if name.endswith("flowers") else "train"
    assert recipe.data.source == "hub" and recipe.data.train_split == splits
    labels = [method.label for method in recipe.methods]
    assert {"default", "gaussian", "mimetic", "conditioned", "identity(lam=10)", "polar", "balanced"} <= {*labels}
    assert ("conditioned(roles=by_name)" in labels) == name.startswith("davit")
    assert "GPU" in recipe.description and (recipe.data.id in recipe.description)


@every_recipe
def test_the_model_is_built_with_its_drop_path_and_heads_that_fill_its_width(scale, name, column):
    recipe, _ = load_recipe(name, scale=scale)
    num_classes = NUM_CLASSES[recipe.data.id]
    given = {"num_classes": num_classes, "in_chans": 3}
    if not name.startswith("davit"):  # which takes images of any size
        given["img_size"] = column.size
    with torch.device("meta"):
        model = build_model(recipe.model.name, given | recipe.model.arguments)
    assert model.get_classifier().out_features == num_classes
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert max(rates, default=0.0) == pytest.approx(column.drop_path)
    # Mimetic initialisation needs heads that fill the width.
    assert all(site.num_heads * site.head_dim == site.in_features for site in find_attention(model))


@pytest.mark.parametrize("name", list(SMALL))
def test_a_small_model_takes_its_images(name):
    recipe, _ = load_recipe(name, scale="small")
    size = SMALL[name].size
    given = {"num_classes": 10} | ({} if name == "davit" else {"img_size": size})
    model = build_model(recipe.model.name, given | recipe.model.arguments).eval()
    MethodSettings.model_validate("conditioned").apply_(model, seed=0)
    with torch.no_grad():
        assert model(torch.randn(1, 3, size, size)).isfinite().all()


def test_no_shipped_recipe_of_these_families_is_left_out():
    families = ("vit", "deit", "swin", "xcit", "davit")
    found = {
        (scale, name)
        for scale, name in (shipped.split("/") for shipped in shipped_recipes())
        if scale != "tiny" and name.split("-")[0] in families
    }
    assert found == {(scale, name) for scale, name, _ in ALL}

"""timm's own parts, put together as its train script does, with one line added."""

import argparse
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, random_seed

import wellcond as wc
from wellcond.cli.main import load_app

# timm leaves the image files that it reads to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

NAME = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 2}
ARGS = argparse.Namespace(model=NAME, lr=1e-2)
LINES = {
    "init": lambda model: wc.init_(model, "conditioned"),
    "condition": lambda model: wc.condition_(model, "balanced"),
    "frozen": lambda model: wc.condition_(model, "polar", frozen=True),
}
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("validation", 2)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def plain_model():
    return timm.create_model(NAME, **SMALL)


def train(added_line, images, folder, *, epochs=2, resume=""):
    """What train.py does, in its order."""
    random_seed(42, 0)
    model = timm.create_model(NAME, **SMALL)
    added_line(model)

    data_config = resolve_data_config({"img_size": 16}, model=model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=ARGS.lr, weight_decay=0.05)
    resume_epoch = resume_checkpoint(model, resume, optimizer=optimizer) if resume else None
    model_ema = ModelEmaV3(model, decay=0.5)
    if resume:
        load_checkpoint(model_ema.module, resume, use_ema=True)

    def loader(split, is_training):
        dataset = create_dataset("", root=str(images), split=split, is_training=is_training, batch_size=4)
        return create_loader(
            dataset, data_config["input_size"], 4, is_training=is_training, use_prefetcher=False, num_workers=0,
            persistent_workers=False, device=torch.device("cpu"),
        )  # fmt: skip

    loader_train, loader_eval = loader("train", True), loader("validation", False)
    scheduler, num_epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=2, warmup_epochs=1, updates_per_epoch=len(loader_train)
    )
    start_epoch = resume_epoch or 0
    if start_epoch:
        scheduler.step(start_epoch)
    saver = CheckpointSaver(model, optimizer, ARGS, model_ema, checkpoint_dir=str(folder), recovery_dir=str(folder))
    loss_fn = torch.nn.CrossEntropyLoss()
    losses = []
    for epoch in range(start_epoch, min(epochs, num_epochs)):
        random_seed(epoch, 0)  # train.py saves no random numbers; with this, resuming can be compared
        model.train()
        for index, (input, target) in enumerate(loader_train):
            loss = loss_fn(model(input), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model_ema.update(model)
            scheduler.step_update(epoch * len(loader_train) + index + 1)
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = [(model_ema.module(i).argmax(1) == t).float().mean().item() for i, t in loader_eval]
        scheduler.step(epoch + 1)
        saver.save_checkpoint(epoch, metric=sum(right))
    return SimpleNamespace(model=model.eval(), ema=model_ema.module, losses=losses, last=str(folder / "last.pth.tar"))


@pytest.mark.parametrize("line", list(LINES))
def test_one_line_trains_saves_and_resumes(line, images, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = train(LINES[line], images, tmp_path / "whole")
    half = train(LINES[line], images, tmp_path / "cut", epochs=1)
    rest = train(LINES[line], images, tmp_path / "cut", resume=half.last)
    assert half.losses + rest.losses == whole.losses and len(rest.losses) == 3
    for mine, other in ((rest.model, whole.model), (rest.ema, whole.ema)):
        for (key, a), b in zip(mine.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), key
    conditioned = wc.conditioning_of(whole.model)
    assert wc.conditioning_of(whole.ema) == conditioned and (conditioned is None) == (line == "init")


@pytest.mark.parametrize("line", ["condition", "frozen"])
def test_a_folded_model_is_plain_to_timm(line, images, tmp_path):
    run = train(LINES[line], images, tmp_path)
    for model in (run.model, run.ema):
        expected = model(X)
        torch.save(wc.fold_(model).state_dict(), tmp_path / "plain.pth")
        loaded = timm.create_model(NAME, checkpoint_path=str(tmp_path / "plain.pth"), **SMALL).eval()
        torch.testing.assert_close(loaded(X), expected, rtol=0, atol=1e-6)


def test_a_training_checkpoint_says_how_to_load_it(images, tmp_path):
    run = train(LINES["condition"], images, tmp_path, epochs=1)
    for attempt in (
        lambda: resume_checkpoint(plain_model(), run.last),
        lambda: load_checkpoint(plain_model(), run.last, use_ema=True),
        lambda: timm.create_model(NAME, checkpoint_path=run.last, **SMALL),
    ):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*wellcond_conditioning"):
            attempt()
    with pytest.raises(wc.CheckpointMismatchError):
        resume_checkpoint(wc.condition_(plain_model(), "polar"), run.last)
    # validate.py with its own line: the averaged weights, conditioned as they were.
    loaded = wc.condition_(plain_model(), "balanced").eval()
    load_checkpoint(loaded, run.last, use_ema=True)
    assert torch.equal(loaded(X), run.ema(X))


def test_the_command_folds_a_file_of_the_train_script(images, tmp_path):
    run = train(LINES["condition"], images, tmp_path, epochs=1)
    arguments = [word for name, value in SMALL.items() for word in ("--model-arg", f"{name}={value}")]
    for flags, model in (([], run.model), (["--ema"], run.ema)):
        output = tmp_path / f"plain{len(flags)}.safetensors"
        with pytest.raises(SystemExit) as end:
            load_app()(["fold", f"timm:{NAME}", *arguments, "--weights", run.last, *flags, "-o", str(output)])
        assert not end.value.code
        loaded = timm.create_model(NAME, checkpoint_path=str(output), **SMALL).eval()
        torch.testing.assert_close(loaded(X), model(X), rtol=0, atol=1e-5)
    assert not torch.allclose(run.model(X), run.ema(X), atol=1e-5)

"""Monitor, alarms and clip in the callbacks of both trainers; the training is that without them, but for the clip."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import wellcond as wc
from wellcond.errors import OptionError
from wellcond.integrations import lightning, transformers
from wellcond.training.series import Series

WORDS = [
    {"input_ids": words, "labels": words}
    for words in torch.randint(32, (32, 12), generator=torch.Generator().manual_seed(0))
]


class Heard(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **parts):
        self.logs.append(dict(logs))


def fit_transformers(folder, callback, report_to=()):
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    sizes = {"vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    heard = Heard()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "use_cpu": True}
    arguments = TrainingArguments(
        folder, **options, report_to=list(report_to), logging_steps=2, save_strategy="no", seed=0
    )
    trainer = Trainer(model, arguments, train_dataset=WORDS, callbacks=[heard])
    if callback is not None:
        callback.add_to(trainer)
    trainer.train()
    return model, heard, trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fit_transformers(tmp_path_factory.mktemp("plain"), None)[0]


def test_transformers(plain, tmp_path):
    seen = []
    callback = transformers.WellcondCallback(
        measure=False, monitor={"every": 2, "weights_every": 2}, alarms=seen.append
    )
    model, heard, trainer = fit_transformers(tmp_path / "a", callback)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    series = Series.read(tmp_path / "a" / "monitor.jsonl")
    assert series.steps == [1, 2, 4] and len(series.layers) == 2
    names = {name for logs in heard.logs for name in logs}
    assert "wellcond.transformer.h.1.attn/head02.max_logit" in names
    assert not any("head02" in name for line in trainer.state.log_history for name in line)
    assert seen == callback.beside.monitor.alarms.raised


def test_transformers_with_a_clip(plain, tmp_path):
    callback = transformers.WellcondCallback(measure=False, monitor={"every": 1}, clip=0.01)
    model, _, _ = fit_transformers(tmp_path / "a", callback)
    clipped, whole = (one.transformer.h[0].attn.c_attn.weight.detach()[:, :48].norm() for one in (model, plain))
    assert clipped < whole


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def fit_lightning(folder, *callbacks, logger=None):
    torch.manual_seed(0)
    module = Module()
    data = torch.utils.data.DataLoader(torch.randn(16, 6, 16), batch_size=4)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger or CSVLogger(folder), callbacks=list(callbacks), **options
    )
    trainer.fit(module, data)
    return module, trainer


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*(num_workers|logging interval|litmodels).*")
def test_lightning(tmp_path):
    callback = lightning.WellcondCallback(measure=False, monitor={"every": 2}, alarms=True, clip=1e6)
    module, trainer = fit_lightning(tmp_path / "a", callback)
    plain, _ = fit_lightning(tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    lines = (Path(trainer.log_dir) / "monitor.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [1, 2, 4]
    assert "wellcond.layer.self_attn/head01.entropy" in (Path(trainer.log_dir) / "metrics.csv").read_text()


def test_mistakes():
    with pytest.raises(OptionError, match="monitor=True"):
        transformers.WellcondCallback(alarms=True)
    with pytest.raises(TypeError, match="monitor"):
        lightning.WellcondCallback(monitor=3)
    with pytest.raises(wc.UnknownChoiceError, match="sink"):
        transformers.WellcondCallback(monitor=True, alarms="mail")

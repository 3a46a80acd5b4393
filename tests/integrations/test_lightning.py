"""The real Lightning loop for a few steps: preparing, measuring, logging, checkpoints, resuming, export."""

import copy
import csv
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import wellcond as wc
from models import stack

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from wellcond.integrations.lightning import KEY, WellcondCallback, export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:::lightning")
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 5, 12, generator=GENERATOR), torch.randint(3, (16,), generator=GENERATOR)
EVERY = {"every": 2, "budget": None}
CHOICES = {"init": "gaussian", "condition": "balanced", "network": "net", **EVERY}


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = stack()
        self.dropout = nn.Dropout(0.1)
        self.hook_calls = []
        self.losses = []

    def forward(self, tokens):
        return self.dropout(self.net(tokens)).mean(1)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch, index):
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint):
        self.hook_calls.append("save")

    def on_load_checkpoint(self, checkpoint):
        self.hook_calls.append("load")


def make_trainer(folder, *callbacks, **options):
    settings = {"max_steps": 4, "accelerator": "cpu", "logger": False, "log_every_n_steps": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **(settings | quiet | options))


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)


def fit(folder, callback, module=None, data=None, ckpt_path=None, **options):
    torch.manual_seed(0)
    module = Classifier() if module is None else module
    trainer = make_trainer(folder, *([] if callback is None else [callback]), **options)
    torch.manual_seed(1)
    trainer.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return module, trainer


def test_it_prepares_measures_and_logs(tmp_path):
    logger = CSVLogger(tmp_path)
    callback = WellcondCallback(**CHOICES, per_layer=True)
    module, trainer = fit(tmp_path, callback, logger=logger)
    assert wc.conditioning_of(module.net)["method"] == "balanced"
    assert sorted({p.step for p in callback.points}) == [0, 2, 4]
    assert max(p.kappa_q for p in callback.points) <= 2.0001
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file) if row["wellcond/kappa_q_worst"]}
    assert sorted(rows) == [0, 2, 4]
    for step, row in rows.items():
        points = [p for p in callback.points if p.step == step]
        assert float(row["wellcond/kappa_q_worst"]) == pytest.approx(max(p.kappa_q for p in points))
        assert float(row["wellcond/0.attn/kappa_v_worst"]) <= 2.0001 and row["wellcond/entropy"]
    with open(f"{trainer.log_dir}/wellcond.jsonl") as file:
        run = callback.tracker.run
        assert [json.loads(line) for line in file] == [p.to_json_dict() | run for p in callback.points]
    assert run["version"] == wc.__version__ and run["input"].startswith("float32 (1, 5, 12), sha256 ")


@pytest.mark.parametrize("options", [{"every": 2, "weights_every": 1, "budget": None}, {}], ids=["every", "budget"])
def test_training_is_the_same_with_and_without(options, tmp_path):
    plain, _ = fit(tmp_path, None)
    watched, _ = fit(tmp_path, callback := WellcondCallback(**options))
    assert callback.points
    assert watched.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))


FROZEN = {"method": "polar", "frozen": True}


@pytest.mark.parametrize("network, condition", [("net", "balanced"), pytest.param("", FROZEN, marks=pytest.mark.slow)])
def test_resuming_equals_not_stopping(condition, network, tmp_path):
    choices = {**CHOICES, "condition": condition, "network": network}
    # Lightning saves neither random numbers nor a place within an epoch: no dropout, and two epochs of two steps.
    data = DataLoader(TensorDataset(X, Y), batch_size=8)

    def run(callback, epochs, **more):
        torch.manual_seed(0)
        module = Classifier()
        module.dropout.p = 0.0
        return fit(tmp_path, callback, module, data, max_steps=-1, max_epochs=epochs, **more)

    whole, _ = run(first := WellcondCallback(**choices), 2)
    _, half = run(WellcondCallback(**choices), 1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(later := WellcondCallback(**choices), 2, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.losses == whole.losses[2:]
    for (key, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert {p.step for p in later.points} == {4}
    assert [p.kappa_q for p in later.points] == [p.kappa_q for p in first.points if p.step == 4]
    assert later.state_dict() == first.state_dict()
    assert "load" in resumed.hook_calls, "the module's own hooks are called too"


@pytest.mark.parametrize("weights_only", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checkpoints_load_as_a_plain_module(weights_only, tmp_path):
    saver = ModelCheckpoint(tmp_path, "last", save_weights_only=weights_only)
    torch.manual_seed(0)
    module = Classifier()
    trainer = make_trainer(
        tmp_path, WellcondCallback(**CHOICES, export=tmp_path / "plain.safetensors"), saver, enable_checkpointing=True
    )
    trainer.fit(module, loader())
    plain = Classifier.load_from_checkpoint(tmp_path / "last.ckpt").eval()
    assert wc.conditioning_of(plain.net) is None
    torch.testing.assert_close(plain(X), module.eval()(X), rtol=0, atol=1e-6)
    raw = module.net.state_dict()["0.attn.c_attn.weight"]
    assert not torch.allclose(plain.net[0].attn.c_attn.weight, raw)

    network = stack()
    network.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    torch.testing.assert_close(network(X), module.net(X), rtol=0, atol=1e-6)
    assert wc.conditioning_of(module.net) is not None and "save" in module.hook_calls

    # A fresh module in another trainer tests the same, with and without the callback.
    scores = []
    for callbacks in ([], [WellcondCallback(**CHOICES)]):
        tester = make_trainer(tmp_path, *callbacks)
        scores += tester.test(Classifier(), DataLoader(TensorDataset(X, Y), 16), ckpt_path=tmp_path / "last.ckpt",
                              verbose=False)  # fmt: skip
    scores += trainer.test(module, DataLoader(TensorDataset(X, Y), 16), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert [score["test_loss"] for score in scores] == pytest.approx([scores[0]["test_loss"]] * 3)


def test_another_conditioning_is_refused_and_without_the_callback_effective_weights_are_trained_on(tmp_path):
    half = tmp_path / "half.ckpt"
    fit(tmp_path, WellcondCallback(**CHOICES), max_steps=2)[1].save_checkpoint(half)
    for condition in (None, "polar"):
        with pytest.raises(wc.CheckpointMismatchError, match="another conditioning"):
            fit(tmp_path, WellcondCallback(**(CHOICES | {"condition": condition})), ckpt_path=half)
    effective = torch.load(half, weights_only=True)["state_dict"]["net.0.attn.c_attn.weight"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, _ = fit(tmp_path, None, max_steps=2, ckpt_path=half)
    assert any("callbacks used to create the checkpoint" in str(warning.message) for warning in caught)
    assert torch.equal(module.net[0].attn.c_attn.weight, effective)


def test_a_module_that_is_conditioned_in_its_constructor(tmp_path):
    class Conditioned(Classifier):
        def __init__(self):
            super().__init__()
            wc.condition_(self.net, "balanced")

    _, trainer = fit(tmp_path, None, Conditioned(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")  # raw and marked, as before
    callback = WellcondCallback(network="net", **EVERY)
    module, _ = fit(tmp_path, callback, Conditioned(), ckpt_path=tmp_path / "half.ckpt")
    assert wc.conditioning_of(module.net) and {p.step for p in callback.points} == {4}


def test_accumulated_gradients_count_steps_of_the_optimiser(tmp_path):
    callback = WellcondCallback(**EVERY)
    fit(tmp_path, callback, accumulate_grad_batches=2)
    assert sorted({p.step for p in callback.points}) == [0, 2, 4]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


def test_bad_input(tmp_path):
    for options, said in (
        ({"init": "xavier"}, "xavier"),
        ({"evry": 3}, "evry"),
        ({"export": "plain.pt"}, r"export: .*\*.safetensors"),
        ({"network": 3}, "network: expected"),
        ({"init": "calibrated"}, "give batch="),
    ):
        with pytest.raises(ValueError, match=said):
            WellcondCallback(**options)
    with pytest.raises(ValueError, match=r"network: .*'net', 'dropout'.*'model'"):
        fit(tmp_path, WellcondCallback(condition="balanced", network="model"))
    stream = DataLoader(Stream(), batch_size=4)
    with pytest.raises(ValueError, match="batch: expected one to measure with"):
        fit(tmp_path, WellcondCallback(**EVERY), data=stream)
    fit(tmp_path, callback := WellcondCallback(batch=X[:1], **EVERY), data=stream)
    assert callback.points
    fit(tmp_path, callback := WellcondCallback(condition="balanced", measure=False), data=stream)
    assert not callback.points


def test_calibrated_takes_the_batch(tmp_path):
    module = Classifier()
    expected = copy.deepcopy(module.net)
    torch.manual_seed(3)
    wc.init_(expected, "calibrated", batch=X[:4])
    callback = WellcondCallback(init="calibrated", batch=X[:4], network="net", measure=False)
    torch.manual_seed(3)
    callback.setup(None, module, "fit")
    for name, value in expected.state_dict().items():
        assert torch.equal(module.net.state_dict()[name], value), name
    again = WellcondCallback(init={"method": "calibrated", "batch": X[4:]}, network="net")
    with pytest.raises(ValueError, match="was prepared with init='calibrated'"):
        again.setup(None, module, "fit")


def test_a_plain_module_stays_plain(tmp_path):
    module, trainer = fit(tmp_path, WellcondCallback(init="conditioned", **EVERY))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    assert KEY not in torch.load(tmp_path / "plain.ckpt", weights_only=True)
    export(module, tmp_path / "plain.safetensors", network="net")
    stack().load_state_dict(load_file(tmp_path / "plain.safetensors"))


def test_a_module_that_saves_only_what_it_trains(tmp_path):
    class Filtering(Classifier):
        def on_save_checkpoint(self, checkpoint):
            names = {name for name, _ in self.named_parameters()}
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}

    module, trainer = fit(tmp_path, WellcondCallback(**CHOICES), Filtering())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Filtering.load_from_checkpoint(tmp_path / "last.ckpt")
    torch.testing.assert_close(loaded.eval()(X), module.eval()(X))


@pytest.mark.parametrize("callback_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_export_is_of_averaged_weights(callback_first, tmp_path):
    line = WellcondCallback(**CHOICES, export=tmp_path / "plain.safetensors")
    average = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    callbacks = [line, average] if callback_first else [average, line]
    module = Classifier()
    make_trainer(tmp_path, *callbacks, max_steps=-1, max_epochs=3).fit(module, loader())
    plain = stack()
    plain.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    torch.testing.assert_close(plain.eval()(X), module.net.eval()(X))


def test_a_compiled_network_is_exported_under_its_own_names(tmp_path):
    module = Classifier()
    module.net = torch.compile(wc.condition_(module.net, "balanced"), backend="eager")
    export(module, tmp_path / "plain.safetensors", network="net")
    stack().load_state_dict(load_file(tmp_path / "plain.safetensors"))


def test_fitting_again_prepares_a_new_network_only_and_refuses_a_folded_one(tmp_path):
    callback = WellcondCallback(**CHOICES)
    module, _ = fit(tmp_path, callback, max_steps=1)
    before = module.state_dict()["net.0.attn.c_attn.weight"].clone()
    fit(tmp_path, callback, module, max_steps=1)
    moved = (module.state_dict()["net.0.attn.c_attn.weight"] - before).abs().max()
    assert 0 < moved < 0.05, "one step of Adam at 1e-2, not new weights"
    module.net = stack()
    fit(tmp_path, WellcondCallback(**CHOICES), module, max_steps=1)
    assert wc.conditioning_of(module.net)["method"] == "balanced"
    wc.fold_(module)
    with pytest.raises(ValueError, match="folded since"):
        fit(tmp_path, WellcondCallback(**CHOICES), module)
    fit(tmp_path, WellcondCallback(network="net", **EVERY), module, max_steps=1)

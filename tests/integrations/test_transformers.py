"""The real Trainer for a few steps: preparing, measuring, logging."""

import ast
import json
import random

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

import wellcond as wc
from integrations.trainer_runs import bert, conditioned, inputs, losses, make_trainer, samples
from models import unchanged
from wellcond.integrations.transformers import WellcondCallback, prepare

EVERY = {"every": 2, "budget": None}


# -- prepare ------------------------------------------------------------------------------------------------------


def test_prepare_is_init_then_condition():
    torch.manual_seed(0)
    by_hand = wc.condition_(wc.init_(bert(), "gaussian", std=0.5), "balanced", target=3.0, projections="qk")
    torch.manual_seed(0)
    init, condition = {"method": "gaussian", "std": 0.5}, {"method": "balanced", "target": 3.0, "projections": "qk"}
    model = bert()
    assert prepare(model, init=init, condition=condition) is model
    assert wc.conditioning_of(model) == wc.conditioning_of(by_hand)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))


@pytest.mark.parametrize(
    "choices, error, said",
    [
        ({"init": "xavier"}, wc.UnknownChoiceError, "xavier"),
        ({"init": "conditioned", "condition": "orthogonal"}, wc.UnknownChoiceError, "orthogonal"),
        ({"init": {"method": "conditioned", "nonsense": 1}}, wc.UnknownChoiceError, "nonsense"),
        ({"init": "conditioned", "condition": {"method": "polar", "lam": 1.0}}, wc.UnknownChoiceError, "lam"),
        ({"condition": {"lam": 1.0}}, ValueError, "condition: expected the name of a method"),
        ({"init": 3}, ValueError, "init: expected the name of a method"),
        ({"init": "balanced"}, wc.UnknownChoiceError, 'use condition="balanced"'),
        ({"condition": "mimetic"}, wc.UnknownChoiceError, 'use init="mimetic"'),
    ],
)
def test_bad_choices_leave_the_model_as_it_was(choices, error, said):
    model = bert()
    with unchanged(model), pytest.raises(error, match=said):
        prepare(model, **choices)


# -- measuring and logging ----------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **parts):
        self.seen.append((state.global_step, dict(logs)))


def test_numbers_reach_history_reporters_console_and_file(tmp_path, capfd):
    recorder = Recorder()  # before ours in the list, as every reporter is
    trainer = make_trainer(conditioned("bert"), "bert", tmp_path, [recorder], disable_tqdm=False)
    callback = WellcondCallback(**EVERY, per_layer=True).add_to(trainer)
    trainer.train()

    assert sorted({p.step for p in callback.points}) == [0, 2, 4]
    logged = [(step, logs) for step, logs in recorder.seen if "wellcond/kappa_q_worst" in logs]
    assert [step for step, _ in logged] == [0, 2, 4]
    history = [entry for entry in trainer.state.log_history if "wellcond/kappa_q_worst" in entry]
    assert [entry["step"] for entry in history] == [0, 2, 4]
    for (step, logs), entry in zip(logged, history, strict=True):
        points = [p for p in callback.points if p.step == step]
        assert logs["wellcond/kappa_q_worst"] == entry["wellcond/kappa_q_worst"] == max(p.kappa_q for p in points)
        assert 1.0 <= logs["wellcond/kappa_k_mean"] <= logs["wellcond/kappa_k_worst"] <= 2.0001
        assert {"wellcond/pseudo_kappa_jacobian_worst", "wellcond/sigma_max_v", "wellcond/entropy"} <= set(logs)
        first = [p for p in points if p.layer == points[0].layer]
        assert logs[f"wellcond/{points[0].layer}/kappa_v_worst"] == max(p.kappa_v for p in first)
        assert all(np.isfinite(value) for value in logs.values())
    lines = [json.loads(line) for line in (tmp_path / "wellcond.jsonl").read_text().splitlines()]
    run = callback.tracker.run
    assert lines == [p.to_json_dict() | run for p in callback.points]
    assert run["model"].startswith(type(trainer.model).__name__) and run["version"] == wc.__version__
    assert_three_numbers("".join(capfd.readouterr()))


def assert_three_numbers(printed):
    """What the console shows of a run that logged three times."""
    lines = [line for line in printed.splitlines() if "wellcond/" in line]
    assert len(lines) == 3
    shown = ["wellcond/pseudo_kappa_jacobian_worst", "wellcond/entropy", "wellcond/dead_heads", "epoch"]
    for line in lines:
        assert list(ast.literal_eval(line[line.index("{") : line.index("}") + 1])) == shown
    assert sum("'loss'" in line for line in printed.splitlines()) == 4


def test_callbacks_argument_logs_to_history_and_says_what_it_cannot_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    pytest.importorskip("tensorboard")
    options = {"report_to": ["tensorboard"], "max_steps": 1}
    trainer = make_trainer(bert(), "bert", tmp_path, [WellcondCallback(**EVERY)], **options)
    with pytest.warns(UserWarning, match=r"cannot reach tensorboard.*add_to\(trainer\)"):
        trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "wellcond/kappa_q_worst" in e] == [0, 1]
    quiet = make_trainer(bert(), "bert", tmp_path / "quiet", [WellcondCallback(**EVERY)], max_steps=1)
    quiet.train()
    assert (tmp_path / "quiet" / "wellcond.jsonl").exists()


def test_the_last_step_is_not_that_of_the_best_checkpoint(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    model = bert()
    seen = {}

    class Spoiler(TrainerCallback):
        def on_step_end(self, args, state, control, **parts):
            seen[state.global_step] = wc.measure(model, inputs("bert")).layers[0].heads[0].jacobian.sigma_max

        def on_evaluate(self, args, state, control, metrics, **parts):
            metrics["eval_loss"] = float(state.global_step)  # the first step is the best

    trainer = make_trainer(model, "bert", tmp_path, [Spoiler()], max_steps=3, learning_rate=0.1, **options)
    callback = WellcondCallback(inputs("bert"), every=10, budget=None).add_to(trainer)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    [first] = [p.sigma_max for p in callback.points if p.step == 3 and p.head == 0][:1]
    assert first == seen[3] != seen[1]


class Augmented:
    """Data that draw random numbers from all three sources whenever they are read."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        shift = int(torch.randint(32, ())) + random.randrange(32) + int(np.random.randint(32))
        row = self.rows[index]
        return {**row, "input_ids": (row["input_ids"] + shift) % 32}


@pytest.mark.parametrize("options", [EVERY, pytest.param({}, marks=pytest.mark.slow)], ids=["every", "budget"])
def test_training_is_the_same_with_and_without(options, tmp_path, capfd):
    found = []
    for watched in (False, True):
        model = conditioned("gpt2")
        trainer = make_trainer(model, "gpt2", tmp_path / str(watched), data=Augmented(samples("gpt2")))
        if watched:
            callback = WellcondCallback(**options).add_to(trainer)
        capfd.readouterr()
        trainer.train()
        found.append((losses(trainer), [p.clone() for p in model.parameters()]))
    if options:
        assert_three_numbers("".join(capfd.readouterr()))  # of a console without a bar
    assert callback.points
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        yield from samples("bert")


def test_a_stream_needs_a_batch(tmp_path):
    trainer = make_trainer(bert(), "bert", tmp_path, data=Stream())
    WellcondCallback(**EVERY).add_to(trainer)
    with pytest.raises(ValueError, match=r"batch: expected one to measure with.*Stream"):
        trainer.train()
    trainer = make_trainer(bert(), "bert", tmp_path, data=Stream(), max_steps=1)
    callback = WellcondCallback(inputs("bert"), **EVERY).add_to(trainer)
    trainer.train()
    assert {p.step for p in callback.points} == {0, 1}


def test_calibrated_takes_a_batch():
    batch = inputs("bert")
    torch.manual_seed(0)
    prepared = prepare(bert(), init="calibrated", batch=batch)
    torch.manual_seed(0)
    expected = wc.init_(bert(), "calibrated", batch=batch)
    for name, value in expected.state_dict().items():
        assert torch.equal(prepared.state_dict()[name], value), name
    torch.manual_seed(0)
    inside = prepare(bert(), init={"method": "calibrated", "batch": batch, "logits": 2.0})
    assert any(not torch.equal(a, b) for a, b in zip(inside.parameters(), prepared.parameters(), strict=True))


@pytest.mark.parametrize(("batch", "said"), [(None, "none was given; give batch="), (3, "batch: expected .* got 3")])
def test_calibrated_without_a_batch_leaves_the_model_as_it_was(batch, said):
    model = bert()
    with unchanged(model), pytest.raises(ValueError, match=said):
        prepare(model, init="calibrated", condition="balanced", batch=batch)


def test_jacobians_are_logged_where_they_are_new_and_the_overhead_counts_everything(tmp_path):
    accumulated = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = make_trainer(bert(), "bert", tmp_path, **accumulated)
    callback = WellcondCallback(every={2}, weights_every=1, budget=None).add_to(trainer)
    trainer.train()
    assert sorted({p.step for p in callback.points}) == [0, 1, 2, 3, 4], "steps of the optimiser"
    history = [entry for entry in trainer.state.log_history if "wellcond/kappa_q_worst" in entry]
    assert [("wellcond/kappa_jacobian_worst" in entry, "wellcond/logit_std" in entry) for entry in history] == [
        (entry["step"] == 2, True) for entry in history
    ]
    spent = [entry["wellcond/seconds"] for entry in history]
    assert spent == sorted(spent) and 0 < spent[0] and spent[-1] >= sum(p.seconds for p in callback.points)
    assert "wellcond/overhead" not in history[0] and history[-1]["wellcond/overhead"] > 0


@pytest.mark.parametrize("family", ["T5", pytest.param("Bart", marks=pytest.mark.slow)])
def test_an_encoder_decoder_is_measured_with_what_its_labels_give_the_decoder(family, tmp_path):
    common = {"vocab_size": 32, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
    sizes = {
        "T5": {"d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
        "Bart": {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16},
    }
    config = getattr(transformers, f"{family}Config")(**common, **sizes[family])
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    tokens = torch.randint(3, 32, (8, 6))
    data = [{"input_ids": row, "labels": row[:4]} for row in tokens]
    trainer = make_trainer(prepare(model, condition="balanced"), "gpt2", tmp_path, data=data, max_steps=1)
    callback = WellcondCallback(every=1, budget=None, heads=[0]).add_to(trainer)
    trainer.train()
    assert {p.step for p in callback.points} == {0, 1} and len({p.layer for p in callback.points}) == 3
    shifted = model.prepare_decoder_input_ids_from_labels(labels=tokens[:1, :4])
    assert torch.equal(callback.tracker.batch["decoder_input_ids"], shifted)

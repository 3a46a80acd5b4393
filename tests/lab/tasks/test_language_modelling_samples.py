"""Text that a trained language model writes into its record, and the tokeniser that the record names."""

import json
import signal

import numpy as np
import pytest
import torch
from torch import nn

from lab.data.helpers import write_parquet
from lab.helpers import bundle, make_recipe, texts, tiny_gpt2
from lab.small import Killed, record, run, train_command
from lab.tasks.test_base import make_task
from wellcond.errors import RunError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.tasks.language_modelling import LanguageModelling
from wellcond.lab.tokenizers import ByteTokenizer
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import Job, run_job
from wellcond.lab.train.run_folder import last_checkpoint, read_tensors

pytest.importorskip("tokenizers")
WORDS = "the cat sat on a mat and saw that no dog was near so it ran home to tell her of this good bad day".split()
BPE = {"train": "bpe", "vocabulary": 280}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.1}


@pytest.fixture(autouse=True)
def own_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    path.write_text("\n".join(" ".join(random.choice(WORDS, 30)) for _ in range(60)))
    return path


def fields(text, tokenizer="bytes", **changes):
    return {
        "task": {"name": "language_modelling", "context": 32, "tokenizer": tokenizer},
        "data": {"source": "files", "train": str(text), "evaluation_fraction": 0.2},
        "model": {"name": "hf:gpt2", "arguments": GPT2},
        "training": {"length": {"steps": 12}, "batch_size": 8, "threads": 1, "log_every": 3},
        "evaluation": {"every": {"steps": 4}, "batch_size": 64},
        "checkpoint": {"every": {"steps": 5}},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    } | changes


def job(folder, text, tokenizer="bytes", method="default", **changes):
    recipe = make_recipe(**fields(text, tokenizer, **changes))
    return Job(recipe, MethodSettings.model_validate(method), 0, folder, cpu=True)


def written_again(job, kind="model"):
    """Samples of the weights in the last checkpoint."""
    task = prepare_task(job.recipe, seed=0, base=None)
    model = prepare_model(job.recipe, job.method, task, seed=1, base=None)
    tensors = read_tensors(last_checkpoint(job.folder / "checkpoints"), kind)
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert not [name for name in missing if name in dict(model.named_parameters())]
    return task.write_samples(model)


@pytest.mark.parametrize("tokenizer", ["bytes", BPE], ids=["bytes", "bpe"])
def test_a_run_ends_with_what_its_last_weights_write(tmp_path, text, tokenizer):
    ours = job(tmp_path / "run", text, tokenizer, method="conditioned+balanced")
    found = run_job(ours)
    opened, free = found["samples"]
    assert found["samples"] == record(ours.folder)["samples"] == written_again(ours)
    task = prepare_task(ours.recipe, seed=0, base=None)
    first = task.tokenizer.decode(task.evaluation.fetch([(0, -1)])["input_ids"][0, :10].tolist())
    assert opened["prompt"] == first != "" and opened["text"].startswith(first) and len(opened["text"]) > len(first)
    assert free["prompt"] == "" and len(free["text"]) > 20
    model = prepare_model(ours.recipe, ours.method, task, seed=1, base=None)
    assert task.write_samples(model) != found["samples"], "untrained weights write something else"


def test_the_average_writes_where_it_is_what_is_evaluated(tmp_path, text):
    training = fields(text)["training"] | {"averaging": {"decay": 0.5}}
    ours = job(tmp_path / "run", text, training=training)
    found = run_job(ours)
    assert found["samples"] == written_again(ours, "average") != written_again(ours)


def test_the_last_weights_write_even_if_the_best_are_tested(tmp_path, text, monkeypatch):
    lines = text.read_text().split("\n")
    for split, rows in (("train", lines[:40]), ("validation", lines[40:50]), ("test", lines[50:])):
        write_parquet(tmp_path / f"mirror/some/text/data/{split}-00000-of-00001.parquet", {"text": rows})
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    ours = job(
        tmp_path / "run",
        text,
        data={"source": "hub", "id": "some/text", "label": None},
        evaluation={"every": {"steps": 4}, "batch_size": 64, "test": "best"},
        optimizer={"name": "adamw", "lr": 3.0},
        training=fields(text)["training"] | {"diverged_above": None},
    )
    found = run_job(ours)
    assert found["best"]["step"] < 12 and found["test"]["step"] == found["best"]["step"]
    assert found["samples"] == written_again(ours) != written_again(ours, "best")


def test_a_run_killed_while_it_writes_writes_again(tmp_path, text, monkeypatch):
    def die(self, model):
        raise Killed

    whole = run_job(job(tmp_path / "whole", text))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LanguageModelling, "write_samples", die)
        run_job(job(tmp_path / "run", text))
    assert "samples" not in record(tmp_path / "run")
    assert run_job(job(tmp_path / "run", text))["samples"] == whole["samples"]


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block",
}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_two_processes_write_what_their_weights_write_on_one(tmp_path, text, environment):
    changes = fields(text, BPE, training={"length": {"steps": 12}, "batch_size": 8, "threads": 1,
                                          "averaging": {"decay": 0.5}})  # fmt: skip
    overrides = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    folder = tmp_path / "run"
    run(train_command(folder, "conditioned", *overrides, processes=2), **environment)
    found = record(folder)
    assert found["status"] == "finished" and found["sessions"][0]["processes"] == 2
    alone = job(folder, text, BPE, method="conditioned", training=changes["training"])
    assert found["samples"] == written_again(alone, "average")


# A task without a run


class OnlyWholeBlocks(nn.Module):
    """As models whose attention needs a certain number of tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(257))

    def forward(self, input_ids, use_cache=False):
        if input_ids.shape[1] != 8:
            raise ValueError(f"expected 8 tokens, found {input_ids.shape[1]}")
        return self.weight.expand(*input_ids.shape, 257)


def test_a_model_that_cannot_write_says_why():
    task = make_task("language_modelling", bundle("text", texts("abcdefghijklmnop"), classes=None), context=8)
    assert task.write_samples(OnlyWholeBlocks())[1] == {
        "prompt": "",
        "problem": "ValueError: expected 8 tokens, found 1",
    }


@pytest.mark.parametrize(
    ("document", "prompt"),
    [("abc", "abc"), ("abcdefghijklmnop", "abcdefghij"), ("abcdefghié and on", "abcdefghi"), (" \n ", "the second")],
    ids=["short", "long", "half a character", "blank"],
)
def test_the_prompt_is_the_beginning_of_the_first_document(document, prompt):
    task = make_task(
        "language_modelling", bundle("text", texts(document, "the second document of some length"), classes=None),
        context=16,
    )  # fmt: skip
    opened, free = task.write_samples(tiny_gpt2(context=16))
    assert opened["prompt"] == prompt and opened["text"].startswith(prompt) and free["prompt"] == ""


# The tokeniser in the record


def test_the_record_names_the_tokeniser(tmp_path, text):
    ours = job(tmp_path / "bpe", text, BPE)
    tokenizer = prepare_task(ours.recipe, seed=0, base=None).tokenizer
    found = run_job(ours)["tokenizer"]
    assert found == {"fingerprint": tokenizer.fingerprint, "vocabulary_size": 280}
    plain = run_job(job(tmp_path / "bytes", text))["tokenizer"]
    assert plain == {"fingerprint": ByteTokenizer.fingerprint, "vocabulary_size": 257}


def interrupted(folder, text, tokenizer):
    def stop(event):
        if event["event"] == "evaluation" and event["row"]["step"] == 4:
            signal.raise_signal(signal.SIGINT)

    assert run_job(job(folder, text, tokenizer), stop)["status"] == "interrupted"


def save_tokenizer(path, text, vocabulary):
    recipe = make_recipe(**fields(text, BPE | {"vocabulary": vocabulary}))
    path.write_text(prepare_task(recipe, seed=0, base=None).tokenizer.inner.to_str())


def test_a_run_does_not_resume_with_another_tokeniser(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path, text, 280)
    folder, choice = tmp_path / "run", {"name": str(path)}
    interrupted(folder, text, choice)
    kept = path.read_text()
    save_tokenizer(path, text, 275)
    before = record(folder)
    with pytest.raises(RunError, match="fingerprint"):
        run_job(job(folder, text, choice))
    assert record(folder)["status"] == "failed" and record(folder)["tokenizer"] == before["tokenizer"]
    path.write_text(kept)
    prepare_task(make_recipe(**fields(text)), seed=0, base=None)  # forgets the task with the other one
    assert run_job(job(folder, text, choice))["status"] == "finished"

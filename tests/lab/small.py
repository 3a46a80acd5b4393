"""A recipe that trains in a second, and ways to run it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.train.run import Job, run_job
from wellcond.lab.train.run_folder import read_tensors

SETTINGS = (
    "tuned=null",
    "proxy=null",
    "model.arguments={img_size: 8, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, mlp_ratio: 1.0}",
    "training={length: {steps: 24}, batch_size: 32, threads: 1, log_every: 5}",
    "evaluation={every: {steps: 8}, batch_size: 250}",
    "checkpoint={every: {steps: 7}}",
    "tracking={weights_every: {steps: 10}, jacobian_points: 3, heads: all, budget: null}",
    "seeds=[0, 1]",
    "methods=[default, conditioned]",
)
CHANGES_IN_WORDS = [part for override in SETTINGS for part in ("--set", override)]
TESTED = (
    "task={name: sequence_classification}",
    "data={source: generated, generator: listops, options: {min_length: 3, max_length: 12, max_depth: 2, max_args: 5}, "
    "num_train: 200, num_evaluation: 60, num_test: 50}",
    "model={name: 'hf:bert', arguments: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    "intermediate_size: 16, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}}",
    "optimizer.lr=0.05",
    "schedule={name: constant}",
    "evaluation={every: {steps: 3}, batch_size: 25, test: best}",
)
"""Changes that give it a test split, and a best evaluation before the last."""


def small_recipe(*overrides):
    return load_recipe("digits", overrides=[*SETTINGS, *overrides])[0]


def small_job(folder, method="conditioned+balanced", *overrides, seed=0, local_code=False):
    recipe, chosen = small_recipe(*overrides), MethodSettings.model_validate(method)
    return Job(recipe, chosen, seed, Path(folder), cpu=True, local_code=local_code)


def command(*arguments, processes=1):
    if processes == 1:
        return [sys.executable, "-m", "wellcond.cli.main", *map(str, arguments)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launch, "-m", "wellcond.cli.main", *map(str, arguments)]


def train_command(folder, method="conditioned+balanced", *overrides, processes=1):
    changes = [part for override in (*SETTINGS, *overrides) for part in ("--set", override)]
    chosen = ["--method", method, "-o", folder, "--cpu", "-q"]
    return command("train", "digits", *chosen, *changes, processes=processes)


def run(arguments, **environment):
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ | environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def record(folder):
    return json.loads((Path(folder) / "run.json").read_text())


def logs(folder):
    """Every row of a run, without wall times."""
    rows = {}
    for name in ("steps", "evaluations", "conditioning"):
        lines = (Path(folder) / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    return rows


def last_weights(folder):
    """Bytes of the tensors in the last checkpoint."""
    [place] = (Path(folder) / "checkpoints").glob("step-*")
    return {path.name: path.read_bytes() for path in place.glob("*.safetensors")}


def last_tensors(folder):
    """Whole tensors of the last checkpoint by kind, whether it is sharded or not."""
    [place] = (Path(folder) / "checkpoints").glob("step-*")
    kinds = {path.name.partition(".")[0] for path in place.iterdir()} - {"state"}
    return {kind: read_tensors(place, kind) for kind in kinds}


def stop_after(job, step):
    """Send this process the signal of Ctrl-C once the run has reached a step."""

    def observe(event):
        if event["event"] == "evaluation" and event["row"]["step"] >= step:
            signal.raise_signal(signal.SIGINT)

    return run_job(job, observe)


def assert_same_run(a, b):
    """Same records and weights, bit for bit, but for wall times."""
    assert logs(a) == logs(b)
    assert last_weights(a) == last_weights(b)
    for name in ("final", "best"):
        ours, theirs = (dict(record(folder)[name]) for folder in (a, b))
        assert ours.pop("seconds") >= 0 and theirs.pop("seconds") >= 0  # the best may be the start
        assert ours == theirs
    assert record(a).get("test") == record(b).get("test")


class Killed(BaseException):
    """As sudden as a signal: nothing in the engine catches it."""


def kill_at_write(monkeypatch, moment, job):
    """Run a job until a file is about to be flushed or put in place for the time after `moment`."""
    count = 0
    real = {name: getattr(os, name) for name in ("replace", "fsync")}

    def dying(name):
        def call(*arguments):
            nonlocal count
            count += 1
            if count > moment:
                raise Killed
            return real[name](*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, dying(name))
        with pytest.raises(Killed):
            run_job(job)

"""A recipe that trains in a second, and ways to run it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from wellcond.experiments.load_recipe import load_recipe
from wellcond.experiments.methods import MethodSettings
from wellcond.experiments.run import Job, run_job

SETTINGS = (
    "model.arguments={img_size: 8, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, mlp_ratio: 1.0}",
    "training={length: {steps: 24}, batch_size: 32, threads: 1, log_every: 5}",
    "evaluation={every: {steps: 8}, batch_size: 250}",
    "checkpoint={every: {steps: 7}}",
    "tracking={weights_every: {steps: 10}, jacobian_points: 3}",
    "seeds=[0, 1]",
    "methods=[default, conditioned]",
)


def small_recipe(*overrides):
    return load_recipe("digits", overrides=[*SETTINGS, *overrides])[0]


def small_job(folder, method="conditioned+balanced", *overrides, seed=0):
    return Job(small_recipe(*overrides), MethodSettings.model_validate(method), seed, Path(folder), cpu=True)


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
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ | environment, timeout=300)
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


def stop_after(job, step):
    """Send this process the signal of Ctrl-C once the run has reached a step."""

    def observe(event):
        if event["event"] == "evaluation" and event["row"]["step"] >= step:
            os.kill(os.getpid(), signal.SIGINT)

    return run_job(job, observe)

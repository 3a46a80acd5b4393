"""The commands that the documents list are executed too, cut short: scale tiny, two steps, one seed, two methods."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import save_model

import wellcond as wc
from lab.tasks.detection.coco_sets import ROOT as DATA
from repository.test_documents import ROOT, blocks_of, commands_in, with_blocks
from wellcond.cli.main import load_app
from wellcond.lab.methods import split_methods
from wellcond.lab.models.build import build_model
from wellcond.lab.recipe import load_recipe

SHORT = ("training.length={steps: 2}", "evaluation.every={steps: 2}", "tracking={jacobian_points: 0}",
         "schedule={name: constant}")  # fmt: skip
SMALL_FORM = {"coco-xcit-s12": "coco"}


def option(arguments, name, value=None):
    """Arguments with an option set to a value, or without it."""
    at = [number for number, word in enumerate(arguments) if word == name]
    kept = [word for number, word in enumerate(arguments) if not any(number in (a, a + 1) for a in at)]
    return kept if value is None else [*kept, name, value]


def cut_short(arguments):
    """The same command, small."""
    verb = arguments[0]
    arguments = [word.replace("-small/", "-tiny/").replace("/imagenet", "imagenet") for word in arguments]
    if verb in ("train", "compare"):
        recipe = arguments[arguments.index("--recipe") + 1] if verb == "compare" else arguments[1]
        arguments = [SMALL_FORM.get(word, word) for word in arguments]
        recipe = SMALL_FORM.get(recipe, recipe)
        for setting in (
            "model.encoder=",
            "proxy=null",
        ):  # the two models have other sizes than each other at scale tiny
            for word in [word for word in arguments if word.startswith(setting)]:
                at = arguments.index(word)
                del arguments[at - 1 : at + 1]
        if "--data" in arguments and "--folder" not in arguments:  # one scale here, several there
            arguments += ["--folder", f"runs/{recipe}-own"]
        if verb == "compare":
            methods = "default,conditioned"
            if "--methods" in arguments:
                methods = ",".join(split_methods(arguments[arguments.index("--methods") + 1])[:2])
            arguments = option(option(arguments, "--methods", methods), "--seeds", "1") + ["--jobs", "1"]
        for name in ("--engine", "--ray-address"):  # tests of their own start clusters
            arguments = option(arguments, name)
        scale = [] if recipe.endswith(".yaml") else ["--scale", "tiny"]
        if "--data" not in arguments and not recipe.endswith(".yaml"):
            load_recipe(recipe, scale="tiny")
        short = [part for setting in SHORT for part in ("--set", setting)]
        return [*option(arguments, "--scale"), *scale, "--cpu", *short]
    if verb == "demo":
        return [*arguments, "--seeds", "1"]
    if verb == "glue":
        return [*arguments, "--limit", "40", "--cpu", "--jobs", "1"]
    if verb == "reproduce" and not {"--list", "--dry-run", "--records"} & set(arguments):
        if "paper" in arguments:
            return [*arguments, "--dry-run"]
        short = [part for setting in SHORT[:3] for part in ("--set", setting)]
        return [*arguments, "--seeds", "1", "--methods", "conditioned", "--jobs", "1", "--cpu", *short]
    return arguments


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the files that the documents speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WELLCOND_DATA", str(DATA.resolve()))
    shutil.copytree(ROOT / "results", "results")
    shipped = (ROOT / "src/wellcond/lab/recipes/tiny/digits.yaml").read_text("utf-8")
    (tmp_path / "recipe.yaml").write_text(shipped.replace("name: digits", "name: own", 1), "utf-8")
    rows = {"review": [f"a {word} film" for word in ("fine", "dull") * 60], "positive": [1, 0] * 60}
    Dataset.from_dict(rows).to_parquet("reviews.parquet")
    for number in range(24):
        place = tmp_path / "pets" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(place / f"{number}.png")
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "imagenet" / place).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "imagenet" / place / "1.png")
    return tmp_path


def make_weights(arguments):
    """The file that a command reads, of the model that it names."""
    if arguments[0] not in ("init", "fold"):
        return
    model = build_model(arguments[1])
    if arguments[0] == "fold":
        wc.condition_(model, "balanced")
    file = arguments[arguments.index("--weights") + 1]
    if file.endswith(".safetensors"):
        save_model(model, file)
    else:
        averaged = {"state_dict_ema": model.state_dict()} if "--ema" in arguments else {}
        torch.save({"state_dict": model.state_dict()} | averaged, file)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the mirror of the data sets is neither in WELLCOND_DATA nor beside us")
@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")
@pytest.mark.parametrize("path", with_blocks(""))
def test_listed_commands_run(path, desk):
    commands = [arguments for block in blocks_of(path, "") for arguments in commands_in(block)]
    for arguments in map(cut_short, commands):
        make_weights(arguments)
        with pytest.raises(SystemExit) as end:
            load_app()(arguments)
        assert not end.value.code, arguments


# Slurm's two commands, as far as the documents use them.
SRUN = """#!/bin/bash
exec "$@"
"""
WELLCOND = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from repository.test_listed_commands import cut_short
from wellcond.cli.main import main
sys.argv[1:] = cut_short(sys.argv[1:])
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the mirror of the data sets is neither in WELLCOND_DATA nor beside us")
def test_the_scripts_for_slurm_run(desk):
    job, lines = blocks_of(ROOT / "docs" / "cluster.md", "sh")
    (desk / "bin").mkdir()
    for name, content in {"srun": SRUN, "wellcond": WELLCOND}.items():
        (desk / "bin" / name).write_text(content)
        (desk / "bin" / name).chmod(0o755)
    paths = {"PATH": f"{desk / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    array = [(job, {"SLURM_ARRAY_TASK_ID": str(task)}) for task in range(2)]
    for script, task in [*array, (lines.replace("vit-small", "vit-tiny"), {})]:
        before = {path: path.stat().st_mtime_ns for path in desk.rglob("run.json")}
        done = subprocess.run(
            ["bash", "-e", "-c", script], env=os.environ | paths | task, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert len(before) == 2 and {path: path.stat().st_mtime_ns for path in desk.rglob("run.json")} == before
    assert (desk / "runs/vit-tiny/report/report.html").is_file()

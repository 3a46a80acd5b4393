"""Every option of every command and every field of a recipe is given wrong kinds, extremes and NaN.

Options come from the command line itself and fields from the recipe's classes, so that new ones are covered.
"""

import copy
import functools
import sys

import numpy as np
import pytest
import typer.main
from pydantic import ValidationError
from safetensors.torch import save_file

import wellcond as wc
from lab.report.fake_runs import usual_methods, write_comparison
from lab.small import SETTINGS
from wellcond.cli.main import load_app, main
from wellcond.lab import comparison, pool
from wellcond.lab.models.build import build_model
from wellcond.lab.pool import Outcome
from wellcond.lab.recipe import Recipe, load_recipe
from wellcond.lab.report.pack import pack
from wellcond.lab.settings import Settings, list_problems, shipped_recipes
from wellcond.training.series import Series

MODEL = "timm:test_vit"
SMALL = [part for change in (*SETTINGS, "training.length={steps: 1}") for part in ("--set", change)]
# What a valid call looks like: its arguments by name, then its options.
CALLS = {
    "inspect": ({"model": MODEL}, []),
    "doctor": (
        {"model": MODEL},
        ["-o", "d.json", "--html", "d.html", "--force", "--model-arg", "img_size=32", "--samples", "2"],
    ),
    "init": ({"model": MODEL}, ["-o", "init.safetensors", "--force"]),
    "fold": ({"model": MODEL}, ["--weights", "conditioned.safetensors", "-o", "fold.safetensors", "--force"]),
    "measure": (
        {"model": MODEL},
        ["--layers", "0", "--heads", "0", "-o", "m.json", "--html", "m.html", "--force", "--model-arg", "img_size=32"],
    ),
    "watch": ({"run": "watched.jsonl"}, ["--html", "w.html", "--force"]),
    "selftest": ({}, ["--device", "cpu", "--only", "bfloat16", "-o", "selftest.json", "--force"]),
    "train": ({"recipe": "digits"}, [*SMALL, "-o", "run", "--cpu", "-q"]),
    "compare": ({}, ["--recipe", "digits", *SMALL, "--no-report", "-o", "compared", "--cpu"]),
    "try": ({"model": "timm:vit_tiny_patch16_224"}, ["--data", "nowhere"]),  # refused, as one message
    "demo": ({}, []),
    "report": ({"folder": "runs"}, ["--no-pictures"]),
    "recipes": ({}, []),
    "glue": ({"run": "runs"}, ["--cpu"]),
    "reproduce": ({"id": "C-T1"}, ["--dry-run", "--cpu"]),
    "claims": ({"results": "runs"}, []),
    "pack": ({"folder": "whole"}, ["-o", "packed"]),
    "unpack": ({"file": "whole.jsonl"}, ["-o", "unpacked"]),
}
FEW = ("nan", "-1", "1" + "0" * 30)


COMMANDS = typer.main.get_command(load_app()).commands
PARAMETERS = [
    (name, parameter.name)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if not getattr(parameter, "is_flag", False) and parameter.name != "help"
]


def arguments_with(name, parameter, value):
    """A valid call of a command in which one value is replaced."""
    given, options = CALLS[name]
    option = next(p for p in COMMANDS[name].params if p.name == parameter)
    if option.param_type_name == "argument":
        return [name, *options, "--", *(given | {parameter: value}).values()]
    return [name, *given.values(), *options, f"{max(option.opts, key=len)}={value}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "file").write_text("a file")
    save_file(wc.condition_(build_model(MODEL), "balanced").state_dict(), folder / "conditioned.safetensors")
    series = Series([("attn", 2)], ["max_logit"])
    series.write_to(folder / "watched.jsonl")
    series.add(1, np.array([[3.0], [4.0]]))
    write_comparison(folder / "runs", usual_methods())
    pack(write_comparison(folder / "whole", usual_methods()[:2]), folder / "whole-packed")
    (folder / "whole-packed.jsonl").rename(folder / "whole.jsonl")
    return folder


@pytest.fixture
def check(place, monkeypatch, capsys):
    """Call a command, which must end well or with one message and exit code 2."""
    monkeypatch.chdir(place)
    # The demo has no option that makes it short; all else runs.
    trains = pool.run_jobs
    for module in (pool, comparison):
        monkeypatch.setattr(module, "run_jobs", lambda jobs, **o: Outcome() if len(jobs) > 2 else trains(jobs, **o))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["wellcond", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr().err
        shown = f"{arguments}: exit {end.value.code}\n{said[-2000:]}"
        assert end.value.code in (0, 2), shown
        assert "Traceback" not in said, shown
        if end.value.code == 2:
            assert said.count("error: ") + said.count("Usage: ") == 1, shown

    return call


def test_every_command_is_called():
    assert set(CALLS) == set(COMMANDS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_valid_and_a_wrong_option_of_it_a_message(check, name):
    """Each option of a command has one of the wrong values, and the next option another."""
    given, options = CALLS[name]
    check(name, *given.values(), *options)
    for at, (command, parameter) in enumerate(PARAMETERS):
        if command == name:
            check(*arguments_with(command, parameter, FEW[at % len(FEW)]))


WRONG = ["abc", -1, float("nan"), 10**400, None, [[]]]


def fields_of(settings, path=()):
    """Class, path and name of every field, those of the parts included."""
    for name in type(settings).model_fields:
        yield type(settings), (*path, name)
        if isinstance(value := getattr(settings, name), Settings):
            yield from fields_of(value, (*path, name))


@functools.cache
def recipe_fields():
    """For every field of every class that a shipped recipe uses: a recipe that has it, and the field's path."""
    found = {}
    for scale, name in (shipped.split("/") for shipped in shipped_recipes()):
        recipe, _ = load_recipe(name, scale=scale)
        fields = recipe.model_dump(mode="json")
        for cls, path in fields_of(recipe):
            found.setdefault((cls.__name__, path[-1]), (fields, path))
    return found


def with_value(fields, path, value):
    changed = copy.deepcopy(fields)
    place = changed
    for key in path[:-1]:
        place[key] = place.get(key) if isinstance(place.get(key), dict) else {}
        place = place[key]
    place[path[-1]] = value
    return changed


def test_a_wrong_value_in_a_recipe_is_a_recipe_error():
    assert {("TrainingSettings", "batch_size"), ("AdamW", "lr"), ("Interval", "steps")} <= set(recipe_fields())
    for fields, path in recipe_fields().values():
        for value in WRONG:
            changed = with_value(fields, path, value)
            try:
                Recipe.model_validate(changed)
            except ValidationError as error:
                problems = list_problems(error)
                assert problems and all(problems)

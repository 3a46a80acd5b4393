"""Where the runs of a comparison happen: here, on a Ray cluster, or by commands that somebody else runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from wellcond.cli.experiment_commands import ENGINES
from wellcond.errors import check_choice
from wellcond.lab.cluster import RaySettings
from wellcond.lab.methods import MethodSettings
from wellcond.lab.settings import RecipeError, read_yaml
from wellcond.lab.train.run import Job


def choose_engine(
    engine: str,
    *,
    address: str | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    print_only: bool = False,
) -> RaySettings | None:
    """Settings of Ray, if that is the engine.

    Raises: UnknownChoiceError, RecipeError.
    """
    check_choice("engine", engine, ENGINES)
    if engine == "local":
        given = {"--ray-address": address, "--cpus-per-run": cpus, "--gpus-per-run": gpus}
        for name, value in given.items():
            if value is not None:
                raise RecipeError(f"{name} belongs to --engine ray; give both or neither")
        return None
    if print_only:
        raise RecipeError("--print-jobs runs nothing, so it goes with no engine; leave out --engine ray")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("--engine ray starts its own processes; run the command once, without torchrun or accelerate")
    # Read when ray is imported: its reports of dead processes would go to standard output, between our lines.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return RaySettings(address, cpus, gpus)


def job_command(job: Job, recipe_name: str, *, scale: str | None, overrides: Sequence[str]) -> str:
    """One line for a shell that does exactly this job, in its folder, wherever the shell is.

    Args:
        job: what to run.
        recipe_name: as `load_recipe` takes it.
        scale: as `load_recipe` takes it.
        overrides: as `load_recipe` takes them.

    Raises: RecipeError if a path cannot stand on one line.
    """
    words = [*_program(), "train", recipe_name]
    words += [] if scale is None else ["--scale", scale]
    for override in overrides:
        words += ["--set", _on_one_line(override)]
    words += [*_method_words(job.method), "--seed", str(job.seed), "--folder", str(job.folder.absolute())]
    words += ["--cpu"] * job.cpu + ["--trust-local-code"] * job.local_code
    line = f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"
    if len(line.splitlines()) > 1:
        raise RecipeError(f"--print-jobs prints one line per run, but a path has several: {line!r}")
    return line


def _program() -> list[str]:
    """The command `wellcond` if that is this installation, its Python otherwise."""
    found = shutil.which("wellcond")
    ours = found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    return ["wellcond"] if ours else [sys.executable, "-m", "wellcond.cli.main"]


def _method_words(method: MethodSettings) -> list[str]:
    """Text where that gives the same method under the same label; all its fields otherwise."""
    try:
        is_text = len(method.label.splitlines()) == 1 and MethodSettings.model_validate(method.label) == method
    except ValidationError:
        is_text = False
    fields = method.model_dump(mode="json")
    return ["--method", method.label] if is_text else ["--set", f"method={json.dumps(fields)}"]


def _on_one_line(override: str) -> str:
    if len(override.splitlines()) <= 1:
        return override
    path, _, text = override.partition("=")
    return f"{path}={json.dumps(read_yaml(text))}"

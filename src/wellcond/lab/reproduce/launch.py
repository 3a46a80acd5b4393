"""What a plan takes on a user's machine: GPUs, memory, data, hours, and where it is not what the paper did."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wellcond.errors import DataError, OptionError, WellcondError
from wellcond.files import to_json, write_atomically
from wellcond.lab.data.base import load_data
from wellcond.lab.data.disk import SHORT_NAMES, find_in_mirror, name_place, short_name
from wellcond.lab.pool import run_jobs
from wellcond.lab.recipe import Recipe
from wellcond.lab.records import leaves_of
from wellcond.lab.report.table import MISSING, Cell, Table, plain_setting
from wellcond.lab.reproduce.memory import Needs, choose_gpus, count_memory, gpu_bytes
from wellcond.lab.reproduce.plan import Plan, PlannedStudy, count_missing
from wellcond.lab.settings import Interval, read_yaml, shipped_recipes
from wellcond.lab.tasks.glue import HUB_ID

SOURCES = {
    "imagenet-1k": "155 GB as archives; ask for access on its page at huggingface.co, then `hf auth login`",
    "coco2017": "20 GB; cocodataset.org has train2017, val2017 and annotations, to be unpacked into one folder",
    "tsv_data": "8 GB; lra_release.gz of the Long Range Arena's release, unpacked",
    "food101": "5 GB",
    "oxford-iiit-pet": "0.8 GB",
    "oxford_flowers102": "0.35 GB",
    "cifar10": "0.17 GB",
    "cifar100": "0.17 GB",
    "TinyStories": "2 GB",
    "wikitext": "0.5 GB",
    "imdb": "0.1 GB",
    "pile-uncopyrighted": "40 GB of it are read",
    "glue": "0.2 GB",
    "gpt2": "a tokeniser, 2 MB",
}
"""About what has to be read, and how it is had, by the last part of an id or a path."""


# Data by name


def data_ids(study: PlannedStudy) -> list[str]:
    """What a study reads, by the id on the hub or the path in its recipe; nothing is generated or embedded data."""
    settings = study.recipe.data.model_dump()
    found = [settings.get("id") or (settings.get("path") if settings["source"] in ("coco", "aan_pairs") else None)]
    return [*filter(None, found), *([HUB_ID] if study.glue_folders else [])]


def data_names(plan: Plan) -> dict[str, str]:
    """What a plan reads: the id or path by the short name that ``--data`` takes."""
    return {short_name(id): id for study in plan.studies for id in data_ids(study)}


def place_data(given: Sequence[str], plan: Plan) -> None:
    """Let runs find data sets where the user has them: NAME=FOLDER, or FOLDER alone if the id needs only one."""
    names = list(data_names(plan))
    for text in given:
        name, equals, path = text.partition("=")
        if not equals and len(names) == 1:
            name, path = names[0], text
        if name.lower() not in names:
            listed = ", ".join(f"{known}=FOLDER" for known in names) or "none, since nothing is read"
            raise OptionError(f"--data: expected {listed}; found {text!r}", field="--data", expected=names, found=name)
        place = Path(path).expanduser()
        if not place.exists():
            raise OptionError(f"--data {name}: there is no {place}", field="--data", expected="a folder", found=path)
        name_place(name, place)


def check_data(plan: Plan) -> None:
    """Raise DataError if a later stage of several has no data: the first may take days."""
    stages = [study for study in plan.studies if study.missing]
    if len(stages) < 2 or not any(study.settings.after for study in stages):
        return
    seen = set()
    for study in stages:
        settings = study.recipe.data
        if settings.model_dump_json() in seen:
            continue
        seen.add(settings.model_dump_json())
        try:
            load_data(settings, base=study.jobs[0].base)
        except DataError as error:
            [*ids] = data_ids(study)
            raise DataError(
                f"{study.name}, one of {len(stages)} stages, has no data; none was begun. {error}",
                expected=f"--data {short_name(ids[0])}=FOLDER" if ids else "the data of every stage",
                found="",
            ) from error


# Time


def count_updates(recipe: Recipe, samples: int | None) -> int | None:
    """Updates of a run; None if the size of the training set is not known before it is read."""
    length = recipe.training.length
    if length.steps is None and samples is None:
        return None
    return length.in_steps(max(1, (samples or 0) // recipe.training.batch_size))


def probe(study: PlannedStudy, seconds: float, ranks: int) -> dict[str, Any]:
    """Train a study's first run for some seconds as it is, data and all; returns the time of an update.

    The first quarter is not counted: workers start, kernels are chosen. Nothing is kept.
    """
    job = study.jobs[0]
    recipe = job.recipe
    training = recipe.training.model_copy(
        update={"length": Interval(steps=10**6), "hours": seconds / 3600, "log_every": 1, "batch_ramp": None}
    )
    changes = {
        "training": training,
        "evaluation": recipe.evaluation.model_copy(
            update={"every": Interval(steps=10**6), "samples": max(ranks, 1), "test": None}
        ),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": Interval(steps=10**6)}),
        "tracking": recipe.tracking.model_copy(update={"weights_every": None, "jacobian_points": 0}),
        "model": recipe.model.model_copy(update={"encoder": None}),
    }
    seen: list[tuple[float, int]] = []

    def observe(job: Any, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            seen.append((time.perf_counter(), event["step"]))

    with tempfile.TemporaryDirectory(prefix="wellcond-probe-") as scratch:
        tried = replace(job, recipe=recipe.model_copy(update=changes), folder=Path(scratch, "run"))
        outcome = run_jobs([tried], observer=observe, ranks=ranks)
        for _, problem in outcome.failures:
            raise WellcondError(f"{study.name} cannot be probed: {problem}")
        record = outcome.records[0]
    counted = seen[len(seen) // 4 :]
    if len(counted) < 2 or counted[-1][1] == counted[0][1]:
        each = float(record["seconds_per_step"])  # few and slow updates, the first among them
    else:
        each = (counted[-1][0] - counted[0][0]) / (counted[-1][1] - counted[0][1])
    session = record["sessions"][-1]
    return {
        "seconds_per_update": each,
        "updates": record["progress"]["step"],
        "peak_memory_bytes": record["peak_memory_bytes"],
        "processes": session["processes"],
        "device": session["device_name"],
    }


def probe_plan(plan: Plan, folder: Path, ranks: int, seconds: float, say: Callable[[str], None]) -> None:
    """Probe each recipe of a plan once, and keep what was found beside its runs."""
    found, file = read_probes(folder), folder / "probe.json"
    for study in plan.studies:
        say(f"{study.name}: about {seconds:g} s of training, on {ranks} {'process' if ranks == 1 else 'processes'}")
        found[study.name] = probe(study, seconds, ranks)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, to_json(found, indent=1) + "\n")


def read_probes(folder: Path) -> dict[str, dict[str, Any]]:
    """What was probed, by study."""
    file = folder / "probe.json"
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


# What is shown


OWN = re.compile(r"our choice|not verified|unverified|give no|is published|Every value|All values", re.IGNORECASE)
UNKNOWN = "unknown"
OF_ALL = "Every value"
"""How a remark on a whole recipe begins."""


def own_choices(name: str, scale: str) -> dict[str, str]:
    """What a shipped recipe says of values that are not a release's, its own remarks and those of what it extends.

    Remarks by the setting with its value, such as ``precision.mixed=bf16``; remarks on a whole recipe by themselves.
    """
    text = shipped_recipes().get(f"{scale}/{name}", "")
    found = {setting: remark for setting, remark in _remarks(text) if OWN.search(remark)}
    if base := re.search(r"^extends: (\S+)/(\S+)$", text, re.MULTILINE):
        own = {".".join(path) for path, _ in leaves_of(read_yaml(text))}
        of_all = any(remark.startswith(OF_ALL) for remark in found.values())
        for key, remark in own_choices(base[2], base[1]).items():
            if key.partition("=")[0] not in own and not (of_all and remark.startswith(OF_ALL)):
                found[key] = remark
    return found


def _remarks(text: str) -> Iterator[tuple[str, str]]:
    """Every comment of a recipe with the settings of its line; one on lines of its own is its own key."""
    above: list[tuple[int, str]] = []
    alone: list[str] = []
    for line in text.splitlines():
        setting, mark, remark = line.partition("#")
        if mark and not setting.strip():
            alone.append(remark.strip())
            continue
        if alone:
            yield " ".join(alone), " ".join(alone)
            alone = []
        indent = len(setting) - len(setting.lstrip())
        while above and above[-1][0] >= indent:
            above.pop()
        key, _, value = setting.strip().partition(":")
        path = ".".join([*(known for _, known in above), key])
        if not value.strip():
            above.append((indent, key))
        elif mark and key != "methods":
            for leaf, one in leaves_of(read_yaml(value)):
                yield f"{'.'.join((path, *leaf))}={plain_setting(one)}", remark.strip()


def launch_tables(plan: Plan, id: str, scale: str, folder: Path, ranks: int, data: Sequence[str]) -> list[Table]:
    """What each study of a plan takes, what it reads, and what of it is neither the paper's nor a release's."""
    counted = {study.name: count_memory(study.recipe, study.settings.parameters) for study in plan.studies}
    fewest = {study.name: choose_gpus(counted[study.name], study.recipe) for study in plan.studies}
    gpus = ranks if ranks > 1 else max((count or 1 for count in fewest.values()), default=1)
    probes, hours = read_probes(folder), 0.0
    rows: list[dict[str, Cell]] = []
    for study in plan.studies:
        recipe, needs = study.recipe, counted[study.name]
        updates, probed = count_updates(recipe, study.settings.samples), probes.get(study.name)
        per_run = _hours(recipe, updates, probed)
        hours += (per_run or 0.0) * count_missing(job.folder for job in study.jobs)
        rows.append(
            {
                "study": study.name,
                "parameters": f"{needs.parameters / 1e6:,.1f} M",
                "updates x batch": f"{'?' if updates is None else f'{updates:,}'} x {recipe.training.batch_size:,}",
                "GPUs, at least": str(fewest[study.name] or "more than 64"),
                f"GB on each of {gpus}": _show_memory(needs, gpus, recipe),
                "hours a run": UNKNOWN if per_run is None else f"{per_run:,.1f}",
            }
        )
    words = ["wellcond", "reproduce", id, "--scale", scale]
    words += ["--gpus-per-run", str(gpus)] if gpus > 1 else []
    unplaced = [name for name, wanted in data_names(plan).items() if find_in_mirror(wanted) is None]
    words += [word for text in data or [f"{name}=FOLDER" for name in unplaced] for word in ("--data", text)]
    command = shlex.join(words)
    where = f"{gpu_bytes() / 1e9:.0f} GB" + ("" if torch.cuda.is_available() else " (assumed: there is none here)")
    many = f" The command gives every run {gpus}; with 8 GPUs {8 // gpus} run at once." if 1 < gpus <= 8 else ""
    notes = [
        f"To run it: {command}",
        f"A GPU has {where}. Memory is counted for the default method, and is a lower bound.{many}",
    ]
    if all(row["hours a run"] != UNKNOWN for row in rows):
        notes.append(f"The training that is missing takes {hours:,.0f} hours, one run after the other.")
    else:
        notes.append(f"Hours are unknown until each study has trained for a minute here: {command} --dry-run --probe")
    if tuned := sum(len(study.glue_folders) for study in plan.studies):
        notes.append(f"{tuned} of the runs fine-tune a pre-trained model on a task of GLUE; their time is not counted.")
    tables = [Table.of("launch", "What it takes", rows, notes, (0,)), _data_table(plan), _choices_table(plan, scale)]
    return [table for table in tables if table.rows]


def _hours(recipe: Recipe, updates: int | None, probed: Mapping[str, Any] | None) -> float | None:
    if recipe.training.hours is not None:
        return recipe.training.hours
    if probed is None or updates is None:
        return None
    return updates * float(probed["seconds_per_update"]) / 3600


def _show_memory(needs: Needs, gpus: int, recipe: Recipe) -> str:
    shown = f"{needs.on_each(gpus, recipe) / 1e9:.1f}"
    return shown if needs.per_sample is not None else f"{shown} + activations"


def _data_table(plan: Plan) -> Table:
    """Everything that is read: data sets, tokenisers and weights by their ids, and what is made here."""
    studies: dict[str, list[str]] = {}
    for study in plan.studies:
        tokenizer = study.recipe.task.model_dump().get("tokenizer")
        named = [tokenizer["name"]] if isinstance(tokenizer, dict) and "name" in tokenizer else []
        teachers = [str(method.init_options.get("teacher", "")) for method in study.methods]
        named += [teacher for teacher in teachers if teacher.startswith("timm:")]
        for wanted in [*data_ids(study), *named] or [f"{study.recipe.data.source} data"]:
            studies.setdefault(wanted, []).append(study.name)
    names = {id: name for name, id in data_names(plan).items()}
    rows: list[dict[str, Cell]] = [
        {
            "what is read": wanted,
            "where it is": _where(wanted),
            "--data": f"{names[wanted]}=FOLDER" if wanted in names else MISSING,
            "for": ", ".join(of),
        }
        for wanted, of in studies.items()
    ]
    note = "--data names a folder for this command, the variable WELLCOND_DATA=NAME=FOLDER for all."
    return Table.of("data", "What is read", rows, (note,) if names else (), (0, 1, 2, 3))


def _where(wanted: str) -> str:
    size = SOURCES.get(wanted.rpartition("/")[2])
    if wanted.startswith("timm:"):
        return "the hub: published weights, 0.1 GB"
    if wanted.endswith(" data"):
        return "made here"
    if (place := find_in_mirror(wanted)) is not None:
        return f"found: {place}"
    source = "not found here, and not on the hub" if wanted.rpartition("/")[2] in SHORT_NAMES else "the hub"
    return f"{source}: {size}" if size else source


def _choices_table(plan: Plan, scale: str) -> Table:
    """Remarks of the recipes, each with the studies that share it."""
    found: dict[tuple[str, str], list[str]] = {}
    for study in plan.studies:
        remarks = own_choices(study.settings.recipe, scale)
        if study.settings.note:
            remarks[study.settings.note] = study.settings.note
        for setting, remark in remarks.items():
            found.setdefault((setting if setting != remark else "", remark), []).append(study.name)
    rows: list[dict[str, Cell]] = [
        {"study": ", ".join(names), "setting": setting or "all", "what the recipe says of it": remark}
        for (setting, remark), names in found.items()
    ]
    return Table.of("choices", "What is not the papers'", rows, (), (0, 1, 2))

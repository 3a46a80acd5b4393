"""What a plan takes on a user's machine: GPUs, memory, data, hours, and where it is not what the paper did."""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.errors import DataError, OptionError, WellcondError
from wellcond.files import to_json, write_atomically
from wellcond.lab.data.base import load_data
from wellcond.lab.data.disk import find_in_mirror, name_place, short_name
from wellcond.lab.models.build import build_model
from wellcond.lab.pool import run_jobs
from wellcond.lab.recipe import Recipe
from wellcond.lab.report.table import Cell, Table
from wellcond.lab.reproduce.plan import Plan, PlannedStudy
from wellcond.lab.settings import Interval, shipped_recipes
from wellcond.lab.train.prepare import blocks_of, recompute_

GPU_BYTES = 80e9
"""Memory of a GPU where this machine has none to ask."""
USABLE = 0.9
"""Share of it that a run may plan with; the rest is fragments, and buffers of the communication."""
MOST_GPUS = 64
SIZES = {
    "imagenet-1k": "155 GB in the archives ILSVRC2012_img_train and _val",
    "coco": "20 GB",
    "food101": "5 GB",
    "oxford-iiit-pet": "0.8 GB",
    "oxford_flowers102": "0.35 GB",
    "cifar10": "0.17 GB",
    "cifar100": "0.17 GB",
    "tinystories": "2 GB",
    "wikitext": "0.5 GB",
    "imdb": "0.1 GB",
    "aan": "8 GB",
    "pile-uncopyrighted": "40 GB of it are read",
}
"""About what has to be read, by the short name of a data set."""
GATED = {"imagenet-1k": "ask for access on its page at huggingface.co, then `hf auth login`, or have it in a folder"}


# Data by name


def data_name(recipe: Recipe) -> str:
    """The short name of a recipe's data; empty for what is generated or embedded."""
    settings = recipe.data.model_dump()
    where = settings.get("id") or (settings.get("path") if settings["source"] in ("coco", "aan_pairs") else "")
    return short_name(where) if where else ""


def place_data(given: Sequence[str], plan: Plan) -> None:
    """Let runs find data sets where the user has them: NAME=FOLDER, or FOLDER alone if the id needs only one."""
    names = list(dict.fromkeys(name for study in plan.studies if (name := data_name(study.recipe))))
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
            name = data_name(study.recipe)
            raise DataError(
                f"{study.name}, one of {len(stages)} stages, has no data; none was begun. {error}",
                expected=f"--data {name}=FOLDER" if name else "the data of every stage",
                found="",
            ) from error


# Memory


@dataclass(frozen=True)
class Needs:
    """Memory of one run of a recipe, in bytes; what a batch needs is None where it was not counted."""

    parameters: float
    fixed: float
    """Weights, gradients, both moments of Adam, and an average of the weights if there is one."""
    casts: float = 0.0
    """Copies of weights in half precision."""
    per_sample: float | None = None
    """Kept for the backward pass."""

    def on_each(self, gpus: int, recipe: Recipe) -> float:
        """Bytes that each of several GPUs needs."""
        samples = recipe.training.batch_size / gpus / recipe.training.accumulate
        shared = self.fixed / gpus if recipe.training.shard else self.fixed
        return shared + self.casts + samples * (self.per_sample or 0.0)


def count_memory(recipe: Recipe, parameters: float | None) -> Needs | None:
    """Count what a run holds on a GPU; activations on tensors without content, so that any size takes seconds."""
    counted = None
    if (made := _model_and_input(recipe)) is not None:
        counted = _count_activations(recipe, *made)
        parameters = counted[0]
    if parameters is None:
        return None
    averaging = 4 if recipe.training.averaging is not None else 0
    fixed = (16 + averaging) * parameters
    return Needs(parameters, fixed) if counted is None else Needs(parameters, fixed, *counted[1:])


def _model_and_input(recipe: Recipe) -> tuple[Callable[[], nn.Module], Callable[[int], Tensor]] | None:
    """Functions that make the model, and an input of some samples; None for kinds of models that are not counted."""
    name, arguments, task = recipe.model.name, dict(recipe.model.arguments), recipe.task.model_dump()
    size = task.get("image_size")
    if task["name"] == "image_classification" and name.startswith("timm:") and size:
        return lambda: build_model(name, arguments, on_meta=True), lambda count: torch.zeros(count, 3, size, size)
    if task["name"] == "language_modelling" and name == "hf:gpt2":
        known = {"vocab_size": 50257, "max_position_embeddings": task["context"]} | arguments

        def make() -> nn.Module:
            return build_model(name, known, auto_class="AutoModelForCausalLM", on_meta=True)

        return make, lambda count: torch.zeros(count, task["context"], dtype=torch.int64)
    return None


def _count_activations(
    recipe: Recipe, make: Callable[[], nn.Module], inputs: Callable[[int], Tensor]
) -> tuple[float, float, float]:
    """Parameters, and bytes that are kept for the backward pass: whatever the batch, and for each sample."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mixed = {"bf16": torch.bfloat16, "fp16": torch.bfloat16}.get(recipe.precision.mixed)
    model = make().train()
    blocks = blocks_of(model) if recipe.training.recompute else []
    if recipe.training.recompute:
        recompute_(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _move_to_cpu(model)
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def kept(count: int) -> float:
            held: dict[int, int] = {}
            recomputed = 0

            def note(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    held[storage._cdata] = storage.nbytes()
                return tensor

            def note_input(module: nn.Module, given: tuple[Any, ...]) -> None:
                nonlocal recomputed
                recomputed += given[0].numel() * given[0].element_size()

            hooks = [block.register_forward_pre_hook(note_input) for block in blocks]
            with (
                torch.autocast("cpu", dtype=mixed or torch.bfloat16, enabled=mixed is not None),
                torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            ):
                output = model(inputs(count))
                logits = getattr(output, "logits", output)
                alive = logits.float().log_softmax(-1)
            del alive
            for hook in hooks:
                hook.remove()
            return float(sum(held.values()) + recomputed)

        few, more = kept(2), kept(4)
        per_sample = (more - few) / 2
        parameters = float(sum(parameter.numel() for parameter in model.parameters()))
    return parameters, max(0.0, few - 2 * per_sample), per_sample


def _move_to_cpu(model: nn.Module) -> None:
    """Give a model on the meta device weights on the CPU, which in fake mode have no content either."""
    kept = list(model.parameters())  # alive, so that each has an id of its own
    made: dict[int, nn.Parameter] = {}  # weights may be tied
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype))
                module._parameters[name] = made[id(weight)]
        for name, values in module._buffers.items():
            if values is not None:
                module._buffers[name] = torch.empty(values.shape, dtype=values.dtype)
    del kept


def gpu_bytes() -> float:
    """Memory of a GPU of this machine, or of the usual one."""
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else GPU_BYTES


def choose_gpus(needs: Needs, recipe: Recipe) -> int | None:
    """The fewest GPUs, a power of two, on which a run fits and its batch can be divided; None if none do."""
    for power in range(int(math.log2(MOST_GPUS)) + 1):
        gpus, parts = 2**power, 2**power * recipe.training.accumulate
        if recipe.training.batch_size % parts == 0 and needs.on_each(gpus, recipe) <= USABLE * gpu_bytes():
            return gpus
    return None


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


def own_choices(name: str, scale: str) -> list[str]:
    """Fields of a shipped recipe, and of those that it extends, that its remarks call our choice or unverified."""
    shipped = shipped_recipes()
    text = shipped.get(f"{scale}/{name}", "")
    found = []
    for line in text.splitlines():
        setting, mark, remark = line.partition("#")
        if mark and re.search(r"our choice|unverified|not verified", remark):
            field = setting.strip().strip("{}").partition(":")[0].strip()
            found.append(field or remark.strip().rstrip("."))
    if base := re.search(r"^extends: (\S+)/(\S+)$", text, re.MULTILINE):
        found += own_choices(base[2], base[1])
    return list(dict.fromkeys(found))


def launch_table(plan: Plan, id: str, scale: str, folder: Path, ranks: int, data: Sequence[str]) -> Table:
    """What each study of a plan takes, how the command is typed, and what is not the paper's."""
    probes = read_probes(folder)
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    gpus_needed, hours = [1], 0.0
    for study in plan.studies:
        recipe, settings = study.recipe, study.settings
        parameters = None if settings.parameters is None else settings.parameters * 1e6
        needs = count_memory(recipe, parameters)
        gpus = None if needs is None else choose_gpus(needs, recipe)
        gpus_needed.append(gpus or 1)
        used = ranks if ranks > 1 else gpus or 1
        updates, probed = count_updates(recipe, settings.samples), probes.get(study.name)
        per_run = _hours(recipe, updates, probed)
        hours += (per_run or 0.0) * study.missing
        rows.append(
            {
                "study": study.name,
                "parameters": "" if needs is None else f"{needs.parameters / 1e6:,.1f} M",
                "updates": "not known yet" if updates is None else f"{updates:,} of {recipe.training.batch_size}",
                "GPUs a run": "more than 64" if needs is not None and gpus is None else str(gpus or "not counted"),
                "memory of each": _show_memory(needs, used, recipe),
                "hours a run": "--probe" if per_run is None else f"{per_run:,.1f}",
                "data": _show_data(recipe),
            }
        )
        differs = [settings.note] if settings.note else []
        if choices := own_choices(settings.recipe, scale):
            differs.append(f"our choice or unverified in the recipe: {', '.join(choices)}")
        notes += [f"{study.name}: {text}" for text in differs]
    most = max(gpus_needed)
    words = ["wellcond", "reproduce", id, "--scale", scale]
    words += ["--gpus-per-run", str(max(most, ranks))] if max(most, ranks) > 1 else []
    names = list(dict.fromkeys(data_name(study.recipe) for study in plan.studies if data_name(study.recipe)))
    words += [word for given in data or [f"{name}=FOLDER" for name in names] for word in ("--data", given)]
    where = f"{gpu_bytes() / 1e9:.0f} GB each" + ("" if torch.cuda.is_available() else ", assumed: there is none here")
    first = [f"To run it: {shlex.join(words)}", f"GPUs of {where}; memory is a lower bound, of the default method."]
    if any(probes.get(study.name) for study in plan.studies):
        first.append(f"By the probe, all that is missing takes {hours:,.0f} hours, one run after the other.")
    else:
        first.append("Hours: --probe trains each study for a minute here, with its data, and counts.")
    return Table.of("launch", "What it takes", rows, (*first, *notes), (0, 6))


def _hours(recipe: Recipe, updates: int | None, probed: Mapping[str, Any] | None) -> float | None:
    if recipe.training.hours is not None:
        return recipe.training.hours
    if probed is None or updates is None:
        return None
    return updates * float(probed["seconds_per_update"]) / 3600


def _show_memory(needs: Needs | None, gpus: int, recipe: Recipe) -> str:
    if needs is None:
        return "not counted"
    shown = f"{needs.on_each(gpus, recipe) / 1e9:.1f} GB on {gpus}"
    return shown if needs.per_sample is not None else f"{shown}, and activations"


def _show_data(recipe: Recipe) -> str:
    name = data_name(recipe)
    if not name:
        return f"{recipe.data.source}, made here"
    settings = recipe.data.model_dump()
    wanted = settings.get("id") or settings["path"]
    place = find_in_mirror(wanted)
    if place is not None:
        return f"{name}: in {place}"
    size = f", about {SIZES[name]}" if name in SIZES else ""
    source = f"from the hub ({wanted})" if settings.get("id") else f"a folder, named {wanted}"
    advice = f"; {GATED[name]}" if name in GATED else ""
    return f"{name}: {source}{size}{advice}"

"""From an id and a scale to comparisons: what would run, what it needs, what is there already; and running the rest."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellcond.lab.data.disk import find_in_mirror
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.report.table import MISSING, Cell, Table
from wellcond.lab.reproduce.catalogue import SCALES, AtScale, Entry, catalogue
from wellcond.lab.reproduce.stored import RUNS, study_name
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.glue import HUB_ID, NAMES
from wellcond.lab.train.compare import (
    JobObserver,
    Outcome,
    check_settings,
    plan_comparison,
    run_comparison,
    write_comparison,
)
from wellcond.lab.train.glue import plan_glue, run_glue
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunError, RunFolder
from wellcond.run_records import COMPLETE


@dataclass(frozen=True)
class PlanOptions:
    """What a user may change."""

    folder: Path
    seeds: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    """Only these; the baseline always runs."""
    overrides: tuple[str, ...] = ()
    images: Path | None = None
    """Folder with images in train/ and val/, for studies that classify images."""
    cpu: bool = False


@dataclass(frozen=True)
class PlannedStudy:
    """One comparison of a plan."""

    name: str
    settings: AtScale
    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    seeds: tuple[int, ...]
    folder: Path
    jobs: tuple[Job, ...]
    glue_folders: tuple[Path, ...]
    """Of every run of fine-tuning that follows."""

    @property
    def missing(self) -> int:
        """Number of runs that are not complete."""
        return sum(not is_complete(job.folder) for job in self.jobs)

    @property
    def glue_missing(self) -> int:
        """Number of runs of fine-tuning that are not complete."""
        return sum(not is_complete(folder) for folder in self.glue_folders)

    def run(self, num_workers: int, observer: JobObserver) -> Outcome:
        """Run what is missing; what is there is not touched."""
        return run_comparison(self.jobs, num_workers=num_workers, observer=observer)

    def describe(self) -> None:
        """Write what the study compares; methods and seeds of earlier calls stay listed.

        Raises: RunError if the folder holds runs under other settings.
        """
        write_comparison(self.folder, self.recipe, self.methods, self.seeds)

    def fine_tune(self, num_workers: int, observer: JobObserver) -> Outcome:
        """Fine-tune the finished runs on GLUE, as far as that is missing."""
        plan = plan_glue(self.folder, base=self.jobs[0].base, cpu=self.jobs[0].cpu)
        return run_glue(plan, num_workers=num_workers, observer=observer)

    @property
    def minutes_left(self) -> float:
        """Estimated time of what is missing, in one process on a machine like this; NaN where not known."""
        finished = [RunFolder(job.folder).read_record() or {} for job in self.jobs if is_complete(job.folder)]
        times = [math.fsum(value for value in (record.get("seconds") or {}).values() if value) for record in finished]
        seconds = math.fsum(times) / len(times) if times else self.settings.seconds or math.nan
        return (self.missing * seconds + self.glue_missing * self.settings.glue_seconds) / 60

    @property
    def updates_per_run(self) -> float:
        """NaN where the length is in epochs of a set whose size is not known."""
        training = self.recipe.training
        if training.length.steps is not None:
            return float(training.length.steps)
        assert training.length.epochs is not None
        samples = self.settings.samples or self.recipe.data.model_dump().get("limit_train")
        if samples is None and self.recipe.data.source == "digits":
            samples = 1038  # of 1,297; the others are held out
        return math.nan if samples is None else training.length.epochs * max(1, samples // training.batch_size)


@dataclass(frozen=True)
class Plan:
    """Everything that an id needs at a scale, in the order in which it must run."""

    id: str
    entry: Entry
    scale: str
    studies: tuple[PlannedStudy, ...] = ()
    left_out: tuple[str, ...] = ()
    """Columns and panels that are not run at this scale."""

    @property
    def runs(self) -> int:
        """Number of runs, fine-tuning included."""
        return sum(len(study.jobs) + len(study.glue_folders) for study in self.studies)

    @property
    def missing(self) -> int:
        """Number of those that are not complete."""
        return sum(study.missing + study.glue_missing for study in self.studies)

    @property
    def gpus(self) -> int:
        """Most of any study."""
        return 0 if self.scale == "tiny" else max((study.settings.gpus for study in self.studies), default=0)

    def minutes_left(self, num_workers: int) -> float:
        """Estimated time of what is missing, with as many runs at once; NaN where not known."""
        return math.fsum(study.minutes_left for study in self.studies) / num_workers

    def data(self) -> dict[str, str]:
        """Datasets and tokenisers that the runs read, and where they are; empty if they are not here."""
        found = dict(need for study in self.studies for need in _data_of(study.recipe, study.jobs[0].base))
        if any(study.glue_folders for study in self.studies):
            found[HUB_ID] = _in_mirror_or_cache(HUB_ID)
        return found

    def why_not_here(self) -> list[str]:
        """What keeps it from running on this machine; empty if nothing does."""
        missing, here = [name for name, found in self.data().items() if not found], gpus_here()
        reasons = [f"data not here: {', '.join(missing)}"] if missing else []
        if self.gpus > here:
            reasons.append(f"{self.gpus} GPU{'s' * (self.gpus > 1)} wanted, {here or 'none'} here")
        return reasons


def gpus_here() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_complete(folder: Path) -> bool:
    """Whether a run has ended; a broken record counts as none, and the run itself says what is wrong."""
    if not (folder / "run.json").is_file():
        return False
    record = RunFolder(folder).read_record()
    return record is not None and record["status"] in COMPLETE


def make_plan(id: str, entry: Entry, scale: str, options: PlanOptions) -> Plan:
    """All comparisons of an id; nothing is run or written.

    Raises: RecipeError for a method or setting that does not exist.
    """
    known = list(dict.fromkeys(row.method for row in entry.all_rows.values()))
    if unknown := [method for method in options.methods or () if method not in known]:
        raise RecipeError(f"--methods: expected some of {', '.join(known)}, found {unknown[0]!r}")
    entry = entry.at(scale)
    default = MethodSettings.model_validate("default")
    asked: dict[tuple[str, str], list[MethodSettings]] = {}
    left_out = []
    for title, source in entry.sources.items():
        if catalogue().studies[source.study].at(scale) is None:
            left_out.append(f"{title}: nothing to run it on at scale {scale}")
            continue
        for row in entry.all_rows.values():
            chosen = options.methods is None or row.method in (*options.methods, "default")
            if not chosen or not row.is_in(title):
                continue
            methods = asked.setdefault((source.study, row.variant), [default])
            made = MethodSettings.model_validate(row.method)
            if made not in methods:
                methods.append(made)
    if options.images is not None:  # one folder of images must be able to stand for the data of the id
        classifying = [study for study, _ in asked if _classifies_images(study, scale)]
        if not classifying:
            said = "trains on no folder of images; give a mirror of its data sets, which has no folder train/"
            raise RecipeError(f"--data: {id} {said}")
        if any(study.startswith("sets-") for study in classifying) and len(classifying) > 1:
            said = "compares several sets of images; give a mirror that has them by their names"
            raise RecipeError(f"--data: {id} {said}")
    planned: dict[str, PlannedStudy] = {}
    for (study, variant), methods in asked.items():
        for made_study in _with_what_comes_first(study, variant, methods, scale, options):
            planned.setdefault(made_study.name, made_study)
    return Plan(id, entry, scale, tuple(planned.values()), tuple(dict.fromkeys(left_out)))


def _with_what_comes_first(
    study: str, variant: str, methods: Sequence[MethodSettings], scale: str, options: PlanOptions
) -> Iterator[PlannedStudy]:
    settings = _at(study, scale)
    if settings.after is not None:
        own = catalogue().studies[settings.after].methods
        first = [MethodSettings.model_validate(text) for text in own] or methods
        yield from _with_what_comes_first(settings.after, "", first, scale, options)
    name = study_name(study, variant)
    changes = [*settings.settings, *(catalogue().variants[variant].settings if variant else ()), *options.overrides]
    if options.images is not None and _classifies_images(study, scale):
        changes.append(f"data={{source: image_folder, path: {str(options.images.resolve())!r}}}")
    recipe, _ = load_recipe(settings.recipe, scale=scale, overrides=changes)
    of_study = recipe.seeds if settings.seeds is None else tuple(range(settings.seeds))
    seeds = of_study if options.seeds is None else options.seeds[: settings.seeds]
    folder = options.folder / RUNS / name
    check_settings(folder, recipe)
    jobs = tuple(plan_comparison(recipe, methods, seeds, folder, base=options.folder, cpu=options.cpu))
    tasks = NAMES if catalogue().studies[study].glue else ()
    tuned = tuple(job.folder / "glue" / task / "seed-0" for job in jobs for task in tasks)
    yield PlannedStudy(name, settings, recipe, tuple(methods), seeds, folder, jobs, tuned)


def _at(study: str, scale: str) -> AtScale:
    found = catalogue().studies[study].at(scale)
    assert found is not None, f"the study {study} is not run at scale {scale}"
    return found


def _classifies_images(study: str, scale: str) -> bool:
    recipe, _ = load_recipe(_at(study, scale).recipe, scale=scale)
    return getattr(recipe.task, "name", "") == "image_classification"


def _data_of(recipe: Recipe, base: Path | None) -> Iterator[tuple[str, str]]:
    data: dict[str, Any] = recipe.data.model_dump()
    if data["source"] == "digits":
        yield "digits", "scikit-learn's digits, part of that package"
    elif data["source"] == "generated":
        yield str(data["generator"]), "generated here"
    elif data.get("path"):
        yield str(data["path"]), _folder(str(data["path"]), base)
    else:
        name, config = str(data.get("id") or data.get("files") or data["source"]), data.get("config")
        yield f"{name} ({config})" if config else name, _in_mirror_or_cache(name, config)
    tokenizer = recipe.task.model_dump().get("tokenizer")
    if isinstance(tokenizer, dict) and tokenizer.get("file"):
        yield str(tokenizer["file"]), _folder(str(tokenizer["file"]), base)


def _folder(path: str, base: Path | None) -> str:
    if ((base or Path()) / os.path.expanduser(path)).exists():
        return "a folder"
    return "a mirror" if find_in_mirror(path) else ""


def _in_mirror_or_cache(name: str, config: str | None = None) -> str:
    mirror = find_in_mirror(name)
    if mirror is not None:
        has_configs = any(inside.is_dir() and inside.name != "data" for inside in mirror.iterdir())
        if config is None or not has_configs or (mirror / config).is_dir():
            return "a mirror"
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = [cache / "hub" / f"datasets--{name.replace('/', '--')}", cache / "datasets" / name.replace("/", "___")]
    return "the hub's cache" if any(folder.is_dir() for folder in folders) else ""


def list_entries(
    folder_of: Callable[[str], Path], num_workers: int, scales: Iterable[str] = SCALES
) -> list[dict[str, Any]]:
    """Everything about every id at some scales, as plain data; runs of a scale that are there already are counted."""

    def at(id: str, entry: Entry, scale: str) -> dict[str, Any]:
        try:
            plan = make_plan(id, entry, scale, PlanOptions(folder_of(scale)))
        except (RecipeError, RunError) as error:
            return {"here": False, "why_not": [str(error).split(". Allowed")[0]], "data": [], "gpus": 0}
        reasons = plan.why_not_here()
        return {
            "here": not reasons, "why_not": reasons, "gpus": plan.gpus,
            "data": [{"name": name, "found": found} for name, found in plan.data().items()],
            "minutes_here_estimate": plan.minutes_left(num_workers),
            "runs": plan.runs, "runs_done": plan.runs - plan.missing, "left_out": list(plan.left_out),
        }  # fmt: skip

    wanted = tuple(scales)
    return [
        {
            "id": id, "kind": entry.kind, "title": entry.title, "paper_has_numbers": entry.has_numbers,
            "scales": {scale: at(id, entry, scale) for scale in wanted},
        }
        for id, entry in catalogue().entries.items()
    ]  # fmt: skip


def list_table(listed: Iterable[dict[str, Any]], scale: str) -> Table:
    """`--list`: one row for each id, at one scale."""
    rows: list[dict[str, Cell]] = []
    for row in listed:
        at = row["scales"][scale]
        needs = [need["name"] + ("" if need["found"] else " (not here)") for need in at["data"]]
        rows.append({
            "id": row["id"], "what": row["title"], "data": ", ".join(needs) or "none",
            "GPUs": str(at["gpus"] or MISSING), "time here": show_minutes(at.get("minutes_here_estimate", math.nan)),
            "runs done": f"{at.get('runs_done', 0)}/{at.get('runs', 0)}",
            "can run here": "yes" if at["here"] else "no: " + "; ".join(at["why_not"]),
        })  # fmt: skip
    notes = (
        "Times are estimates, of what is missing.",
        "Ids share runs: the figures of a paper use those of its tables.",
    )
    return Table.of("list", f"Tables, figures and ablations at scale {scale}", rows, notes, (0, 1, 2, 6))


def show_minutes(minutes: float) -> str:
    """A length of time at a glance.

    Example:
        >>> show_minutes(0.2), show_minutes(12), show_minutes(300), show_minutes(60 * 24 * 8)
        ('~ 12 s', '~ 12 min', '~ 5 h', '~ 8 days')
    """
    if math.isnan(minutes):
        return MISSING
    for unit, size in (("days", 60 * 24), ("h", 60), ("min", 1)):
        if minutes >= 2 * size or (unit == "min" and minutes >= 1):
            return f"~ {minutes / size:.0f} {unit}"
    return f"~ {60 * minutes:.0f} s"


def plan_table(plan: Plan, num_workers: int) -> Table:
    """`--dry-run`: what a plan would run."""
    header = ("study", "recipe", "methods", "seeds", "updates a run", "runs to do", "done", "time here")
    rows = []
    for study in plan.studies:
        left = study.missing + study.glue_missing
        rows.append((
            study.name, f"{study.recipe.scale}/{study.settings.recipe}",
            ", ".join(method.label for method in study.methods), ", ".join(map(str, study.seeds)),
            f"{study.updates_per_run:.0f}", str(left), str(len(study.jobs) + len(study.glue_folders) - left),
            show_minutes(study.minutes_left / num_workers),
        ))  # fmt: skip
    if len(rows) > 1:
        done, whole = str(plan.runs - plan.missing), show_minutes(plan.minutes_left(num_workers))
        rows.append(("all", "", "", "", "", str(plan.missing), done, whole))
    notes = [f"{plan.id} has no runs: it is computed."] if not plan.studies else []
    notes += [*plan.left_out, *(f"Cannot run here: {reason}." for reason in plan.why_not_here())]
    notes.append(f"Times are estimates, for {num_workers} run{'s' * (num_workers > 1)} at once.")
    title = f"{plan.id} at scale {plan.scale}: {plan.entry.title}"
    return Table("plan", title, header, tuple(rows), tuple(notes), frozenset({0, 1, 2, 3}))

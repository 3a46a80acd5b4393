"""From an id and a scale to comparisons: what would run, what it needs, what is there already; and running the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellcond.lab.data.disk import find_in_mirror
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.reproduce.catalogue import AtScale, Entry, catalogue
from wellcond.lab.reproduce.stored import RUNS, study_name
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.glue.run import plan_glue, run_glue
from wellcond.lab.tasks.glue.task import HUB_ID, NAMES
from wellcond.lab.train.compare import (
    JobObserver,
    Outcome,
    check_settings,
    plan_comparison,
    run_comparison,
    write_comparison,
)
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunFolder
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
    glue: bool

    @property
    def missing(self) -> tuple[Job, ...]:
        """Runs that are not complete."""
        return tuple(job for job in self.jobs if not is_complete(job.folder))

    @property
    def glue_folders(self) -> tuple[Path, ...]:
        """Of every run of fine-tuning."""
        tasks = NAMES if self.glue else ()
        return tuple(job.folder / "glue" / task / "seed-0" for job in self.jobs for task in tasks)

    @property
    def glue_missing(self) -> int:
        """Number of runs of fine-tuning that are not complete."""
        return sum(not is_complete(folder) for folder in self.glue_folders)

    @property
    def runs(self) -> int:
        """Number of runs, fine-tuning included."""
        return len(self.jobs) + len(self.glue_folders)

    @property
    def left(self) -> int:
        """Number of those that are not complete."""
        return len(self.missing) + self.glue_missing

    def run(self, num_workers: int, observer: JobObserver) -> Outcome:
        """Run what is missing; what is there is not touched.

        Raises: as `run_comparison`.
        """
        return run_comparison(self.jobs, num_workers=num_workers, observer=observer)

    def describe(self) -> None:
        """Write what the study compares; methods and seeds of earlier calls stay listed.

        Raises: RunError if the folder holds runs under other settings.
        """
        write_comparison(self.folder, self.recipe, self.methods, self.seeds)

    def fine_tune(self, num_workers: int, observer: JobObserver) -> Outcome:
        """Fine-tune the finished runs on GLUE, as far as that is missing.

        Raises: as `run_glue`.
        """
        plan = plan_glue(self.folder, base=self.jobs[0].base, cpu=self.jobs[0].cpu)
        return run_glue(plan, num_workers=num_workers, observer=observer)


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
        return sum(study.runs for study in self.studies)

    @property
    def missing(self) -> int:
        """Number of those that are not complete."""
        return sum(study.left for study in self.studies)

    @property
    def gpus(self) -> int:
        """Most of any study."""
        return 0 if self.scale == "tiny" else max((study.settings.gpus for study in self.studies), default=0)

    def data(self) -> dict[str, str]:
        """Datasets and tokenisers that the runs read, and where they are; empty if they are not here."""
        found = dict(need for study in self.studies for need in _data_of(study.recipe, study.jobs[0].base))
        if any(study.glue for study in self.studies):
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
    _check_methods(entry, options.methods or ())
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
    if options.images is not None:
        _check_images(id, [study for study, _ in asked], scale)
    planned: dict[str, PlannedStudy] = {}
    for (study, variant), methods in asked.items():
        for made_study in _with_what_comes_first(study, variant, methods, scale, options):
            planned.setdefault(made_study.name, made_study)
    return Plan(id, entry, scale, tuple(planned.values()), tuple(dict.fromkeys(left_out)))


def _check_methods(entry: Entry, methods: Sequence[str]) -> None:
    known = list(dict.fromkeys(row.method for row in entry.all_rows.values()))
    unknown = [method for method in methods if method not in known]
    if unknown:
        raise RecipeError(f"--methods: expected some of {', '.join(known)}, found {unknown[0]!r}")


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
    seeds = (options.seeds if options.seeds is not None else recipe.seeds)[: settings.seeds]
    folder = options.folder / RUNS / name
    check_settings(folder, recipe)
    jobs = plan_comparison(recipe, methods, seeds, folder, base=options.folder, cpu=options.cpu)
    glue = catalogue().studies[study].glue
    yield PlannedStudy(name, settings, recipe, tuple(methods), seeds, folder, tuple(jobs), glue)


def _at(study: str, scale: str) -> AtScale:
    found = catalogue().studies[study].at(scale)
    assert found is not None, f"the study {study} is not run at scale {scale}"
    return found


def _classifies_images(study: str, scale: str) -> bool:
    recipe, _ = load_recipe(_at(study, scale).recipe, scale=scale)
    return getattr(recipe.task, "name", "") == "image_classification"


def _check_images(id: str, named: Sequence[str], scale: str) -> None:
    """Raise RecipeError if one folder of images cannot stand for the data of an id."""
    classifying = [study for study in named if _classifies_images(study, scale)]
    if not classifying:
        raise RecipeError(
            f"--data: {id} trains on no folder of images; give a mirror of its data sets, which has no folder train/"
        )
    if any(study.startswith("sets-") for study in classifying) and len(classifying) > 1:
        raise RecipeError(f"--data: {id} compares several sets of images; give a mirror that has them by their names")


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

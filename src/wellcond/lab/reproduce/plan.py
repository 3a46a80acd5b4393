"""From an id and a scale to comparisons: what would run, where, and what is there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.reproduce.catalogue_files import AtScale, Column, Entry, find_study, studies, variants
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.glue.benchmark import NAMES
from wellcond.lab.train.compare import check_settings, plan_comparison
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunFolder
from wellcond.run_records import COMPLETE

RUNS = "runs"
"""Folder of the studies, beside those of the ids."""


@dataclass(frozen=True)
class Wishes:
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
        if not self.glue:
            return ()
        return tuple(job.folder / "glue" / task / "seed-0" for job in self.jobs for task in NAMES)


@dataclass(frozen=True)
class Plan:
    """Everything that an id needs at a scale, in the order in which it must run."""

    id: str
    entry: Entry
    scale: str
    studies: tuple[PlannedStudy, ...] = ()
    left_out: tuple[str, ...] = field(default=())
    """Columns and panels that are not run at this scale."""

    @property
    def missing(self) -> int:
        """Number of runs to do, fine-tuning included."""
        tuned = [folder for study in self.studies for folder in study.glue_folders]
        return sum(len(study.missing) for study in self.studies) + sum(not is_complete(folder) for folder in tuned)


def is_complete(folder: Path) -> bool:
    """Whether a run has ended; a broken record counts as none, and the run itself says what is wrong."""
    if not (folder / "run.json").is_file():
        return False
    record = RunFolder(folder).read_record()
    return record is not None and record["status"] in COMPLETE


def study_name(study: str, variant: str) -> str:
    """Of a study with a variant.

    Example:
        >>> study_name("vit", ""), study_name("vit", "qk-norm")
        ('vit', 'vit-qk-norm')
    """
    return f"{study}-{variant}" if variant else study


def make_plan(id: str, entry: Entry, scale: str, wishes: Wishes) -> Plan:
    """All comparisons of an id; nothing is run or written.

    Raises: RecipeError for a method or setting that does not exist.
    """
    entry = entry.at(scale)
    asked: dict[tuple[str, str], list[MethodSettings]] = {}
    left_out = []
    sources = [*entry.columns.items(), *((panel.title, Column(study=panel.study)) for panel in entry.panels)]
    for title, column in sources:
        settings = studies()[column.study].at(scale)
        if settings is None:
            left_out.append(f"{title}: nothing to run it on at scale {scale}")
            continue
        for row in entry.all_rows.values():
            wished = wishes.methods is None or row.label in wishes.methods or row.label == "default"
            if not wished or not row.is_in(column.study):
                continue
            methods = asked.setdefault((column.study, row.variant), [_method("default", "default", settings)])
            made = _method(row.method, row.label, settings)
            if made not in methods:
                methods.append(made)
    if wishes.images is not None:
        _check_images(id, [study for study, _ in asked], scale)
    planned: dict[str, PlannedStudy] = {}
    for (study, variant), methods in asked.items():
        for made_study in _with_what_comes_first(study, variant, methods, scale, wishes):
            planned.setdefault(made_study.name, made_study)
    return Plan(id, entry, scale, tuple(planned.values()), tuple(dict.fromkeys(left_out)))


def _method(text: str, label: str, settings: AtScale) -> MethodSettings:
    first = f"{RUNS}/{settings.after}" if settings.after else ""
    made = MethodSettings.model_validate(text.replace("{after}", first))
    return made.model_copy(update={"label": label})


def _with_what_comes_first(
    study: str, variant: str, methods: Sequence[MethodSettings], scale: str, wishes: Wishes
) -> list[PlannedStudy]:
    settings = find_study(study, scale)
    own = _plan_study(study, variant, methods, scale, wishes)
    if settings.after is None:
        return [own]
    first = [MethodSettings.model_validate(text) for text in settings.after_methods] or list(methods)
    return [*_with_what_comes_first(settings.after, "", first, scale, wishes), own]


def _plan_study(
    study: str, variant: str, methods: Sequence[MethodSettings], scale: str, wishes: Wishes
) -> PlannedStudy:
    settings, name = find_study(study, scale), study_name(study, variant)
    # Relative to the folder of the scale, so that it may be moved.
    first = f"{RUNS}/{settings.after}" if settings.after else ""
    changes = [text.replace("{after}", first) for text in settings.settings]
    changes += [*(variants()[variant].settings if variant else ()), *wishes.overrides]
    if wishes.images is not None and _classifies_images(study, scale):
        changes.append(f"data={{source: image_folder, path: {str(wishes.images.resolve())!r}}}")
    recipe, _ = load_recipe(settings.recipe, scale=scale, overrides=changes)
    seeds = wishes.seeds if wishes.seeds is not None else recipe.seeds[: settings.seeds]
    if settings.seeds is not None:
        seeds = seeds[: settings.seeds]
    folder = wishes.folder / RUNS / name
    check_settings(folder, recipe)
    jobs = plan_comparison(recipe, methods, seeds, folder, base=wishes.folder, cpu=wishes.cpu)
    return PlannedStudy(name, settings, recipe, tuple(methods), seeds, folder, tuple(jobs), studies()[study].glue)


def _classifies_images(study: str, scale: str) -> bool:
    recipe, _ = load_recipe(find_study(study, scale).recipe, scale=scale)
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


def check_methods(entry: Entry, methods: Sequence[str]) -> None:
    """Raise RecipeError for a method that the id does not have."""
    known = list(dict.fromkeys(row.label for row in entry.all_rows.values()))
    unknown = [method for method in methods if method not in known]
    if unknown:
        raise RecipeError(f"--methods: expected some of {', '.join(known)}, found {unknown[0]!r}")

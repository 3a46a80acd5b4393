"""From an id and a scale to comparisons: what would run, and what is there already."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wellcond.errors import RecipeError, RunError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.plan import Settled, check_settings, plan_comparison, settle_methods
from wellcond.lab.recipe import Recipe, load_recipe
from wellcond.lab.records import COMPLETE
from wellcond.lab.report.table import MISSING, Cell, Table, show_range
from wellcond.lab.reproduce.catalogue import Address, AtScale, Entry, catalogue
from wellcond.lab.reproduce.studies import RUNS
from wellcond.lab.tasks.glue import NAMES
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunFolder


@dataclass(frozen=True)
class PlanOptions:
    """What a user may change."""

    folder: Path
    seeds: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    """Only these; the baseline always runs."""
    overrides: tuple[str, ...] = ()
    cpu: bool = False


@dataclass(frozen=True)
class PlannedStudy:
    """One comparison of a plan."""

    name: str
    title: str
    """What runs, in words."""
    settings: AtScale
    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]
    folder: Path
    glue_folders: tuple[Path, ...]
    """Of every run of fine-tuning that follows."""
    rates: Settled
    """Which learning rates the methods have, and where those are from."""

    @property
    def runs(self) -> int:
        """Number of runs, fine-tuning included."""
        return len(self.jobs) + len(self.glue_folders)

    @property
    def missing(self) -> int:
        """Number of those that are not complete."""
        return count_missing((*(job.folder for job in self.jobs), *self.glue_folders))


def count_missing(folders: Iterable[Path]) -> int:
    """How many of these hold no complete run."""
    records = [RunFolder(folder).read_record() for folder in folders]
    return sum(record is None or record["status"] not in COMPLETE for record in records)


@dataclass(frozen=True)
class Plan:
    """Everything that an id needs at a scale, in the order in which it must run."""

    title: str
    entry: Entry
    studies: tuple[PlannedStudy, ...]
    left_out: tuple[str, ...]
    """Columns, panels and rows that are not run at this scale."""

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(study.runs for study in self.studies)

    @property
    def missing(self) -> int:
        """Number of those that are not complete."""
        return sum(study.missing for study in self.studies)


def make_plan(id: str, entry: Entry, scale: str, options: PlanOptions) -> Plan:
    """All comparisons of an id; nothing is run or written. RecipeError for a method or setting that does not exist."""
    here = entry.at(scale)
    known = list(dict.fromkeys(row.method for row in here.all_rows.values()))
    if unknown := [method for method in options.methods or () if method not in known]:
        raise RecipeError(f"--methods: expected some of {', '.join(known)}, found {unknown[0]!r}")
    wanted = {"default", *(known if options.methods is None else options.methods)}
    asked: dict[Address, list[str]] = {}
    left_out = [f"{name}: not run at scale {scale}" for name, row in entry.all_rows.items() if not row.is_run_at(scale)]
    for title, source in here.columns.items():
        settings = catalogue().studies[source.study].at(scale)
        if settings is None:
            left_out.append(f"{title}: nothing to run it on at scale {scale}")
            continue
        first = [Address(settings.after)] if settings.after else []
        for row in [row for row in here.rows_of(title).values() if row.method in wanted and row.is_run_at(scale)]:
            for address in (*first, here.address(title, row)):
                asked.setdefault(address, ["default"]).append(row.method)
    studies = tuple(_plan_study(address, methods, scale, options) for address, methods in asked.items())
    return Plan(f"{id} at scale {scale}: {entry.title}", here, studies, tuple(left_out))


def _plan_study(address: Address, asked: Sequence[str], scale: str, options: PlanOptions) -> PlannedStudy:
    study = catalogue().studies[address.study]
    settings = study.at(scale)
    assert settings is not None, f"the study {address.study} is not run at scale {scale}"
    methods = tuple(MethodSettings.model_validate(text) for text in study.methods or dict.fromkeys(asked))
    # What the papers measured is measured, however long that takes.
    changes = ["tracking.budget=null", *settings.settings, *address.settings, *options.overrides]
    recipe, _ = load_recipe(settings.recipe, scale=scale, overrides=changes)
    title = settings.title or load_recipe(settings.recipe, scale=scale, overrides=settings.settings)[0].title
    for variant in address.variants:
        title = title.replace(" on ", f" {variant.replace('-', ' ')} on ", 1)
    of_study = recipe.seeds if settings.seeds is None else tuple(range(settings.seeds))
    seeds = of_study if options.seeds is None else options.seeds[: settings.seeds]
    folder = options.folder / RUNS / address.name
    check_settings(folder, recipe)
    words = ["wellcond", "compare", "--recipe", settings.recipe, "--scale", scale]
    words += ["--methods", ",".join(method.label for method in methods)]
    words += [word for change in changes for word in ("--set", change)]
    rates = settle_methods(recipe, methods, command=shlex.join(words))
    recipe = recipe.model_copy(update={"tuned": None})
    jobs = tuple(plan_comparison(recipe, rates.methods, seeds, folder, base=options.folder, cpu=options.cpu))
    tuned = tuple(job.folder / "glue" / task / "seed-0" for job in jobs for task in (NAMES if study.glue else ()))
    return PlannedStudy(folder.name, title, settings, recipe, rates.methods, seeds, jobs, folder, tuned, rates)


def list_table(scale: str, folder: Path) -> Table:
    """`--list`: a row for each id: what the paper shows, what runs at a scale, and the runs that are there already."""
    rows: list[dict[str, Cell]] = []
    for id, entry in catalogue().entries.items():
        try:
            plan = make_plan(id, entry, scale, PlanOptions(folder))
            runs = _name_runs(plan) if plan.runs else "computed, without runs"
            done = f"{plan.runs - plan.missing}/{plan.runs}" if plan.runs else MISSING
        except (RecipeError, RunError) as error:
            runs, done = str(error).splitlines()[0], MISSING
        rows.append({"id": id, "in the paper": entry.title, f"what runs at scale {scale}": runs, "runs done": done})
    note = "Ids share runs: the figures of a paper use those of its tables. A-... are ablations of ours."
    return Table.of("list", f"Tables, figures and ablations at scale {scale}", rows, (note,), (0, 1, 2, 3))


def _name_runs(plan: Plan) -> str:
    """The models of a plan on each of its data sets, such as ``ViT (width 64), DeiT (width 48) on CIFAR-10``."""
    models: dict[str, list[str]] = {}
    for study in plan.studies:
        model, _, data = study.title.partition(" on ")
        data = re.sub(r"^[\d,]+ (images|stories) of ", "", data)
        models.setdefault(data, []).append(re.sub(r"\((.*?),.*\)", r"(\1)", model))
    return "; ".join(f"{', '.join(dict.fromkeys(names))} on {data}" for data, names in models.items())


def plan_table(plan: Plan) -> Table:
    """`--dry-run`: what a plan would run."""
    rows: list[dict[str, Cell]] = [
        {
            "study": study.name,
            "what runs": study.title,
            "recipe": f"{study.recipe.scale}/{study.settings.recipe}",
            "methods": ", ".join(method.label for method in study.methods),
            "seeds": show_range(study.seeds),
            "runs": str(study.runs),
            "to do": str(study.missing),
        }
        for study in plan.studies
    ]
    named = [(name, row.method) for name, row in plan.entry.controls.items()]
    controls = ", ".join(name if method in name else f"{name} ({method})" for name, method in named)
    notes = [*plan.entry.notes, *plan.left_out]
    notes += [f"Not in the paper, for control: {controls}."] if controls else []
    notes += [f"{study.name}: {study.rates.note}" for study in plan.studies if study.rates.unsearched]
    rows = rows or [{"what runs": "nothing: it is computed in a moment"}]
    to_do = f"{plan.missing} of {plan.runs} runs to do." if plan.runs else "Leave --dry-run out to see it."
    return Table.of("plan", plan.title, rows, (*notes, to_do), (0, 1, 2, 3, 4))

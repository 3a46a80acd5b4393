"""What `wellcond reproduce` and `wellcond claims` do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from wellcond.cli.console import make_console, print_table
from wellcond.cli.experiment_checks import read_seeds
from wellcond.cli.experiments import choose_workers, is_first_process, leaving_together
from wellcond.cli.progress import RunsProgress
from wellcond.errors import WellcondError
from wellcond.files import to_json
from wellcond.lab.data.reading import MIRROR_VARIABLE
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import split_methods
from wellcond.lab.report.glue import rebuild_glue
from wellcond.lab.report.table import Table
from wellcond.lab.reproduce.catalogue_files import SCALES, entries, find_entry
from wellcond.lab.reproduce.collect import Collection
from wellcond.lab.reproduce.cost import plan_cost
from wellcond.lab.reproduce.listing import list_entries, list_table, plan_table, show_minutes
from wellcond.lab.reproduce.needs import gpus_here, gpus_needed, why_not_here
from wellcond.lab.reproduce.outcome import outcome_tables, write_outcome
from wellcond.lab.reproduce.plan import Plan, PlannedStudy, Wishes, check_methods, is_complete, make_plan
from wellcond.lab.reproduce.run_plan import describe_study, run_study, tune_study
from wellcond.lab.train.compare import JobObserver, Outcome


@dataclass(frozen=True)
class Request:
    """The command's arguments."""

    id: str
    scale: str
    folder: Path | None
    seeds: str | None = None
    methods: str | None = None
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    jobs: str = "auto"
    cpu: bool = False
    as_json: bool = False
    quiet: bool = False

    @property
    def place(self) -> Path:
        """Where runs and results go."""
        return self.folder or Path("reproduce") / self.scale


def print_list(scale: str, folder: Path | None, *, jobs: str, data: Path | None, as_json: bool) -> None:
    """`--list`."""
    use_data(data)

    def place(scale: str) -> Path:
        return Request("", scale, folder).place

    rows = list_entries(place, _cpu_workers(jobs), SCALES if as_json else (scale,))
    if as_json:
        print(to_json(rows, indent=1))
        return
    _print([list_table(rows, scale)])


def use_data(data: Path | None) -> Path | None:
    """The user's data, if they are images in train/ and val/; a mirror is put in front of those that are known."""
    if data is None:
        return None
    if (data / "train").is_dir():
        return data
    known = os.environ.get(MIRROR_VARIABLE)
    os.environ[MIRROR_VARIABLE] = os.pathsep.join([str(data.resolve()), *([known] if known else [])])
    return None


def run_reproduce(request: Request, *, dry_run: bool, records: Path | None) -> int:
    """Run what is missing and print the outcome; returns the exit code."""
    entry = find_entry(request.id)
    id = next(name for name, known in entries().items() if known is entry)
    if records is not None:
        _show(
            outcome_tables(id, entry, request.scale, Collection(records, committed=True, places=entry.records)), request
        )
        return 0
    plan = make_plan(id, entry, request.scale, _wishes(request))
    if dry_run:
        _show([plan_table(plan, _cpu_workers(request.jobs))], request)
        return 0
    _check_can_run(plan, request)
    code = _run(plan, request)
    if not is_first_process():
        return code
    collection = None if entry.kind == "static" else Collection(request.place)
    written = write_outcome(id, plan.entry, request.scale, collection, request.place / id)
    _show(outcome_tables(id, plan.entry, request.scale, collection), request)
    if not (request.quiet or request.as_json):
        page = next(path for path in written if path.suffix == ".md")
        make_console().print(f"written: {page}", markup=False, soft_wrap=True)
    return code


def _wishes(request: Request) -> Wishes:
    entry = find_entry(request.id)
    methods = None if request.methods is None else tuple(split_methods(request.methods))
    check_methods(entry, methods or ())
    return Wishes(
        request.place,
        seeds=None if request.seeds is None else read_seeds(request.seeds),
        methods=methods,
        overrides=request.overrides,
        images=use_data(request.data),
        cpu=request.cpu,
    )


def _check_can_run(plan: Plan, request: Request) -> None:
    """Refuse what needs a GPU where there is none, unless it is asked for; missing data are refused by the runs.

    Raises: WellcondError.
    """
    if request.cpu or gpus_here() or not gpus_needed(plan) or not plan.missing:
        return
    raise WellcondError(
        f"{plan.id} at scale {plan.scale}: {'; '.join(why_not_here(plan))}. On this machine it would take "
        f"{show_minutes(plan_cost(plan).seconds / 60)}.\n"
        "  --scale tiny takes minutes; --cpu runs it here all the same; --dry-run shows the plan."
    )


def _run(plan: Plan, request: Request) -> int:
    code = 0
    with leaving_together():
        for study in plan.studies:
            if study.missing or not all(map(is_complete, study.glue_folders)):
                code = max(code, _run_one(study, request))
            if code == 130:
                break
    return code


def _run_one(study: PlannedStudy, request: Request) -> int:
    silent = request.quiet or request.as_json or not is_first_process()
    if not silent:
        make_console().print(
            f"[bold]{escape(study.name)}[/]: {len(study.missing)} of {len(study.jobs)} runs to do", soft_wrap=True
        )
    workers = choose_workers(request.jobs, study.recipe, cpu=request.cpu)
    if is_first_process():
        describe_study(study)
    outcome = _watched(len(study.jobs), silent, lambda observe: run_study(study, num_workers=workers, observer=observe))
    code = _tell_end(outcome, silent)
    if study.glue and code != 130:
        count = len(study.glue_folders)
        tuned = _watched(count, silent, lambda observe: tune_study(study, num_workers=workers, observer=observe))
        code = max(code, _tell_end(tuned, silent))
        if is_first_process() and tuned.records:
            rebuild_glue(study.folder)
    return code


def _watched(count: int, silent: bool, run: Callable[[JobObserver], Outcome]) -> Outcome:
    progress = RunsProgress(count, quiet=silent)
    with progress.shown():
        return run(progress.observe)


def _tell_end(outcome: Outcome, silent: bool) -> int:
    out = make_console()
    for _, problem in outcome.failures:
        if not silent:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
    if outcome.interrupted and not silent:
        out.print("[yellow]stopped[/]; the same command resumes from here")
    return 130 if outcome.interrupted else 1 if outcome.failures else 0


def _cpu_workers(jobs: str) -> int:
    return choose_workers(jobs, load_recipe("digits", scale="tiny")[0], cpu=True)


def _show(tables: list[Table], request: Request) -> None:
    if request.as_json:
        rows = [
            {"title": table.title, "rows": [dict(zip(table.header, row, strict=True)) for row in table.rows],
             "notes": list(table.notes)}
            for table in tables
        ]  # fmt: skip
        print(to_json(rows, indent=1))
    elif not request.quiet:
        _print(tables)


def _print(tables: list[Table]) -> None:
    out = make_console()
    for table in tables:
        print_table(out, table.title, table)
        for note in table.notes:
            out.print(f"- {escape(note)}", soft_wrap=True)


def print_claims(results: Path, output: Path, *, as_json: bool) -> None:
    """Judge every claim by the records and write the pages.

    Raises: WellcondError if there is no such folder, or the pages cannot be written.
    """
    from wellcond.lab.reproduce.claims import judge_claims
    from wellcond.lab.reproduce.claims_page import claims_json, claims_table, write_claims

    if output.is_dir() or output.suffix == ".html":
        raise WellcondError(f"--output: expected a name for the markdown, such as claims.md, found {output}")
    judged = judge_claims(results)
    try:
        write_claims(judged, output, results)
    except OSError as error:
        raise WellcondError(f"--output: {output} could not be written: {error.strerror or error}") from error
    if as_json:
        print(to_json(claims_json(judged), indent=1))
        return
    _print([claims_table(judged)])
    make_console().print(f"written: {output} and {output.with_suffix('.html')}", markup=False, soft_wrap=True)

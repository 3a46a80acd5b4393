"""Running what a plan is missing, with the machinery of `wellcond compare` and `wellcond glue`."""

from __future__ import annotations

from wellcond.lab.reproduce.plan import PlannedStudy
from wellcond.lab.tasks.glue.run import plan_glue, run_glue
from wellcond.lab.train.compare import JobObserver, Outcome, run_comparison, write_comparison


def describe_study(study: PlannedStudy) -> None:
    """Write what the study compares; methods and seeds of earlier calls stay listed.

    Raises: RunError if the folder holds runs under other settings.
    """
    write_comparison(study.folder, study.recipe, study.methods, study.seeds)


def run_study(study: PlannedStudy, *, num_workers: int, observer: JobObserver) -> Outcome:
    """Run what is missing of one study; what is there is not touched.

    Raises: as `run_comparison`.
    """
    return run_comparison(study.jobs, num_workers=num_workers, observer=observer)


def tune_study(study: PlannedStudy, *, num_workers: int, observer: JobObserver) -> Outcome:
    """Fine-tune the finished runs of a study on GLUE, as far as that is missing.

    Raises: as `run_glue`.
    """
    plan = plan_glue(study.folder, limit=study.settings.glue_rows, base=study.jobs[0].base, cpu=study.jobs[0].cpu)
    return run_glue(plan, num_workers=num_workers, observer=observer)

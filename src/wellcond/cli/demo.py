"""`wellcond demo`: the recipe digits, and the search that found the rates of its methods."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from wellcond.cli.experiments import run_compare
from wellcond.cli.report import print_report
from wellcond.files import write_atomically
from wellcond.lab.train.run_folder import writing


def run_demo(folder: Path, *, seeds: str | None, jobs: str, quiet: bool) -> int:
    """Compare, put the shipped record of the search beside the runs, and report on both; returns the exit code."""
    code = run_compare(
        "digits",
        scale=None,
        methods=None,
        seeds=seeds,
        overrides=(),
        folder=folder,
        jobs=jobs,
        cpu=False,
        local_code=False,
        as_json=False,
        quiet=quiet,
        report=False,
    )
    if code == 0:
        search = resources.files("wellcond.lab") / "recipes" / "tiny" / "digits.tuning.json"
        with writing(folder / "tuning.json"):
            write_atomically(folder / "tuning.json", search.read_text(encoding="utf-8"))
        print_report(folder, quiet=quiet)
    return code

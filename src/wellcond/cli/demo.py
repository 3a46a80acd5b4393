"""`wellcond demo`: the recipe digits, and the search that found the rates of its methods."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import typer

from wellcond.cli.app import EXPERIMENTS, Folder, Jobs, Quiet, Seeds, app, need_train_extra
from wellcond.cli.checks import check_experiment
from wellcond.cli.compare import Request


@app.command("demo", rich_help_panel=EXPERIMENTS)
def demo(folder: Folder = None, seeds: Seeds = None, jobs: Jobs = "auto", quiet: Quiet = False) -> None:
    """Compare initialisations of a small ViT on scikit-learn's digits, each at its tuned learning rate; minutes."""
    need_train_extra()
    place = folder or Path("runs/demo")
    check_experiment("digits", folder=place, seeds=seeds, jobs=jobs)
    from wellcond.cli.comparison import run_compare
    from wellcond.cli.report import print_report
    from wellcond.files import write_atomically
    from wellcond.lab.train.run_folder import writing

    code = run_compare(Request("digits", seeds=seeds, folder=place, jobs=jobs, quiet=quiet, report=False))
    if code == 0:
        found = resources.files("wellcond.lab") / "recipes" / "tiny" / "digits.tuning.json"
        with writing(place / "tuning.json"):
            write_atomically(place / "tuning.json", found.read_text(encoding="utf-8"))
        print_report(place, quiet=quiet)
    raise typer.Exit(code)

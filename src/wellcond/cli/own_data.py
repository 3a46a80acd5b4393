"""A recipe on the user's own data: what `--data` asks of the recipe beyond its field `data`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from wellcond.cli.checks import OptionError
from wellcond.lab.data.base import DataError
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.train.prepare import load_cached_data, prepare_task


def fit_to_data(name: str, *, scale: str | None, overrides: Sequence[str], quiet: bool) -> list[str]:
    """Read the data once, before anything is written, and return what to change in the recipe, as overrides.

    A recipe for other data may score a split that these do not have, or take a batch larger than all of them.

    Args:
        name: of the recipe, as `load_recipe` takes it.
        scale: as `load_recipe` takes it.
        overrides: as `load_recipe` takes them, with the data.
        quiet: not to say what was changed.

    Raises: DataError, OptionError, RecipeError.
    """
    console, changes = Console(stderr=True, quiet=quiet), []
    recipe, base = load_recipe(name, scale=scale, overrides=overrides)

    def change(override: str, reason: str) -> None:
        changes.append(override)
        console.print(f"note: {override}, since {reason}", markup=False, highlight=False, soft_wrap=True)

    with console.status("reading the data"):
        try:
            data = load_cached_data(recipe.data.model_dump_json(), base)
        except DataError as error:
            if recipe.data.source != "hub":
                raise
            asked = recipe.data.model_dump()["id"]
            raise OptionError(
                f"--data: there is no file or folder {asked!r}; as the id of a dataset:\n  {error}"
            ) from error
        if recipe.evaluation.test is not None and not TaskContext(data, seed=0).test:
            change("evaluation.test=null", "the data have no test split; results are those on the evaluation set")
            recipe, _ = load_recipe(name, scale=scale, overrides=[*overrides, *changes])
        count = len(prepare_task(recipe, seed=recipe.seeds[0], base=base).train)
    parts = recipe.training.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
    fitting = count // parts * parts
    if recipe.training.batch_size > count and fitting:
        change(f"training.batch_size={fitting}", f"there are only {count} training samples")
    return changes

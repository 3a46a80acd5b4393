"""`wellcond recipes`: what ships."""

from __future__ import annotations

from wellcond.cli.app import EXPERIMENTS, Json, app, need_train_extra


@app.command("recipes", rich_help_panel=EXPERIMENTS)
def recipes(json: Json = False) -> None:
    """List the recipes that ship with wellcond."""
    need_train_extra()
    from wellcond.cli.console import fits, make_console, print_table
    from wellcond.files import to_json
    from wellcond.lab.load_recipe import parse_recipe, shipped_recipes
    from wellcond.lab.report.table import Table

    listed = [parse_recipe(shipped.text, f"{shipped.scale}/{shipped.name}") for shipped in shipped_recipes()]
    if json:
        print(to_json([recipe.model_dump(mode="json") for recipe in listed], indent=1))
        return
    rows = []
    for recipe in listed:
        length, hours, data = recipe.training.length, recipe.training.hours, recipe.data.model_dump()
        amount = f"{length.epochs:g} epochs" if length.epochs else f"{length.steps} steps"
        read = next((str(data[key]) for key in ("id", "generator", "path", "train") if data.get(key)), data["source"])
        model = recipe.model.name.partition(":")[2]
        shown = (recipe.name, recipe.scale, amount if hours is None else f"{hours:g} hours", recipe.title)
        rows.append((*shown, recipe.task.model_dump()["name"], model, read))
    header = ("recipe", "scale", "length", "what", "task", "model", "data")
    table = Table("recipes", "Recipes", header, tuple(rows), (), frozenset(range(len(header))))
    out = make_console()
    print_table(out, table.title, table if fits(out, table) else table.only(range(4)))

"""Write the snapshot that `test_recipes.py` compares with: `python tests/lab/recipes/renew.py` after a recipe changed.

The diff of resolved.json is then what to review.
"""

import json
from pathlib import Path

from wellcond.lab.recipe import load_recipe
from wellcond.lab.settings import shipped_recipes

SNAPSHOT = Path(__file__).with_name("resolved.json")
TEXTS = {"title", "description"}


def resolved(shipped):
    """All fields of a shipped recipe but its texts, those that it leaves at their defaults too."""
    scale, name = shipped.split("/")
    recipe = load_recipe(name, scale=scale)[0]
    methods = {"method": recipe.method.canonical(), "methods": [method.canonical() for method in recipe.methods]}
    return recipe.model_dump(mode="json", exclude={*TEXTS, *methods}) | methods


def write(recipes):
    """One line for each part of a recipe."""
    lines = []
    for name, fields in recipes.items():
        parts = ",\n".join(f"  {json.dumps(part)}: {json.dumps(value)}" for part, value in fields.items())
        lines.append(f"{json.dumps(name)}: {{\n{parts}\n}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(write({name: resolved(name) for name in shipped_recipes()}))
    print(f"{SNAPSHOT}: {len(shipped_recipes())} recipes")

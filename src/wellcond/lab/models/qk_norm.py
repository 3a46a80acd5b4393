"""QK-norm as a field of a recipe: model.qk_norm."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from wellcond.attention.find import find_attention
from wellcond.attention.head_norm import add_head_norm_
from wellcond.errors import WellcondError
from wellcond.lab.settings import RecipeError


def add_qk_norm_(model: nn.Module, run: Callable[[], object]) -> None:
    """Normalise queries and keys of every attention, in place, without a learned gain.

    Args:
        model: freshly built.
        run: runs the model on a sample, which shows that the projections are called as modules.

    Raises: RecipeError for attentions that it cannot be added to.
    """
    try:
        sites = find_attention(model)
        add_head_norm_(sites)
    except WellcondError as error:
        raise RecipeError(f"model.qk_norm: {error}") from error
    called: set[int] = set()
    owners = {id(slot.owner): (site.name, slot.owner) for site in sites for slot in map(site.by_role, ("query", "key"))}
    handles = [owner.register_forward_hook(lambda module, *_: called.add(id(module))) for _, owner in owners.values()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    unused = [name for key, (name, _) in owners.items() if key not in called]
    if unused:
        raise RecipeError(
            f"model.qk_norm: {unused[0]} of {type(model).__name__} reads the weights of its projections without "
            "calling them, so its queries and keys cannot be normalised; set model.qk_norm: false"
        )

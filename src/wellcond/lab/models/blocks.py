"""The matrices of a model's transformer blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from wellcond.attention.builders import is_conv1d, is_projection
from wellcond.attention.site import AttentionSite
from wellcond.lab.settings import RecipeError


@dataclass(frozen=True)
class Matrix:
    """A weight of a block that maps tokens to tokens: Q, K, V, O, MLP, patch merging."""

    name: str
    parameter: Tensor
    fan_in: int
    fan_out: int
    block: str
    index: int
    """Of its block, from 1."""


def block_matrices(model: nn.Module, sites: list[AttentionSite]) -> Iterator[Matrix]:
    """Every matrix of the blocks that hold these attentions, in the order of the model.

    Embeddings, heads, norms, biases and tables of positions are none of them.

    Raises: RecipeError for an attention that stands in no list of blocks.
    """
    blocks = list(dict.fromkeys(_block_of(model, site.name, sites) for site in sites))
    held = {id(slot.parameter): slot.transposed for site in sites for slot in site.slots.values()}
    seen: set[int] = set()
    for index, block in enumerate(blocks, start=1):
        for path, module in model.get_submodule(block).named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or not (id(parameter) in held or (is_projection(module) and name == "weight")):
                    continue
                seen.add(id(parameter))
                transposed = held.get(id(parameter), is_conv1d(module))
                sizes = parameter.shape[:2] if transposed else parameter.shape[:2][::-1]
                full = ".".join(part for part in (block, path, name) if part)
                yield Matrix(full, parameter, sizes[0], sizes[1], block, index)


def _block_of(model: nn.Module, site: str, sites: list[AttentionSite]) -> str:
    """The element of a list of modules that holds an attention; the stage, with what joins stages, if it is in one."""
    parts = site.split(".")
    found = None
    for length in range(len(parts) - 1, 0, -1):
        parent = ".".join(parts[: length - 1])
        listed = model.get_submodule(parent)
        if not isinstance(listed, (nn.ModuleList, nn.Sequential)):
            continue
        prefix = f"{parent}." if parent else ""
        elements = [f"{prefix}{name}" for name, _ in listed.named_children()]
        whole = all(any(f"{other.name}.".startswith(f"{one}.") for other in sites) for one in elements)
        if found is None or whole:
            found = ".".join(parts[:length])
        if not whole:
            break
    if found is None:
        raise RecipeError(
            f"the attention {site!r} of {type(model).__name__} stands in no list of blocks, so which weights belong to "
            "its block cannot be told"
        )
    return found

"""The matrices of a model's transformer blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellcond.attention.layout import is_conv1d, is_projection
from wellcond.attention.site import AttentionSite
from wellcond.errors import WellcondError

POSITIONS = ("pos_embed", "position_embedding", "embed_positions", "wpe")
"""Parts of the names of learned position embeddings."""


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


def block_matrices(model: nn.Module, sites: list[AttentionSite], *, stacks: bool = False) -> Iterator[Matrix]:
    """Every matrix of the blocks that hold these attention layers, in the order of the model.

    Embeddings, heads, norms, biases and tables of positions are none of them. Stacks of matrices are refused unless
    `stacks`; the sizes are then those of the projection that is stored in it.

    Raises: WellcondError for an attention that stands in no list of blocks.
    """
    blocks = dict.fromkeys(_block_or_stage(model, site.name, sites) for site in sites)
    held = {id(slot.parameter): slot for site in sites for slot in site.slots.values()}
    seen: set[int] = set()
    for index, block in enumerate(blocks, start=1):
        for path, module in model.get_submodule(block).named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or not (id(parameter) in held or (is_projection(module) and name == "weight")):
                    continue
                seen.add(id(parameter))
                slot = held.get(id(parameter))
                if slot is not None and slot.is_stacked and not stacks:
                    raise WellcondError(f"{block}.{path}: {name} is a stack of matrices, which have no common size")
                transposed = is_conv1d(module) if slot is None else slot.transposed
                sizes = parameter.shape[:2] if transposed else parameter.shape[:2][::-1]
                if slot is not None and slot.is_stacked:
                    sizes = torch.Size((slot.in_features, slot.out_features))
                full = ".".join(part for part in (block, path, name) if part)
                yield Matrix(full, parameter, sizes[0], sizes[1], block, index)


def _block_or_stage(model: nn.Module, site: str, sites: list[AttentionSite]) -> str:
    """The block of an attention; the stage, with what joins stages, if every element of its list has some."""
    found = None
    for element in elements_around(model, site):
        parent = element.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        whole = all(
            any(f"{other.name}.".startswith(f"{prefix}{name}.") for other in sites)
            for name, _ in model.get_submodule(parent).named_children()
        )
        if found is None or whole:
            found = element
        if not whole:
            break
    assert found is not None
    return found


def elements_around(model: nn.Module, site: str) -> Iterator[str]:
    """Elements of lists of modules that hold an attention, from the innermost.

    Raises: WellcondError if there is none.
    """
    parts = site.split(".")
    paths = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    lists = (nn.ModuleList, nn.Sequential)
    found = [path for path in paths if isinstance(model.get_submodule(path.rpartition(".")[0]), lists)]
    if not found:
        raise WellcondError(
            f"the attention {site!r} of {type(model).__name__} stands in no list of blocks, so which weights belong to "
            "its block is not known"
        )
    yield from found

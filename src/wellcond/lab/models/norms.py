"""Taking norms out of transformer blocks, to ask how much of their work conditioning can do (ablation A-norm)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, get_args

from torch import nn

from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.errors import AttentionNotFoundError, check_choice
from wellcond.lab.settings import RecipeError

Norms = Literal["keep", "without_block_norms", "without_attention_norm"]

# By name: libraries have classes of their own. Batch norms are none of them: they do not normalise tokens.
TOKEN_NORM = re.compile(r"(layer|rms|simple)_?norm", re.IGNORECASE)


def remove_norms_(model: nn.Module, norms: Norms, run: Callable[[], object]) -> list[str]:
    """Replace norms of the blocks by `nn.Identity`, in place; norms outside the blocks (the final one) stay.

    A block is the element of a `ModuleList` or `Sequential` that holds an attention. Norms inside the attention (of
    queries and keys) belong to it and stay.

    Args:
        model: a model whose attention `find_attention` recognises.
        norms: ``keep``; ``without_block_norms``, all of them; ``without_attention_norm``, the one in front of each
            attention.
        run: runs the model on a sample, which shows what stands in front of what.

    Returns: names of what was replaced.

    Raises: RecipeError where the blocks are not of this form; the model is then unchanged.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> remove_norms_(model, "without_block_norms", lambda: model(torch.zeros(1, 3, 32, 32)))
        ['blocks.0.norm1', 'blocks.0.norm2']
    """
    check_choice("model.norms", norms, get_args(Norms))
    if norms == "keep":
        return []
    try:
        sites = find_attention(model, strict=False)
    except AttentionNotFoundError as error:
        raise RecipeError(f"model.norms: {norms}, but no attention was found in {type(model).__name__}") from error
    blocks = {site.name: _block_of(model, site.name) for site in sites}
    for block in sorted(set(blocks.values())):
        _check_neighbours(model, block, blocks)
    inside = {site.name: _norms_in(model, blocks[site.name], sites) for site in sites}
    if norms == "without_block_norms":
        chosen = {name for names in inside.values() for name in names}
    else:
        chosen = _in_front(model, sites, inside, run)
    for name in chosen:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Identity())
    return [name for name, _ in model.named_modules() if name in chosen]


def _block_of(model: nn.Module, site: str) -> str:
    parts = site.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: length - 1])), (nn.ModuleList, nn.Sequential)):
            return ".".join(parts[:length])
    raise RecipeError(
        f"model.norms: the attention {site!r} of {type(model).__name__} stands in no list of blocks, so which norms "
        "are its block's is unknown; use model.norms: keep"
    )


def _check_neighbours(model: nn.Module, block: str, blocks: dict[str, str]) -> None:
    """Raise RecipeError if the feed-forward part of a block is an element of its own, as in T5."""
    parent = block.rpartition(".")[0]
    for name, neighbour in model.get_submodule(parent).named_children():
        path = f"{parent}.{name}" if parent else name
        has_attention = any(inner == path or inner.startswith(f"{path}.") for inner in blocks.values())
        if not has_attention and any(_is_norm(module) for module in neighbour.modules()):
            raise RecipeError(
                f"model.norms: {path} of {type(model).__name__} has a norm but no attention beside {block}, so which "
                "norms are the block's is unknown; use model.norms: keep"
            )


def _is_norm(module: nn.Module) -> bool:
    return any(TOKEN_NORM.search(kind.__name__) for kind in type(module).__mro__)


def _norms_in(model: nn.Module, block: str, sites: list[AttentionSite]) -> list[str]:
    attentions = tuple(f"{site.name}." for site in sites)
    names = [f"{block}.{name}" for name, module in model.get_submodule(block).named_modules() if _is_norm(module)]
    found = [name for name in names if not name.startswith(attentions)]
    if not found:
        raise RecipeError(f"model.norms: {block} of {type(model).__name__} has no layer norm to take out")
    return found


def _in_front(
    model: nn.Module, sites: list[AttentionSite], inside: dict[str, list[str]], run: Callable[[], object]
) -> set[str]:
    """For each attention the last norm of its block that ran before it."""
    order: list[str] = []
    watched = {name: model.get_submodule(name) for names in inside.values() for name in names}
    watched |= {site.name: site.module for site in sites}
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name, module in watched.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    chosen = set()
    for name, norms in inside.items():
        before = [ran for ran in order[: order.index(name) if name in order else 0] if ran in norms]
        if not before:
            raise RecipeError(
                f"model.norms: without_attention_norm, but no norm of its block runs before {name!r} of "
                f"{type(model).__name__} (its norms stand after the attention); use without_block_norms"
            )
        chosen.add(before[-1])
    return chosen

"""Sinusoidal position embeddings, written into a model's learned ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from wellcond.errors import WeightError
from wellcond.init.plan import Write

Position = Literal["keep", "sincos2d", "sincos1d"]
EMBEDDING_NAMES = ("wpe", "position_embeddings", "position_embedding", "embed_positions", "pos_emb", "pos_embedding")


def sincos_1d(positions: Tensor, width: int, *, temperature: float = 1e4) -> Tensor:
    """[sin, cos] of positions times omega_j = temperature^(-j / (width/2 - 1)), j = 0..width/2 - 1: (n, width)."""
    half = width // 2
    omega = temperature ** (-torch.arange(half, dtype=torch.float64) / max(half - 1, 1))
    angles = positions.double()[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(height: int, width: int, dim: int) -> Tensor:
    """[sin x, cos x, sin y, cos y] on a grid, rows first: (height * width, dim)."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.cat([sincos_1d(x.flatten(), dim // 2), sincos_1d(y.flatten(), dim // 2)], dim=1)


def position_writes(model: nn.Module, position: Position) -> Iterator[Write]:
    """Plan the embedding asked for.

    Raises: WeightError if the model has no learned position embedding of that form.
    """
    if position == "keep":
        return
    yield _vision_table(model) if position == "sincos2d" else _sequence_table(model)


def _vision_table(model: nn.Module) -> Write:
    table = getattr(model, "pos_embed", None)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not isinstance(table, nn.Parameter) or table.dim() != 3 or grid is None or table.shape[2] % 4:
        raise WeightError(
            "position='sincos2d' needs a learned pos_embed (1, tokens, width divisible by 4) and a "
            "patch_embed.grid_size, as timm's ViT has; this model has none. Use position='keep'."
        )
    height, width = grid
    patches = sincos_2d(height, width, table.shape[2])
    # Class and register tokens come first and have no place on the grid: zero rows.
    prefix = table.shape[1] - height * width
    values = torch.cat([torch.zeros(prefix, table.shape[2], dtype=torch.float64), patches])[None]
    return Write("pos_embed", table, values.to(table.device, table.dtype))


def _sequence_table(model: nn.Module) -> Write:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in EMBEDDING_NAMES:
            table = module.weight
            if table.shape[1] % 2:
                break
            values = sincos_1d(torch.arange(table.shape[0]), table.shape[1])
            return Write(name, table, values.to(table.device, table.dtype))
    raise WeightError(
        f"position='sincos1d' needs an nn.Embedding of even width named one of {', '.join(EMBEDDING_NAMES)}; "
        "this model has none. Use position='keep'."
    )

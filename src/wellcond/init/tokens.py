"""Where a model makes its tokens: embeddings of words or patches, learned positions, class and register tokens.

Embeddings are the vectors that depend on the word or the patch, positions those that do not. Segments of BERT (token
types) are neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from wellcond.attention.blocks import POSITIONS
from wellcond.attention.find import scan_attention
from wellcond.attention.record import root_mean_square
from wellcond.attention.site import AttentionSite, is_matrix
from wellcond.errors import WeightError
from wellcond.init.apply import Write

CONSTANT_TOKENS = ("cls_token", "dist_token", "distillation_token", "reg_token", "register_tokens")
PATCHES = ("patch_embed", "patch_embeddings", "stem")
Position = Literal["keep", "sincos2d", "sincos1d"]
WORD_NAMES = tuple(
    "word_embedding word_embeddings wte tok_emb tok_embeddings token_embedding token_embeddings embed_tokens".split()
)
"""Tables of words where no method of the model says which one it is: Crammed BERT, nanoGPT, nanochat, torchtitan."""
EMBEDDING_NAMES = ("wpe", "position_embeddings", "position_embedding", "embed_positions", "pos_emb", "pos_embedding")


def find_positions(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of learned positions, and of tokens that depend on no input; none where there are no positions."""
    learned = list(learned_positions(model))
    if learned:
        yield from learned
        named = model.named_parameters()
        yield from ((name, parameter) for name, parameter in named if name.rpartition(".")[2] in CONSTANT_TOKENS)


def learned_positions(
    model: nn.Module, sites: Sequence[AttentionSite] | None = None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Tables of positions that are added to the tokens, not those inside an attention layer.

    Attention layers are those of the classes of `sites`; without them, the model is searched.
    """
    known = scan_attention(model).sites if sites is None else sites
    classes = {type(site.module) for site in known}
    attentions = tuple(f"{name}." for name, module in model.named_modules() if type(module) in classes)
    for name, parameter in model.named_parameters():
        if not name.startswith(attentions) and any(part in name for part in POSITIONS):
            yield name, parameter


def position_tables(model: nn.Module, sites: Sequence[AttentionSite]) -> Iterator[tuple[str, nn.Parameter]]:
    """Learned positions that are added to the tokens as they are, not multiplied by other numbers first."""
    for name, parameter in learned_positions(model, sites):
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding) or not is_matrix(owner):
            yield name, parameter


def embedding_spread(embedded: Tensor, layer: nn.Module) -> float:
    """Root mean square of what an embedding layer puts out around its mean over tokens and samples."""
    channels = 1 if isinstance(layer, nn.Conv2d) else -1
    rows = embedded.float().movedim(channels, -1).flatten(0, -2)
    return root_mean_square(rows - rows.mean(0))


def find_embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that decide the size of embeddings: of words where there are any, else of patches."""
    for name, module in embedding_layers(model):
        yield from ((f"{name}.{own}", parameter) for own, parameter in module.named_parameters(recurse=False))


def embedding_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers whose outputs are the embeddings of words where there are any, else of patches."""
    words: list[tuple[str, nn.Module]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _says_words(model, name, module)
    ]
    return words or list(_patch_layers(model))


def _says_words(model: nn.Module, name: str, module: nn.Embedding) -> bool:
    input_embeddings = getattr(model, "get_input_embeddings", None)  # of Hugging Face
    if callable(input_embeddings):
        with contextlib.suppress(NotImplementedError):  # of models with several inputs, such as CLIP
            return module is input_embeddings()
    return name.rpartition(".")[2] in WORD_NAMES


def _patch_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The last layer with weights of every patch embedding that is not inside another."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name.rpartition(".")[2] in PATCHES and not inside:
            found.append(name)
            layers = [
                (f"{name}.{path}" if path else name, layer)
                for path, layer in module.named_modules()
                if any(True for _ in layer.parameters(recurse=False))
            ]
            yield from layers[-1:]


# Sinusoidal position embeddings, written into the learned ones.


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

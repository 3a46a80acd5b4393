"""A sample of what a language model writes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.distributed import is_held_together
from wellcond.attention.effective import is_conditioned
from wellcond.conditioning.apply import folded
from wellcond.lab.settings import RecipeError
from wellcond.lab.tokenizers.base import Tokenizer, document_end


@torch.no_grad()
def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str = "",
    num_tokens: int = 100,
    temperature: float = 1.0,
    seed: int = 0,
    *,
    context: int | None = None,
) -> str:
    """The prompt and what the model writes behind it, up to the end of the document.

    The model is always run `num_tokens` times: where its weights are sharded, processes wait for each other.

    Args:
        model: Causal language model; its mode and the global random state are as before afterwards.
        tokenizer: The one it was trained with.
        prompt: Beginning of the document; with none the model begins one.
        num_tokens: At most so many are written.
        temperature: Logits are divided by it; 0 takes the likeliest token each time.
        seed: Of the generator that draws the tokens, on the CPU, so that every device draws the same.
        context: Only so many of the last tokens are seen; by default what the model's configuration says.

    Raises: RecipeError if the model knows fewer tokens than the tokeniser.
    """
    if temperature < 0 or num_tokens < 1:
        raise RecipeError(f"expected num_tokens from 1 and a temperature from 0, found {num_tokens} and {temperature}")
    end = document_end(tokenizer)
    given = [end, *(int(id) for id in tokenizer.encode_batch([prompt])[0])]
    seen = (
        context or getattr(getattr(model, "config", None), "max_position_embeddings", None) or len(given) + num_tokens
    )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    tokens = list(given)
    # Every token is a forward pass, in which a correction would be computed again.
    folding = is_conditioned(model) and not is_held_together(model)
    try:
        with folded(model) if folding else contextlib.nullcontext():
            for _ in range(num_tokens):
                output: Any = model(input_ids=torch.tensor([tokens[-seen:]], device=device), use_cache=False)
                logits = (output if isinstance(output, Tensor) else output.logits)[0, -1].double().cpu()
                if len(logits) < tokenizer.vocabulary_size:
                    raise RecipeError(
                        f"the model knows {len(logits)} tokens, and the tokeniser has {tokenizer.vocabulary_size}"
                    )
                # A model may have more embeddings than there are tokens.
                tokens.append(_draw(logits[: tokenizer.vocabulary_size], temperature, generator))
    finally:
        for module, training in was_training:
            module.training = training
    written = tokens[len(given) :]
    return tokenizer.decode(given + (written[: written.index(end)] if end in written else written))


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # The place where the cumulative chances pass a uniform number: a change of the logits by rounding moves the borders
    # between tokens by as little, so that a folded model draws the same text but for a very rare draw at a border.
    chances = (logits / temperature).softmax(0).cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * chances[-1]
    return min(int(torch.searchsorted(chances, drawn, right=True)), len(logits) - 1)
